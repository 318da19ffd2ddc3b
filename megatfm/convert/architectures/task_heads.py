"""Models with a task head: BertFor… SequenceClassification, TokenClassification, MultipleChoice and
QuestionAnswering, those of its relatives and XLNet, and decoders' heads of classes, tags and answers.

Each is the bare model, a pooler if the class has one, and a linear layer. RoBERTa's, Longformer's and ELECTRA's
sequence classifiers have a separate pooler; ModernBERT's pooler is a dense layer, its activation and a norm.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatfm.config import Config, ModelConfig, TextClassifierHeadConfig
from megatfm.convert.architecture import ARCHITECTURES, MapWeights, drop_head_mappings, register_architecture
from megatfm.convert.architectures import bert as bert  # registers the classes that these are based on
from megatfm.convert.architectures import deberta as deberta
from megatfm.convert.architectures import modernbert as modernbert
from megatfm.convert.architectures import sparse_encoders as sparse_encoders
from megatfm.convert.architectures import xlnet as xlnet
from megatfm.convert.hf_config import Json, Key, ignored, supported_values, used
from megatfm.convert.weight_mapping import WeightMapping, rename_linear
from megatfm.errors import UsageError

PROBLEMS = {
    "cross_entropy": "single_label_classification",
    "binary_cross_entropy": "multi_label_classification",
    "squared_error": "regression",
}
"""Loss of a head → problem_type of config.json."""
TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
"""Ends of the classes' names."""
POOLED_TASKS = ("SequenceClassification", "MultipleChoice")
UnusedTensors = Callable[[Mapping[str, Any], Container[str]], Sequence[str]]
LABELS: dict[str, Key] = used(id2label=(None, dict, None), num_labels=(None, int, None), problem_type=(None, str, None))
DROPOUT: dict[str, Key] = used(classifier_dropout=(None, float, int, None))


@dataclass(frozen=True)
class HeadTensors:
    """Names of a head's tensors in files: its last layer, and the pooler and its norm where the class has them."""

    classifier: str
    pooler: str = ""
    norm: str = ""
    has_bias: bool = True

    def map(self, module: str, config: ModelConfig) -> Sequence[WeightMapping]:
        """Map the head `module`."""
        has_bias = getattr(config.extra_heads[module], "pooler_bias", True)
        norm_bias = bool(getattr(config.norm, "bias", True))
        return [
            *(rename_linear(f"{module}.pooler", self.pooler, bias=has_bias) if self.pooler else []),
            *(rename_linear(f"{module}.pooler_norm", self.norm, bias=norm_bias) if self.norm else []),
            *rename_linear(f"{module}.classifier", self.classifier, bias=self.has_bias),
        ]

    def matches(self, pattern: str) -> bool:
        """Return whether a regular expression matches a tensor of the head."""
        names = (name for name in (self.pooler, self.norm, self.classifier) if name)
        return any(re.search(pattern, f"{name}.weight") for name in names)


