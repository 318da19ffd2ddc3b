"""Evaluation tasks during training: the engine computes the likelihoods of answers under its own layout.

Prompts with answers are packed into rows like documents. The head over the vocabulary records the loss of each token.
The batch fields `examples` and `answer_positions` say to which answer a token belongs, on whichever rank it was
computed. An answer's losses are summed exactly: packing, batches and ranks affect results only by the rounding of token
losses.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.config import AnswersObjective, Config
from megatfm.data.dataset import SizedRowDataset
from megatfm.data.packed_rows import PackedBlock, collate, pack_in_memory
from megatfm.data.sequences import DocumentChunk, Fields, PackingConfig
from megatfm.data.sequences import Field as FieldSpec
from megatfm.engines.interface import Engine
from megatfm.engines.registry import ENGINES
from megatfm.errors import UsageError
from megatfm.layers.output_head import LMHead
from megatfm.objectives.base import Batch, Example, Losses, SpecialTokens
from megatfm.objectives.supervised import Answers
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey
from megatfm.tasks.predictions import get_engine_model
from megatfm.tasks.question_scores import Likelihood, average_metrics, score_questions
from megatfm.tasks.questions import EvaluationTask, TextPair, list_scored_pairs, open_evaluation_task, split_pair
from megatfm.tokenizers import Tokenizer
from megatfm.train.corpora import get_special_tokens
from megatfm.train.evaluation import evaluate

TokenLosses = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
"""Example index, index of the token in its answer, and loss of each token, [n] each."""


class AnswerLikelihood(Answers):
    """Objective whose loss counts only answers; its batches say to which example and answer token a target belongs."""

    likelihood_term = None

    def __init__(self, special: SpecialTokens, config: Config) -> None:
        super().__init__(special, AnswersObjective(), config.model, (config.data.sequence_length,))
        self.fields = {
            "tokens": FieldSpec(pad_value=special.pad),
            "targets": FieldSpec(pad_value=IGNORE),
            "examples": FieldSpec(pad_value=-1),
            "answer_positions": FieldSpec(),
        }
        self.recorder = TokenLossRecorder()

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        """Return an example with its index in `examples`, and the index of each answer token in `answer_positions`."""
        fields = super().build_example(chunk, key)
        counted = fields["targets"] != IGNORE
        return {
            **fields,
            "examples": np.where(counted, key.sample, -1),
            "answer_positions": np.where(counted, np.cumsum(counted) - 1, 0),
        }

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the loss. The recorder stores the loss of each token, on ranks that hold the head."""
        index_fields = ("examples", "answer_positions", "full_row_examples")
        inputs = {name: tensor for name, tensor in batch.items() if name not in index_fields}
        with self.recorder.recording(batch):
            losses = dict(model(**inputs).losses or {})
        return {term: loss for term, loss in losses.items() if term in self.loss_weights}


