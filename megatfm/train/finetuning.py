"""Completes the config of a fine-tuning run from the task's files and the pretrained checkpoint; the reference model of
preference optimization.
"""

import math
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatfm import checkpoint, tokenizers
from megatfm.config import Config, ModelConfig, PreferenceObjective, SentenceHeadConfig, TaskConfig
from megatfm.config.key_migrations import migrate
from megatfm.config.section import Section
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise_buffers, list_checkpoint_tensors
from megatfm.layers.lora import is_factor
from megatfm.layers.output_head import LMHead, RowLossRecorder
from megatfm.models import build
from megatfm.ops.cross_entropy import IGNORE
from megatfm.tasks.corpus import TaskCorpus, check_files_exist, compute_class_weights, prepare_corpus, read_labels
from megatfm.tasks.examples import ExampleFormat
from megatfm.terminal import format_counted
from megatfm.tokenizers import Tokenizer
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.init_from import identify_checkpoint

TASK_CORPORA = "task"
"""Folder in the run directory that holds the tokenized files."""
HEAD_OF_FAMILY = {"encoder": "sentence", "decoder": "score", "xlnet": "sentence"}
"""Family → module name of the task's head. An encoder's has the name of BERT's head, to load its pooler."""
FAMILIES_OF_FORM = {"generation": ["decoder", "encoder_decoder"], "chat": ["decoder"]}
"""Task form → families that support it. Other forms are supported by all families of HEAD_OF_FAMILY."""
LOSSES = {
    "classification": "cross_entropy",
    "tagging": "cross_entropy",
    "multilabel": "binary_cross_entropy",
    "regression": "squared_error",
}
TASK_HEADS = {"span_extraction": "span_extraction", "multiple_choice": "multiple_choice"}
"""Task form → its head, and the objective of the same name. Other forms use a text classifier."""
UNSTORED_OPTIONS = ("dropout", "token", "class_weights")
"""Options of a head that don't change what its weights mean."""
MAX_BATCH_TOKENS = 2048
"""Largest number of tokens in a batch of the reference model, padding included."""


def resolve_task(config: Config) -> tuple[Config, list[str]]:
    """Tokenize a task's files; fill in corpora, labels, head, objective, weights to load, and steps.

    Returns the config and notes for the log. Raises UsageError if files, labels and model don't fit together.
    """
    task, tokenizer_path = _check_task(config)
    task = task.model_copy(update={"labels": read_labels(task)})
    task = task.model_copy(update={"class_weights": compute_class_weights(task)})
    tokenizer = tokenizers.load(tokenizer_path)
    config = config.with_changes(
        {
            "task.labels": task.labels,
            "task.class_weights": task.class_weights,
            "model.vocab_size": config.model.vocab_size or tokenizer.vocab_size,
            **(_make_head_changes(config, task) if task.has_head else _make_answer_changes(config, task)),
        }
    )
    if task.has_head:
        config = _train_head_beside_adapters(config)
        config = config.with_changes(
            {"train.init_include": config.train.init_include or choose_weights_to_load(config)}
        )
    corpora = {
        name: prepare_task_corpus(config, path, tokenizer)
        for name, path in (("train", task.train), ("validation", task.validation), ("test", task.test))
        if path
    }
    notes = [note for corpus in corpora.values() for note in corpus.notes]
    validation = {"validation": str(corpora["validation"].folder)} if "validation" in corpora else {}
    config = config.with_changes(
        {"data.train": str(corpora["train"].folder), "data.validation": validation, "data.mixture": {}}
    )
    config, n_rows = _set_steps(config)
    if task.epochs:
        notes.append(
            f"{corpora['train'].n_examples:,} examples in {n_rows:,} rows of {config.data.sequence_length} tokens, "
            f"{task.epochs:g} epoch{'s' * (task.epochs != 1)}: {format_counted(config.train.steps, 'step')} of "
            f"{format_counted(config.train.global_batch, 'row')} (train.global_batch)"
        )
    return config, notes


