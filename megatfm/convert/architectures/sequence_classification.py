"""Encoders with a task head: BertForSequenceClassification, …TokenClassification, …MultipleChoice, …QuestionAnswering,
and those of related models.

Each is the bare model, its pooler if the class has one, and a linear layer. RoBERTa's and Longformer's sequence
classifiers have a separate pooler.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatfm.config import Config, ModelConfig, TextClassifierHeadConfig
from megatfm.convert.architecture import ARCHITECTURES, HEAD_PREFIXES, Rules, register_architecture
from megatfm.convert.architectures import bert as bert  # registers the classes that these are based on
from megatfm.convert.architectures import sparse_encoders as sparse_encoders
from megatfm.convert.hf_config import Json, Key, used
from megatfm.convert.weight_mapping import WeightMapping, rename_linear
from megatfm.errors import UsageError

PROBLEMS = {
    "cross_entropy": "single_label_classification",
    "binary_cross_entropy": "multi_label_classification",
    "squared_error": "regression",
}
"""Loss of a head → problem_type of config.json."""
LABELS: dict[str, Key] = {
    "id2label": used(None, dict, None),
    "num_labels": used(None, int, None),
    "problem_type": used(None, str, None),
}
DROPOUT: dict[str, Key] = {"classifier_dropout": used(None, float, int, None)}
HeadReader = Callable[[Json, ModelConfig], Json]
HeadWriter = Callable[[Any], Json]


def register_task_class(
    name: str, base: str, module: str, read_head: HeadReader, write_head: HeadWriter, tensors: Sequence[str],
    keys: dict[str, Key],
) -> None:  # fmt: skip
    """Register a class: that of `base` with another head.

    module: name of the head in megatfm. tensors: names of the pooler, if there is one, and of the linear layer.
    write_head: raises UsageError for another kind of head. keys: of config.json, for the head.
    """
    architecture = ARCHITECTURES.get(base)

    def read(hf_config: Json) -> ModelConfig:
        config = architecture.config_from_hf(
            {key: value for key, value in hf_config.items() if key not in keys}
        )
        head = read_head(hf_config, config)
        return config.with_changes(
            {"lm_head": {"name": "none", "bias": False}, "extra_heads": {module: head}}
        )

    def write(config: ModelConfig) -> Json:
        if config.extra_heads.keys() != {module}:
            raise UsageError(
                f"a {name} has one head: model.extra_heads has {', '.join(config.extra_heads) or 'none'}"
            )
        return {**architecture.config_to_hf(config), **write_head(config.extra_heads[module])}

    register_architecture(
        name,
        replace(
            architecture,
            keys={**architecture.keys, **keys},
            config_from_hf=read,
            config_to_hf=write,
            weight_mappings=_with_head(architecture.weight_mappings, module, tensors),
            ignored_tensors=tuple(
                pattern
                for pattern in architecture.ignored_tensors
                if not any(re.search(pattern, f"{tensor}.weight") for tensor in tensors)
            ),
        ),
    )


def _with_head(rules: Rules, module: str, tensors: Sequence[str]) -> Rules:
    parts = ["pooler", "classifier"][-len(tensors) :]
    head: Sequence[WeightMapping] = [
        rule
        for part, tensor in zip(parts, tensors, strict=True)
        for rule in rename_linear(f"{module}.{part}", tensor, bias=True)
    ]
    return lambda config: [
        *(
            replace(rule, tied_names=())
            for rule in rules(config)
            if not rule.megatfm[0].startswith(HEAD_PREFIXES)
        ),
        *head,
    ]


def read_classifier(
    hf_config: Json, config: ModelConfig, *, pooler: str = "tanh", token: str = "first"
) -> Json:
    """Return megatfm's section of a classifier head. As in transformers, one label without problem_type is
    regression."""
    labels, count = hf_config.get("id2label"), hf_config.get("num_labels")
    losses = {problem: loss for loss, problem in PROBLEMS.items()}
    classes = count if count is not None else 2 if labels is None else len(labels)
    problem = hf_config.get("problem_type") or PROBLEMS["squared_error" if classes == 1 else "cross_entropy"]
    if problem not in losses:
        raise UsageError(f"config.json: problem_type = {problem!r}: megatfm has {', '.join(losses)}")
    return {
        "name": "text_classifier",
        "classes": classes,
        "loss": losses[problem],
        "pooler": pooler,
        "token": token,
        "dropout": _dropout(hf_config, config),
    }


def write_classifier(head: Any, *, pooler: str = "tanh", token: str = "first") -> Json:
    """Return the keys of config.json for a head. Raises UsageError for another kind of head."""
    if not isinstance(head, TextClassifierHeadConfig) or head.both_orders:
        raise UsageError("the class has a head 'text_classifier', over one text or pair")
    if (head.pooler, head.token) != (pooler, token):
        raise UsageError(f"the class has a head with pooler = {pooler!r} and token = {token!r}")
    return {**label_keys([], head), "classifier_dropout": head.dropout}


def read_token_classifier(hf_config: Json, config: ModelConfig) -> Json:
    """Return megatfm's section of a token classifier."""
    return read_classifier(hf_config, config, pooler="none", token="all")