@dataclass
class TokenLossRecorder:
    """Records the losses of tokens at this rank's head over the vocabulary."""

    recorded: list[TokenLosses] = field(default_factory=list)
    """One entry for each batch."""
    _calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def allocate_losses(self, targets_BT: Tensor, indices_M: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a tensor [M] into which a call of the head writes its losses."""
        assert indices_M is None  # causal heads compute all tokens
        losses_M = targets_BT.new_zeros(targets_BT.numel(), dtype=dtype)
        self._calls.append((targets_BT, losses_M))
        return losses_M

    @contextmanager
    def recording(self, batch: Batch) -> Iterator[None]:
        """Record the losses of a batch's own targets, but not those of multi-token prediction."""
        self._calls.clear()
        yield
        for targets_BT, losses_M in self._calls:
            if targets_BT.data_ptr() == batch["targets"].data_ptr():
                counted_BT = batch["examples"] >= 0
                losses_BT = losses_M.view(targets_BT.shape).double()
                columns = (batch["examples"][counted_BT], batch["answer_positions"][counted_BT], losses_BT[counted_BT])
                examples, answer_positions, losses = (column.cpu().numpy() for column in columns)
                self.recorded.append((examples, answer_positions, losses))
        self._calls.clear()

    def gather(self) -> dict[int, list[float]]:
        """Return example → losses of its tokens. Tokens that several ranks have computed count once. A collective."""
        recorded_by_rank = object_collectives.all_gather_object(self.recorded)
        examples, answer_positions, losses = (
            np.concatenate(columns) for columns in zip(*chain.from_iterable(recorded_by_rank), strict=True)
        )
        _, first = np.unique(np.stack([examples, answer_positions]), axis=1, return_index=True)
        losses_by_example: dict[int, list[float]] = {}
        for example, loss in zip(examples[first].tolist(), losses[first].tolist(), strict=True):
            losses_by_example.setdefault(example, []).append(loss)
        return losses_by_example


@dataclass(frozen=True)
class InMemoryRows:
    """Dataset of the rows of one packed block, in stored order."""

    packed: PackedBlock
    row_tokens: int
    seed: int = 0
    warnings: Sequence[str] = ()
    can_split_rows: bool = False

    def __len__(self) -> int:
        return self.packed.n_rows

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """See `RowDataset`."""
        padding = self.packed.padding
        return collate(
            [[(padding, 0) if position is None else (self.packed, position % len(self))] for position in positions]
        )

    def epoch(self, position: int) -> int:
        """See `RowDataset`."""
        return position // len(self)

    def order_config(self) -> dict[str, str | int | bool]:
        """See `RowDataset`."""
        return {}


class TaskEvaluator:
    """Evaluates the tasks of `evaluate.tasks`, which it tokenizes once. Constructor and `evaluate` are collectives.

    Raises UsageError for a model, an engine or a task that can't be evaluated during training.
    """

    def __init__(self, engine: Engine, config: Config, tokenizer: Tokenizer | None) -> None:
        check_supported(engine, config, tokenizer)
        assert tokenizer is not None
        self._engine, self._config, self._special = engine, config, get_special_tokens(tokenizer)
        self._tasks: list[tuple[EvaluationTask, list[TextPair], SizedRowDataset]] = []
        for name, path in config.evaluate.tasks.items():
            task = open_evaluation_task(path, name=name)
            if task.config.kind not in ("choice", "cloze"):
                raise UsageError(
                    f"evaluate.tasks.{name}: kind = {task.config.kind!r} has no likelihood: leave it out, and use "
                    "`megatfm evaluate --task` on checkpoints"
                )
            pairs = list_scored_pairs(task)
            self._tasks.append((task, pairs, self._pack(task, pairs, tokenizer)))

    def _pack(self, task: EvaluationTask, pairs: Sequence[TextPair], tokenizer: Tokenizer) -> SizedRowDataset:
        length = self._config.data.sequence_length
        objective = AnswerLikelihood(self._special, self._config)
        documents, members = [], []
        for pair in pairs:
            prompt, answer = split_pair(tokenizer, pair)
            tokens = [tokenizer.bos, *tokenizer.encode(prompt).tolist(), *answer]
            if not answer or len(tokens) > length + 1:
                reason = (
                    f"with its prompt has {len(tokens) - 1} tokens, more than data.sequence_length = {length}: use "
                    "shorter prompts or fewer shots"
                    if answer
                    else "has no tokens: give an answer with text"
                )
                raise UsageError(
                    f"evaluate.tasks.{task.name}: the answer {pair.answer!r:.60} after {prompt[-40:]!r} {reason}"
                )
            documents.append(np.array(tokens))
            members.append({"json": f'{{"trained": [[{len(tokens) - len(answer)}, {len(tokens)}]]}}'.encode()})
        packing = PackingConfig(objective, (length,), seed=0, pad_id=tokenizer.pad)
        return InMemoryRows(pack_in_memory(documents, packing, members=members), length)

    def evaluate(self, on_batch: Callable[[], None] = lambda: None) -> dict[str, dict[str, float]]:
        """Return the metrics of each task by its name. A collective."""
        return {
            task.name: average_metrics(task.config.kind, score_questions(task, self._score(pairs, rows, on_batch)))
            for task, pairs, rows in self._tasks
        }

    def _score(
        self, pairs: Sequence[TextPair], rows: SizedRowDataset, on_batch: Callable[[], None]
    ) -> Mapping[TextPair, Likelihood]:
        objective = AnswerLikelihood(self._special, self._config)
        heads = [module for module in get_engine_model(self._engine).modules() if isinstance(module, LMHead)]
        for head in heads:
            head.recorder = objective.recorder  # type: ignore[assignment]
        try:
            evaluate(self._engine, rows, objective, None, micro_batch=self._config.train.micro_batch, on_batch=on_batch)
        finally:
            for head in heads:
                head.recorder = None
        losses = objective.recorder.gather()
        return {pair: Likelihood(-math.fsum(losses[index]), len(losses[index])) for index, pair in enumerate(pairs)}


def check_supported(engine: Engine, config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise UsageError for a run whose model or engine can't score answers."""
    if tokenizer is None or config.model.family != "decoder" or config.objective.name != "causal":
        raise UsageError(
            "evaluate.tasks is for decoders that predict next tokens, not for model.family = "
            f"{config.model.family!r} with objective.name = {config.objective.name!r}: leave it out, and use `megatfm "
            "evaluate --task` on checkpoints"
        )
    if not ENGINES.has(config.parallel.engine, "loss_by_source"):
        raise UsageError(
            f"evaluate.tasks: parallel.engine = {config.parallel.engine!r} does not declare 'loss_by_source' among its "
            "features, which this needs: use parallel.engine = 'native', or leave it out"
        )
    n_heads = sum(isinstance(module, LMHead) for module in get_engine_model(engine).modules())
    if not sum(object_collectives.all_gather_object(n_heads)):
        raise UsageError("evaluate.tasks: the model has no head over the vocabulary: leave it out")