def _check_task(config: Config) -> tuple[TaskConfig, str]:
    """Return the config's task and tokenizer. Raises UsageError if one is missing, or the task is not for the model."""
    task, family = config.task, config.model.family
    if task is None:
        raise UsageError("the config has no [task]: say which files are trained on, for example task.train=reviews.csv")
    if config.data.tokenizer is None:
        raise UsageError(
            "data.tokenizer is missing: give that of the pretrained model, or start from the model by --from"
        )
    families = FAMILIES_OF_FORM.get(task.form, list(HEAD_OF_FAMILY))
    if family not in families:
        raise UsageError(
            f"task.form = {task.form!r} is not for model.family = {family!r}, but for {' and '.join(families)}: start "
            "from such a model"
        )
    if family == "encoder_decoder" and config.data.target_length is None:
        raise UsageError(
            "data.target_length is missing: an encoder-decoder has its answers in a row of their own: give the number "
            "of tokens of the longest answer, for example data.target_length=128"
        )
    check_files_exist(task)
    return task, config.data.tokenizer


def prepare_task_corpus(config: Config, path: str, tokenizer: Tokenizer, *, with_labels: bool = True) -> TaskCorpus:
    """Tokenize a file of a run's task into the run directory, unless this has been done."""
    assert config.task is not None
    folder = config.run_folder / TASK_CORPORA
    family = config.model.family
    example_format = ExampleFormat(
        config.data.sequence_length,
        target_length=config.data.target_length if family == "encoder_decoder" else None,
        is_causal=family == "decoder",
        ends_in_cls=family == "xlnet",
    )
    return prepare_corpus(
        path,
        config.task,
        tokenizer,
        example_format,
        folder,
        tokenizer_file=str(config.data.tokenizer),
        with_labels=with_labels,
        reference=ReferenceModel(config) if config.task.form == "preference" else None,
    )


def _make_answer_changes(config: Config, task: TaskConfig) -> dict[str, Any]:
    """Return the change of the objective to "answers", or to "preference" with the config's options for it."""
    if task.form != "preference":
        return {"objective": {"name": "answers"}}
    objective = config.objective
    return {
        "objective": objective.model_dump() if isinstance(objective, PreferenceObjective) else {"name": "preference"}
    }


def _make_head_changes(config: Config, task: TaskConfig) -> dict[str, Any]:
    """Return the changes of model and objective that replace all heads by the task's head."""
    name, kind = get_head_name(config), TASK_HEADS.get(task.form)
    form, family = task.form, config.model.family
    if form == "span_extraction" and task.lm_weight:
        raise UsageError(
            f"task.lm_weight = {task.lm_weight:g}: form = 'span_extraction' has no auxiliary loss: leave lm_weight out"
        )
    section: dict[str, Any] = {"name": kind or "text_classifier"}
    token = "all" if form == "tagging" else "first" if family == "encoder" else "last"
    if form != "span_extraction":
        section["token"] = token  # from the form: the default of a config's section would be wrong for some
    if kind is None:
        section |= {
            "classes": max(1, len(task.labels)),
            "loss": LOSSES[form],
            "both_orders": task.both_orders,
            "class_weights": task.class_weights,
        }
    earlier = _get_options_if_kind(_read_earlier_heads(config).get(name), section["name"])
    configured = _get_options_if_kind(config.model.extra_heads.get(name), section["name"])
    section = {**(earlier or _default_head_options(config.model, form)), **configured, **section}
    lm_head = {} if task.lm_weight else {"model.lm_head": {"name": "none", "bias": False}}
    objective: dict[str, Any] = {"name": kind or "text_classification"}
    if form != "span_extraction":
        objective["lm_weight"] = task.lm_weight
    return {**lm_head, "model.extra_heads": {name: section}, "objective": objective}


def _default_head_options(model: ModelConfig, form: str) -> dict[str, Any]:
    """Return the options of the head that transformers has for such a model, so that it can be exported."""
    is_pooled = form not in ("tagging", "span_extraction")
    if model.family == "decoder":
        return {"pooler": "none"} | ({"bias": False} if is_pooled and form not in TASK_HEADS else {})
    has_tanh_pooler = any(isinstance(head, SentenceHeadConfig) for head in model.extra_heads.values())
    is_modernbert = model.family == "encoder" and model.position.name == "rope" and not has_tanh_pooler
    is_electra = getattr(model.embedding, "dim", None) not in (None, model.d_model) and not model.distinct_layers
    if is_modernbert:
        return {"pooler": "transform"}
    pooler = "gelu" if is_electra or model.attention.name in ("deberta", "deberta_v2") else "tanh"
    pooler = "activation" if model.attention.pattern.name == "bigbird" else pooler
    return {"pooler": pooler if is_pooled else "none"}


