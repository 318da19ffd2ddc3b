"""The registry of architectures: the class of transformers that stores a megatfm model, and how."""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from megatfm.config import MLAAttentionConfig, ModelConfig, ScaledAttention
from megatfm.config.model import PER_LAYER_KEYS
from megatfm.config.model_parts import HeadConfig
from megatfm.convert.hf_config import COMMON, Json, Key, resolve_hf_config, supported_values
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import UsageError
from megatfm.registry import Registry

Rules = Callable[[ModelConfig], Sequence[WeightMapping]]
"""The table for a config."""


@dataclass(frozen=True)
class Architecture:
    """One class of transformers, such as LlamaForCausalLM, under whose name it is registered.

    model_type: as in config.json. keys: the meaning of each key of config.json, besides those of `COMMON`; one that is
    not declared is refused.
    config_from_hf: makes our config of config.json, settled by `keys`; raises UsageError for what we lack.
    config_to_hf: makes config.json of our config, without `architectures` and `model_type`; it needn't check
    unsupported features, see `architecture_for`. weight_mappings: the table for a config. fused_rules: that for files
    with all experts of a block in one tensor, where these are another. base_model_prefix: files of the bare model lack
    it before every name. ignored_tensors: regular expressions of tensors in their files that are no parameters.
    legacy_names: older names, as regular expressions and what stands in their place. max_length_key: the key of
    config.json for the longest sequence, where `config_to_hf` doesn't give it since our config doesn't. fingerprint:
    values of our keys by which its models are told from others', so that the nearest is found for one that none stores.
    refine_config: settings that only the names of tensors reveal. is_base_model: has no head; those that its files
    hold, such as a downstream task's, are left and named. further: regular expressions of tensors, among those of these
    names, that config.json declares and no class reads; they are left and named, too. remarks: what to say of a model
    that is opened.
    """

    model_type: str
    keys: Mapping[str, Key]
    config_from_hf: Callable[[Json], ModelConfig]
    config_to_hf: Callable[[ModelConfig], Json]
    weight_mappings: Rules
    base_model_prefix: str = ""
    ignored_tensors: tuple[str, ...] = ()
    legacy_names: tuple[tuple[str, str], ...] = ()
    max_length_key: str = ""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    refine_config: Callable[[ModelConfig, Container[str]], ModelConfig] = lambda config, names: config
    is_base_model: bool = False
    fused_rules: Rules | None = None
    further: Callable[[Mapping[str, Any], Container[str]], Sequence[str]] = lambda hf_config, names: ()
    remarks: Callable[[ModelConfig], Sequence[str]] = lambda config: ()

    def parse_config(self, hf_config: Mapping[str, Any], name: str) -> ModelConfig:
        """Their config.json as our config; name: the architecture's. Raises UsageError, ValueError."""
        return self.config_from_hf(resolve_hf_config(hf_config, self.all_keys(), name))

    def all_keys(self) -> dict[str, Key]:
        """The declaration of every key that config.json may have."""
        return {**COMMON, "model_type": supported_values(self.model_type), **self.keys}

    def rules_for(self, config: ModelConfig, names: Iterable[str]) -> Sequence[WeightMapping]:
        """The table for files with tensors of these names: one for each expert, or one for all experts of a block."""
        if self.fused_rules and any(name.endswith(".experts.down_proj") for name in names):
            return self.fused_rules(config)
        return self.weight_mappings(config)


ARCHITECTURES: Registry[Architecture] = Registry("Hugging Face architecture")

TRAINING_ONLY = {
    "init.name", "init.std", "dropout", "attention.dropout", "ffn.dropout", "drop_path", "lm_head.label_smoothing",
    "extra_heads.boundary.name", "extra_heads.classifier.label_smoothing", "extra_heads.span.dropout",
    "contrastive.scale", "contrastive.max_scale", "contrastive.bias",
    "ffn.router.aux_loss_coef", "ffn.router.seq_aux_loss_coef", "ffn.router.z_loss_coef",
    "ffn.router.jitter", "ffn.router.bias_update_rate",
}  # fmt: skip
"""Keys of ModelConfig that don't change what a trained model computes; heads among them are left out, and that said."""