@dataclass(frozen=True)
class HeadFormat:
    """A head of ours, as a class of transformers has it.

    options: what the class decides of it. dropout: key of config.json for its dropout; empty: the model's. module: name
    of the head in our model. pooler_bias: key of config.json for its pooler's bias; empty: there is always one.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: str = "classifier_dropout"
    module: str = "sentence"
    pooler_bias: str = ""

    def read(self, hf_config: Json, config: ModelConfig) -> Json:
        """Return our head. One label without a problem_type is a number, as there. Raises UsageError."""
        dropout = hf_config.get(self.dropout) if self.dropout else None
        head = {
            "name": self.name,
            "dropout": config.dropout if dropout is None else float(dropout),
            **self.options,
            **({"pooler_bias": hf_config[self.pooler_bias]} if self.pooler_bias else {}),
        }
        return head | _read_labels(hf_config) if self.name == "text_classifier" else head

    def write(self, head: Any) -> Json:
        """Return the keys of config.json that a head decides. Raises UsageError for another kind of head."""
        if head.name != self.name:
            raise UsageError(f"the class has a head {self.name!r}")
        written = make_label_keys([], head) if self.name == "text_classifier" else {}
        for key, value in ((self.dropout, head.dropout), (self.pooler_bias, head.pooler_bias)):
            if key:
                written[key] = value
        return written


def register_task_class(
    name: str,
    base: str,
    head_format: HeadFormat,
    tensors: HeadTensors,
    keys: Mapping[str, Key],
    unused_tensors: UnusedTensors | None = None,
    *,
    body_prefix: str = "",
) -> None:
    """Register a class: that of `base`, with a head of a task in place of its own.

    keys: of config.json that the head reads. unused_tensors: as in `Architecture`, for files whose head we lack, which
    open as the bare model. body_prefix: prefix of the body's tensors in place of the base's; empty: the base's.
    """
    architecture, module = ARCHITECTURES.get(base), head_format.module
    fused = architecture.map_fused_weights

    def read(hf_config: Json) -> ModelConfig:
        config = architecture.config_from_hf({key: value for key, value in hf_config.items() if key not in keys})
        is_bare = unused_tensors is not None and bool(unused_tensors(hf_config, ()))
        heads = {} if is_bare else {module: head_format.read(hf_config, config)}
        return config.with_changes(
            {"lm_head": {"name": "none", "bias": False}, "embedding": {"tied": True}, "extra_heads": heads}
        )

    def write(config: ModelConfig) -> Json:
        if config.extra_heads.keys() != {module}:
            raise UsageError(f"a {name} has one head: model.extra_heads has {', '.join(config.extra_heads) or 'none'}")
        return {**architecture.config_to_hf(config), **head_format.write(config.extra_heads[module])}

    def map_body_and_head(map_weights: MapWeights, config: ModelConfig) -> Sequence[WeightMapping]:
        body, old, new = drop_head_mappings(map_weights(config)), architecture.base_model_prefix, body_prefix
        if new:
            body = [replace(m, hf=tuple(new + name.removeprefix(old) for name in m.hf)) for m in body]
        return [*body, *(tensors.map(module, config) if config.extra_heads else [])]

    ignored_tensors = tuple(p for p in architecture.ignored_tensors if not tensors.matches(p))
    adapted = replace(
        architecture,
        keys={**architecture.keys, **keys},
        config_from_hf=read,
        config_to_hf=write,
        map_weights=partial(map_body_and_head, architecture.map_weights),
        map_fused_weights=fused and partial(map_body_and_head, fused),
        ignored_tensors=ignored_tensors,
        base_model_prefix=body_prefix or architecture.base_model_prefix,
        fingerprint={**architecture.fingerprint, "lm_head.name": "none"},
    )
    register_architecture(name, replace(adapted, unused_tensors=unused_tensors) if unused_tensors else adapted)


def _read_labels(hf_config: Json) -> Json:
    labels, count = hf_config.get("id2label"), hf_config.get("num_labels")
    losses = {problem: loss for loss, problem in PROBLEMS.items()}
    classes = count if count is not None else 2 if labels is None else len(labels)
    problem = hf_config.get("problem_type") or PROBLEMS["squared_error" if classes == 1 else "cross_entropy"]
    if problem not in losses:
        raise UsageError(f"config.json: problem_type = {problem!r}: megatfm has {', '.join(losses)}")
    return {"classes": classes, "loss": losses[problem]}


def make_label_keys(labels: Sequence[str], head: Any) -> Json:
    """Return the keys of config.json that name what a classifier's head predicts, and how many there are of it.

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


def make_task_labels(config: Config) -> Json:
    """Return the keys of config.json that name the labels of a fine-tuning run's task."""
    heads = [head for head in config.model.extra_heads.values() if isinstance(head, TextClassifierHeadConfig)]
    return make_label_keys(config.task.labels, heads[0]) if config.task and heads else {}


MEAN_POOLED = (r"^head\.", r"^classifier\.")


def list_mean_pooled_tensors(hf_config: Mapping[str, Any], names: Container[str]) -> Sequence[str]:
    """Return patterns of a ModernBERT's head that reads the mean of all tokens, which no head of ours does."""
    return MEAN_POOLED if hf_config.get("classifier_pooling") == "mean" else ()


@dataclass(frozen=True)
class FamilyHeads:
    """Heads of a family's classes. pooler: of classifiers of sequences and of choices. tensors: of the classes' heads,
    by the end of their names; a class that is left out computes something that we lack. keys: of config.json that all
    read. pooled_keys: those that classes with a pooler of one token read besides."""

    pooler: str
    tensors: Mapping[str, HeadTensors]
    keys: Mapping[str, Key] = field(default_factory=lambda: DROPOUT)
    token_pooler: str = "none"
    dropout: str = "classifier_dropout"
    pooler_bias: str = ""
    pooled_keys: Mapping[str, Key] = field(default_factory=dict)