def _read_earlier_heads(config: Config) -> Mapping[str, Any]:
    """Return the heads of the run's newest checkpoint, if the run has one: it goes on with the same head."""
    path = checkpoint.find_latest(config.run_folder / "checkpoints")
    saved = migrate(checkpoint.read_state(path).get("config")) if path is not None else None
    heads = saved.get("model", {}).get("extra_heads") if isinstance(saved, Mapping) else None
    return heads or {}


def _get_options_if_kind(head: Any, kind: str) -> dict[str, Any]:
    """Return the options of a head that are set, if it is of this kind; else none."""
    if isinstance(head, Section):
        return head.model_dump(exclude_unset=True) if getattr(head, "name", None) == kind else {}
    return dict(head) if head and head.get("name") == kind else {}


def get_head_name(config: Config) -> str:
    """Return the module name of the task's head."""
    is_span = config.task is not None and config.task.form == "span_extraction"
    return "span" if is_span else HEAD_OF_FAMILY[config.model.family]


def _train_head_beside_adapters(config: Config) -> Config:
    """Return the config with the task's head among the weights that are trained beside adapters."""
    lora, pattern = config.model.lora, f"{get_head_name(config)}.*"
    if lora is None or pattern in lora.trained:
        return config
    return config.with_changes({"model.lora.trained": [*lora.trained, pattern]})


def choose_weights_to_load(config: Config) -> list[str]:
    """Return patterns of the pretrained weights to load; none without `train.init_from`.

    These are the stack of blocks, the language model head if the task uses it, and the task's head if it was trained
    for the same labels in the same order, otherwise BERT's pooler if stored.
    """
    if config.train.init_from is None:
        return []
    path = checkpoint.find_checkpoint(Path(config.train.init_from))
    stored = checkpoint.read_tensor_specs(path)
    head = get_head_name(config)
    section = config.model.extra_heads[head]
    is_pooled = getattr(section, "pooler", "none") != "none" and not getattr(section, "layers", ())
    head_patterns = []
    if has_same_head(config, checkpoint.read_state(path)):
        head_patterns = [f"{head}.*"]
    elif is_pooled and any(name.startswith(f"model.{head}.pooler.") for name in stored):
        head_patterns = [f"{head}.pooler.*"]
    has_lm_head = config.task and config.task.lm_weight and any(n.startswith("model.head.") for n in stored)
    stack = "encoder" if config.model.family == "xlnet" else config.model.family
    return [f"{stack}.*", *head_patterns, *["head.*"] * bool(has_lm_head)]