TASK_CLASSES = re.compile(
    r"(\w+)For(SequenceClassification|TokenClassification|QuestionAnswering(Simple)?|MultipleChoice|NextSentencePrediction)"
)
"""Classes that are a bare model and a head of their own."""
OLD_NAMES = {
    "bert.embeddings.word_embeddings.weight": "bert",
    "roberta.embeddings.word_embeddings.weight": "roberta",
    "albert.embeddings.word_embeddings.weight": "albert",
    "transformer.wte.weight": "gpt2",
    "transformer.tokens_embed.weight": "openai-gpt",
    "transformer.word_embedding.weight": "xlnet",
}
"""Tensor → the model_type that it tells, where the config.json of transformers 2 lacks it and a class: no younger model
has such a file."""
HEAD_PREFIXES = ("head.", "sentence.", "span.", "dense.", "verdict.", "classifier.")
"""Prefixes of our names of a head's parameters."""


def register_architecture(name: str, architecture: Architecture, *, base: str = "") -> None:
    """Register a class of transformers; base: that of the same model without its head."""
    ARCHITECTURES.register(name)(architecture)
    if base:
        _register_base_model(base, architecture)


def _register_base_model(name: str, architecture: Architecture) -> None:

    def read(hf_config: Json) -> ModelConfig:
        config = architecture.config_from_hf(hf_config)
        embedding = config.embedding.model_copy(update={"tied": True})
        bare = {"family": "encoder"} if config.family == "discriminator" else {}
        return config.model_copy(
            update={**bare, "lm_head": HeadConfig(name="none"), "extra_heads": {}, "embedding": embedding}
        )

    def without_head(rules: Rules) -> Rules:
        return lambda config: [
            replace(rule, tied_names=())
            for rule in rules(config)
            if not rule.megatfm[0].startswith(HEAD_PREFIXES)
        ]

    ignored_tensors = tuple(pattern for pattern in architecture.ignored_tensors if "pooler" not in pattern)
    fused = architecture.fused_rules and without_head(architecture.fused_rules)
    bare = replace(
        architecture,
        config_from_hf=read,
        weight_mappings=without_head(architecture.weight_mappings),
        fused_rules=fused,
    )
    ARCHITECTURES.register(name)(replace(bare, ignored_tensors=ignored_tensors, is_base_model=True))


def architectures_of(config_json: Json) -> list[str]:
    """Classes that a folder may hold: the one that its config.json names, and the bare model if files lack the head.

    Without a name, all of its model_type, those with the most heads first. Raises UsageError for what we don't read.
    """
    architecture_names, kind = config_json.get("architectures") or [], config_json.get("model_type")
    if not isinstance(architecture_names, list) or not all(
        isinstance(name, str) for name in architecture_names
    ):
        raise UsageError(f"config.json: architectures = {architecture_names!r:.80} is no list of names")
    candidates = architecture_names[:1]
    is_registered = candidates and candidates[0] in ARCHITECTURES.names()
    if candidates and not is_registered and (downstream := TASK_CLASSES.fullmatch(candidates[0])):
        bare = f"{downstream[1]}Model"
        # Without a prefix, as in T5, the head's tensors can't be told from the model's.
        has_prefix = bare in ARCHITECTURES.names() and ARCHITECTURES.get(bare).base_model_prefix
        candidates = [bare] if has_prefix else candidates
    if candidates and candidates[0] not in ARCHITECTURES.names():
        candidates = architecture_names[:1]
        ARCHITECTURES.get(candidates[0])
    architecture_of = {name: ARCHITECTURES.get(name) for name in ARCHITECTURES.names()}
    if candidates:
        kind = architecture_of[candidates[0]].model_type
        return candidates + [
            n
            for n, a in architecture_of.items()
            if a.model_type == kind and a.is_base_model and n != candidates[0]
        ]
    candidates = [name for name, architecture in architecture_of.items() if architecture.model_type == kind]
    if not candidates:
        raise UsageError(
            f"config.json names neither an architecture nor a model_type that megatfm reads; there are: "
            f"{', '.join(architecture_of)}"
        )
    return sorted(
        candidates, key=lambda name: (architecture_of[name].is_base_model, "PreTraining" not in name)
    )