def write_token_classifier(head: Any) -> Json:
    """Return the keys of a token classifier. Raises UsageError for another kind of head."""
    return write_classifier(head, pooler="none", token="all")


def read_choices(hf_config: Json, config: ModelConfig) -> Json:
    """Return megatfm's section of a multiple-choice head."""
    return {"name": "multiple_choice", "dropout": _dropout(hf_config, config)}


def write_choices(head: Any) -> Json:
    """Return the keys of a multiple-choice head. Raises UsageError for another kind of head."""
    if head.name != "multiple_choice" or head.pooler != "tanh":
        raise UsageError("the class has a head 'multiple_choice' with a pooler")
    return {"classifier_dropout": head.dropout}


def read_spans(hf_config: Json, config: ModelConfig) -> Json:
    """Return megatfm's section of a question-answering head."""
    return {"name": "span_extraction"}


def write_spans(head: Any) -> Json:
    """Return the keys of a question-answering head. Raises UsageError for another kind of head."""
    if head.name != "span_extraction":
        raise UsageError("the class has a head 'span_extraction'")
    return {}


def _dropout(hf_config: Json, config: ModelConfig) -> float:
    dropout = hf_config.get("classifier_dropout")
    return config.dropout if dropout is None else float(dropout)


def label_keys(labels: Sequence[str], head: Any) -> Json:
    """Return the keys of config.json for the labels of a classifier head, or for the values of a regression.

    labels: names; if empty, LABEL_0, LABEL_1, …
    """
    if head.loss == "squared_error":
        return {"num_labels": head.classes, "problem_type": PROBLEMS[head.loss]}
    names = list(labels) or [f"LABEL_{i}" for i in range(head.classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": PROBLEMS[head.loss],
    }


def task_labels(config: Config) -> Json:
    """Return the keys of config.json that name the labels of a fine-tuning run's task."""
    heads = [head for head in config.model.extra_heads.values() if isinstance(head, TextClassifierHeadConfig)]
    return label_keys(config.task.labels, heads[0]) if config.task and heads else {}


# Pooler and linear layer of sequence classifiers, and pooler of other classes. Longformer has no other classes here:
# in transformers, its first token is global only in sequence classifiers.
FAMILIES = {
    "Bert": (["bert.pooler.dense", "classifier"], "bert.pooler.dense"),
    "Roberta": (["classifier.dense", "classifier.out_proj"], "roberta.pooler.dense"),
    "Albert": (["albert.pooler", "classifier"], "albert.pooler"),
    "Longformer": (["classifier.dense", "classifier.out_proj"], None),
}
for family, (classifier_tensors, pooler_tensor) in FAMILIES.items():
    masked, classes = f"{family}ForMaskedLM", LABELS | DROPOUT
    register_task_class(
        f"{family}ForSequenceClassification", masked, "sentence", read_classifier, write_classifier,
        classifier_tensors, classes,
    )  # fmt: skip
    if pooler_tensor is None:
        continue
    register_task_class(
        f"{family}ForTokenClassification", masked, "sentence", read_token_classifier, write_token_classifier,
        ["classifier"], classes,
    )  # fmt: skip
    register_task_class(
        f"{family}ForMultipleChoice", masked, "sentence", read_choices, write_choices,
        [pooler_tensor, "classifier"], DROPOUT,
    )  # fmt: skip
    register_task_class(
        f"{family}ForQuestionAnswering", masked, "span", read_spans, write_spans, ["qa_outputs"], {}
    )
