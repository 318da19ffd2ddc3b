"""The reference of preferences: log-probabilities of answers, by the model that a run starts from."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.layers.initialisation import checkpoint_tensors, initialise_buffers
from megatfm.layers.lora import FACTORS
from megatfm.layers.output_head import LMHead, RowLossRecorder
from megatfm.models import build
from megatfm.ops.cross_entropy import IGNORE
from megatfm.train.init_from import identity_of

TOKENS_AT_ONCE = 2048
"""Tokens, padding included, that go through the model together."""


class ReferenceModel:
    """The model of `train.init_from`, in float32 and without dropout, opened when it is first asked.

    Adapters that the run adds start at 0, so the model without them is the reference.
    """

    def __init__(self, config: Config) -> None:
        """Raises UsageError for a run that starts from nothing, or from a part of another's weights."""
        if config.train.init_from is None or config.train.init_include:
            raise UsageError(
                "task.form = 'preference' compares with the whole model at the start: give it as --from, without "
                "train.init_include"
            )
        self._config, self._source = config, checkpoint.find_checkpoint(config.train.init_from)
        self._model: nn.Module | None = None

    @property
    def identity(self) -> str:
        """Identity of the model: the hash of its checkpoint's metadata."""
        identity = identity_of(self._source)
        assert isinstance(identity, dict)
        return str(identity["blake3"])

    def __call__(self, sequences: Sequence[tuple[NDArray[np.int64], tuple[int, int]]]) -> list[float]:
        """Return the log-probability of each sequence's answer, from `begin` to `end`, given the tokens before it."""
        scores = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda number: len(sequences[number][0]))
        while order:
            longest = len(sequences[order[-1]][0]) - 1
            count = max(1, TOKENS_AT_ONCE // longest)
            numbers, order = order[-count:], order[:-count]
            tokens = torch.zeros(len(numbers), longest, dtype=torch.int64)
            targets = torch.full_like(tokens, IGNORE)
            for row, number in enumerate(numbers):
                ids, (begin, end) = torch.from_numpy(sequences[number][0]), sequences[number][1]
                tokens[row, : len(ids) - 1] = ids[:-1]
                targets[row, begin - 1 : end - 1] = ids[begin:end]
            for number, score in zip(numbers, self._score(tokens, targets), strict=True):
                scores[number] = score
        return scores

    @torch.no_grad()
    def _score(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> list[float]:
        model = self._open()
        device = next(model.parameters()).device
        head, recorder, targets = model.head, RowLossRecorder(), targets_BT.to(device)
        assert isinstance(head, LMHead)
        head.recorder = recorder
        model(tokens_BT.to(device), targets=targets)
        losses = recorder.row_losses(targets)
        assert losses is not None
        return (-losses).tolist()

    def _open(self) -> nn.Module:
        if self._model is not None:
            return self._model
        stored = checkpoint.read_tensors(self._source, "model.")
        has_adapters = any(name.endswith(FACTORS) for name in stored)
        model_config = self._config.model
        model = build(model_config if has_adapters else model_config.model_copy(update={"lora": None}))
        initialise_buffers(model)
        for name, tensor in checkpoint_tensors(model).items():
            value = stored.get(f"model.{name}")
            if value is None or value.shape != tensor.shape:
                raise UsageError(
                    f"train.init_from = {self._source}: has no {name} {list(tensor.shape)} of this model: take "
                    "the weights of a model of these sizes"
                )
            tensor.data.copy_(value)
        device = self._config.train.device
        use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self._model = model.eval().to("cuda" if use_gpu else "cpu")
        return self._model