def architecture_for(
    config: ModelConfig, among: Sequence[str] | None = None
) -> tuple[str, Architecture, Json]:
    """One (of these, if named) that stores a model of this config, its name, and the config.json.

    It does if their config.json, read again, is the same model. Raises UsageError with the nearest architecture and the
    features that it lacks, or its reason to refuse.
    """
    nearest: list[tuple[int, bool, int, str]] = []
    config = config.with_numbers()  # transformers has numbers
    values = functional_config(config)
    for name in among or ARCHITECTURES.names():
        architecture = ARCHITECTURES.get(name)
        n_mismatches = sum(values.get(key) != mark for key, mark in architecture.fingerprint.items())
        try:
            hf_config = {
                "architectures": [name],
                "model_type": architecture.model_type,
                **architecture.config_to_hf(config),
            }
            missing = config_differences(config, architecture.parse_config(hf_config, name))
        except (UsageError, ValueError) as error:
            nearest.append((n_mismatches, True, 0, f"the nearest, {name}, can't be: {format_error(error)}"))
            continue
        if not missing:
            return name, architecture, hf_config
        nearest.append(
            (n_mismatches, False, len(missing), f"the nearest, {name}, lacks {', '.join(missing)}")
        )
    message = min(nearest)[-1]
    raise UsageError(f"no architecture of transformers that megatfm writes stores this model: {message}")


def format_error(error: Exception) -> str:
    """Why a config could not be read or written, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"model.{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def config_differences(config: ModelConfig, back: ModelConfig) -> list[str]:
    """Values of our config that did not come back, as `key = value`."""
    by_layer = bool(config.layer_types or back.layer_types)
    expected, restored = (
        functional_config(config, by_layer=by_layer),
        functional_config(back, by_layer=by_layer),
    )
    keys = [*expected, *(key for key in restored if key.startswith("extra_heads.") and key not in expected)]
    return [
        f"model.{key} = {expected.get(key)!r}"
        for key in keys
        if not _is_close(expected.get(key), restored.get(key))
    ]


def functional_config(config: ModelConfig, *, by_layer: bool = False) -> dict[str, Any]:
    """Values that determine what a trained model computes, defaults filled in. by_layer: compare layer by layer, so
    that names of kinds of blocks don't matter."""
    if by_layer:
        return {
            key: value
            for depth in range(max(config.n_layers, config.encoder_layers))
            for key, value in _named_by_layer(depth, functional_config(config.layer_config(depth)))
        }
    values = {
        key: value for key, value in _flat(config.with_numbers().model_dump()) if key not in TRAINING_ONLY
    }
    values |= {
        "attention.n_kv_heads": config.attention.kv_heads,
        f"attention.{config.attention.head_dim_key}": config.head_width,
        "embedding.dim": config.embedding_width,
        "n_encoder_layers": config.encoder_layers if config.family == "encoder_decoder" else None,
        "distinct_layers": config.distinct_layers or config.n_layers,
        "norm.final_norm": config.norm.has_final_norm,
    }
    if config.lm_head.name == "none":
        values = {key: value for key, value in values.items() if not key.startswith("lm_head.")}
        values |= {"lm_head.name": "none", "embedding.tied": True}
    if isinstance(config.attention, MLAAttentionConfig):
        values["attention.v_head_dim"] = config.attention.v_head_dim or config.head_width
    elif isinstance(config.attention, ScaledAttention):
        values["attention.scale"] = config.attention.scale or config.head_width**-0.5
    return values


def _named_by_layer(depth: int, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield (f"block at {depth}.{key}" if key.startswith(PER_LAYER_KEYS) else key), value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves under keys with dots."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_close(value: Any, other_value: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(other_value, Mapping):
        return value.keys() == other_value.keys() and all(
            _is_close(value[key], other_value[key]) for key in value
        )
    if isinstance(value, float) and isinstance(other_value, int | float):
        return math.isclose(value, other_value, rel_tol=1e-6)
    return bool(value == other_value)