WORDS, ANSWERS = HeadTensors("classifier"), HeadTensors("qa_outputs")
ROBERTA_CLASSIFIER = HeadTensors("classifier.out_proj", "classifier.dense")
CONTEXT_POOLER = HeadTensors("classifier", "pooler.dense")
TRANSFORMED = HeadTensors("classifier", "head.dense", "head.norm")
CONTEXT_DROPOUT: Mapping[str, Key] = used(cls_dropout=(None, float, int, None))
CONTEXT_KEYS: Mapping[str, Key] = {
    **supported_values(pooler_hidden_act="gelu"),
    **ignored("pooler_dropout", "pooler_hidden_size"),
}
FIRST_SUMMARY_KEYS: Mapping[str, Key] = supported_values(
    summary_type="first", summary_use_proj=True, summary_activation="gelu"
)
TRANSFORMED_DROPOUT: Mapping[str, Key] = used(classifier_dropout=(0.0, float, int))


def _collect_tensors(sequences: HeadTensors, choices: HeadTensors | None = None) -> Mapping[str, HeadTensors]:
    """Return the tensors of a family's classes. choices: None: there is no such class."""
    by_task = {"SequenceClassification": sequences, "TokenClassification": WORDS, "QuestionAnswering": ANSWERS}
    return by_task | ({"MultipleChoice": choices} if choices else {})


# In transformers Longformer's first token is global in classifiers of sequences alone: its other classes compute
# something else. BigBird's head of answers has a feed-forward network that we lack.
FAMILIES = {
    "Bert": FamilyHeads("tanh", _collect_tensors(*[HeadTensors("classifier", "bert.pooler.dense")] * 2)),
    "Roberta": FamilyHeads(
        "tanh", _collect_tensors(ROBERTA_CLASSIFIER, HeadTensors("classifier", "roberta.pooler.dense"))
    ),
    "Albert": FamilyHeads("tanh", _collect_tensors(*[HeadTensors("classifier", "albert.pooler")] * 2)),
    "Longformer": FamilyHeads("tanh", {"SequenceClassification": ROBERTA_CLASSIFIER}),
    "BigBird": FamilyHeads("activation", {"SequenceClassification": ROBERTA_CLASSIFIER, "TokenClassification": WORDS}),
    "Deberta": FamilyHeads(
        "gelu", _collect_tensors(CONTEXT_POOLER), CONTEXT_DROPOUT, dropout="cls_dropout", pooled_keys=CONTEXT_KEYS
    ),
    "DebertaV2": FamilyHeads(
        "gelu",
        _collect_tensors(CONTEXT_POOLER, CONTEXT_POOLER),
        CONTEXT_DROPOUT,
        dropout="cls_dropout",
        pooled_keys=CONTEXT_KEYS,
    ),
    "Electra": FamilyHeads(
        "gelu",
        _collect_tensors(ROBERTA_CLASSIFIER, HeadTensors("classifier", "sequence_summary.summary")),
        pooled_keys=FIRST_SUMMARY_KEYS,
    ),
    "ModernBert": FamilyHeads(
        "transform",
        dict.fromkeys(TASKS, TRANSFORMED),
        TRANSFORMED_DROPOUT,
        token_pooler="transform",
        pooler_bias="classifier_bias",
        pooled_keys=supported_values(classifier_pooling=("cls", "mean")),
    ),
}


def _make_head_format(family: FamilyHeads, task: str) -> HeadFormat:
    is_pooled = task in POOLED_TASKS
    options: Json = {"pooler": family.pooler if is_pooled else family.token_pooler}
    if task == "QuestionAnswering":
        return HeadFormat("span_extraction", options | {"dropout": 0.0}, "", "span", family.pooler_bias)
    if task == "MultipleChoice":
        return HeadFormat("multiple_choice", options, family.dropout, pooler_bias=family.pooler_bias)
    options |= {"token": "first" if is_pooled else "all"}
    return HeadFormat("text_classifier", options, family.dropout, pooler_bias=family.pooler_bias)