def has_same_head(config: Config, state: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint with this state has the head of a run's task, trained for the same labels."""
    saved, name = migrate(state.get("config")), get_head_name(config)
    if not isinstance(saved, Mapping) or config.task is None:
        return False
    stored_section = (saved.get("model", {}).get("extra_heads") or {}).get(name)
    head = config.model.extra_heads[name]
    section = head.model_dump(mode="json")
    defaults = {key: field.get_default(call_default_factory=True) for key, field in type(head).model_fields.items()}
    if stored_section is None or any(
        {**defaults, **stored_section}.get(key) != value
        for key, value in section.items()
        if key not in UNSTORED_OPTIONS
    ):
        return False
    return section["name"] != "text_classifier" or get_stored_labels(state) == config.task.labels


def get_stored_labels(state: Mapping[str, Any]) -> list[str]:
    """Return the labels of a checkpoint's head in the order of its classes; empty where it names none.

    A fine-tuning run has them in its task, a converted folder in what it keeps of config.json.
    """
    saved = migrate(state.get("config"))
    if isinstance(saved, Mapping) and (task := saved.get("task")):
        return list(task.get("labels", ()))
    origin = state.get("origin")
    stored_config = origin.get("config", {}).get("id2label") if isinstance(origin, Mapping) else None
    if not stored_config or not isinstance(stored_config.get("theirs"), Mapping):
        return []
    return [str(label) for _, label in sorted(stored_config["theirs"].items(), key=lambda item: int(item[0]))]


def _set_steps(config: Config) -> tuple[Config, int]:
    """Return the config with the steps of the task's epochs and an evaluation after each, and the number of rows."""
    assert config.task is not None
    _, tokenizer = open_tokenizer(config)
    rows = open_corpora(config, tokenizer).train
    assert isinstance(rows, Sized)  # one corpus, not a mixture
    n_rows, global_batch = len(rows), config.train.global_batch
    changes: dict[str, Any] = {}
    if config.task.epochs:
        changes["train.steps"] = max(1, round(config.task.epochs * n_rows / global_batch))
    if not config.evaluate.every:
        changes["evaluate.every"] = max(1, math.ceil(n_rows / global_batch))  # once an epoch
    try:
        return config.with_changes(changes), n_rows
    except UsageError as error:
        raise UsageError(f"the steps of task.epochs = {config.task.epochs} over {config.task.train}: {error}") from None


class ReferenceModel:
    """Computes log-probabilities of answers by the model of `train.init_from`, in float32 and without dropout.

    The model is loaded at its first use. Adapters that the run adds are left out: they start at zero, so don't change
    the initial model.
    """

    def __init__(self, config: Config) -> None:
        """Raises UsageError unless the run starts from a complete model."""
        if config.train.init_from is None or config.train.init_include:
            raise UsageError(
                "task.form = 'preference' compares with the complete initial model: give it as --from, without "
                "train.init_include"
            )
        self._config, self._source = config, checkpoint.find_checkpoint(config.train.init_from)
        self._model: nn.Module | None = None

    @property
    def identity(self) -> str:
        """Identity of the model: the hash of its checkpoint's metadata."""
        identity = identify_checkpoint(self._source)
        assert isinstance(identity, dict)
        return str(identity["blake3"])

    def __call__(self, sequences: Sequence[tuple[NDArray[np.int64], tuple[int, int]]]) -> list[float]:
        """Return the log-probability of each sequence's answer, given the tokens before it.

        sequences: token ids [T], and begin and end of the answer in them.
        """
        scores = [0.0] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]))
        while order:
            length = len(sequences[order[-1]][0]) - 1
            batch_size = max(1, MAX_BATCH_TOKENS // length)
            indices, order = order[-batch_size:], order[:-batch_size]
            tokens = torch.zeros(len(indices), length, dtype=torch.int64)
            targets = torch.full_like(tokens, IGNORE)
            for row, index in enumerate(indices):
                ids, (begin, end) = torch.from_numpy(sequences[index][0]), sequences[index][1]
                tokens[row, : len(ids) - 1] = ids[:-1]
                targets[row, begin - 1 : end - 1] = ids[begin:end]
            for index, score in zip(indices, self._score(tokens, targets), strict=True):
                scores[index] = score
        return scores

    @torch.no_grad()
    def _score(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> list[float]:
        model = self._load()
        device = next(model.parameters()).device
        head, recorder, targets = model.head, RowLossRecorder(), targets_BT.to(device)
        assert isinstance(head, LMHead)
        head.recorder = recorder
        model(tokens_BT.to(device), targets=targets)
        losses = recorder.sum_losses_by_row(targets)
        assert losses is not None
        return (-losses).tolist()

    def _load(self) -> nn.Module:
        if self._model is not None:
            return self._model
        stored = checkpoint.read_tensors(self._source, "model.")
        has_adapters = any(map(is_factor, stored))
        model_config = self._config.model
        model = build(model_config if has_adapters else model_config.model_copy(update={"lora": None}))
        initialise_buffers(model)
        for name, tensor in list_checkpoint_tensors(model).items():
            value = stored.get(f"model.{name}")
            if value is None or value.shape != tensor.shape:
                raise UsageError(
                    f"train.init_from = {self._source}: lacks {name} {list(tensor.shape)} of this model: start from a "
                    "model of the same sizes"
                )
            tensor.data.copy_(value)
        device = self._config.train.device
        use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self._model = model.eval().to("cuda" if use_gpu else "cpu")
        return self._model