for family_name, family in FAMILIES.items():
    for task, head_tensors in family.tensors.items():
        is_pooled = task in POOLED_TASKS
        register_task_class(
            f"{family_name}For{task}",
            f"{family_name}ForMaskedLM",
            _make_head_format(family, task),
            head_tensors,
            {
                **family.keys,
                **(family.pooled_keys if is_pooled else {}),
                **(LABELS if "Classification" in task else {}),
            },
            list_mean_pooled_tensors if family_name == "ModernBert" and is_pooled else None,
        )

# XLNet reads the last token, <cls>. Its QuestionAnswering searches beams with a head that we lack: that opens bare.
SUMMARY = HeadTensors("logits_proj", "sequence_summary.summary")
LAST_SUMMARY_KEYS: dict[str, Key] = {
    **supported_values(summary_type="last", summary_use_proj=True, summary_activation="tanh"),
    **used(summary_last_dropout=(0.1, float, int)),
}
LAST_TOKEN: Json = {"pooler": "tanh", "token": "last"}
for task, head_format, head_tensors, keys in (
    ("SequenceClassification", HeadFormat("text_classifier", LAST_TOKEN, "summary_last_dropout"),
     SUMMARY, LAST_SUMMARY_KEYS | LABELS),
    ("MultipleChoice", HeadFormat("multiple_choice", LAST_TOKEN, "summary_last_dropout"), SUMMARY, LAST_SUMMARY_KEYS),
    ("TokenClassification", HeadFormat("text_classifier", {"pooler": "none", "token": "all", "dropout": 0.0}, ""),
     WORDS, LABELS),
    ("QuestionAnsweringSimple", HeadFormat("span_extraction", {"pooler": "none", "dropout": 0.0}, "", "span"),
     ANSWERS, {}),
):  # fmt: skip
    register_task_class(f"XLNetFor{task}", "XLNetLMHeadModel", head_format, head_tensors, keys)

# A decoder tells the class from a text's last token, without a bias; tags and answers have biases.
SCORE = HeadFormat("text_classifier", {"pooler": "none", "token": "last", "bias": False}, dropout="", module="score")
TAGS = HeadFormat("text_classifier", {"pooler": "none", "token": "all"}, module="score")
DECODER_ANSWERS = HeadFormat("span_extraction", {"pooler": "none", "dropout": 0.0}, "", "span")
TAGS_DROPOUT: dict[str, Key] = used(classifier_dropout=(0.1, float, int))
DECODERS = {
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", TASKS[:1]),
    "GPT2": ("GPT2LMHeadModel", TASKS[:3]),
    "Llama": ("LlamaForCausalLM", TASKS[:3]),
    "Mistral": ("MistralForCausalLM", TASKS[:3]),
    "Mixtral": ("MixtralForCausalLM", TASKS[:3]),
    "Qwen2": ("Qwen2ForCausalLM", TASKS[:3]),
    "Qwen3": ("Qwen3ForCausalLM", TASKS[:3]),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", TASKS[:3]),
    "Gemma2": ("Gemma2ForCausalLM", TASKS[:2]),
    "Gemma3Text": ("Gemma3ForCausalLM", TASKS[:1]),
    "GptOss": ("GptOssForCausalLM", TASKS[:2]),
    "DeepseekV2": ("DeepseekV2ForCausalLM", TASKS[:1]),
    "DeepseekV3": ("DeepseekV3ForCausalLM", TASKS[:2]),
}
"""Family → the class that its heads are based on, and the ends of the names of the classes that transformers has."""
PREFIX_OF_ANSWERS = dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Qwen3Moe"), "transformer.")
"""Prefix of the stack's tensors in classes of answers, where it differs."""
for family_name, (base, tasks) in DECODERS.items():
    tags = HeadTensors("classifier" if family_name == "GPT2" else "score")
    by_task = {
        "SequenceClassification": (SCORE, HeadTensors("score", has_bias=False), LABELS),
        "TokenClassification": (TAGS, tags, LABELS | TAGS_DROPOUT),
        "QuestionAnswering": (DECODER_ANSWERS, ANSWERS, {}),
    }
    for task in tasks:
        prefix = PREFIX_OF_ANSWERS.get(family_name, "") if task == "QuestionAnswering" else ""
        register_task_class(f"{family_name}For{task}", base, *by_task[task], body_prefix=prefix)
