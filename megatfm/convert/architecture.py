"""Registry of architectures: how each class of transformers stores a megatfm model."""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from megatfm.config import MLAAttentionConfig, ModelConfig, ScaledAttention
from megatfm.config.heads import HeadConfig
from megatfm.config.model import PER_LAYER_KEYS
from megatfm.convert.hf_config import COMMON_KEYS, Json, Key, resolve_hf_config, supported_values
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import UsageError
from megatfm.layers.position import POSITIONS
from megatfm.registry import Registry

MapWeights = Callable[[ModelConfig], Sequence[WeightMapping]]
"""Builds the weight mappings of a model from its config."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, such as LlamaForCausalLM, registered under its name."""

    model_type: str
    """`model_type` in config.json."""
    keys: Mapping[str, Key]
    """Declarations of its keys in config.json besides `COMMON_KEYS`; any other key is refused."""
    config_from_hf: Callable[[Json], ModelConfig]
    """Builds our config from config.json with defaults filled in. Raises UsageError for unsupported features."""
    config_to_hf: Callable[[ModelConfig], Json]
    """Builds config.json without `architectures` and `model_type`; `find_architecture` checks features."""
    map_weights: MapWeights
    """Mappings of all weights."""

    # Names of tensors in files.
    map_fused_weights: MapWeights | None = None
    """Mappings for files that store all experts of a block in one tensor."""
    base_model_prefix: str = ""
    """Prefix of tensor names that files of the bare model lack."""
    legacy_names: tuple[tuple[str, str], ...] = ()
    """(Regular expression, replacement) pairs for older tensor names."""
    ignored_tensors: tuple[str, ...] = ()
    """Regular expressions of stored tensors that are no parameters."""
    unused_tensors: Callable[[Mapping[str, Any], Container[str]], Sequence[str]] = lambda hf_config, names: ()
    """Returns regular expressions of tensors that config.json declares but no class reads; skipped with a note."""

    # Configs.
    max_length_key: str = ""
    """Key of the longest sequence, if `config_to_hf` doesn't set it."""
    refine_config: Callable[[ModelConfig, Container[str]], ModelConfig] = lambda config, names: config
    """Completes our config from tensor names."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Values of our config that identify its models, to name the nearest architecture in errors."""
    is_base_model: bool = False
    """Whether it has no head; heads in its files are skipped with a note."""
    notes: Callable[[ModelConfig], Sequence[str]] = lambda config: ()
    """Messages for users who open such a model."""

    def parse_config(self, hf_config: Mapping[str, Any], name: str) -> ModelConfig:
        """Convert a config.json to our config; name: of this architecture. Raises UsageError, ValueError."""
        return self.config_from_hf(resolve_hf_config(hf_config, self.all_keys(), name))

    def all_keys(self) -> dict[str, Key]:
        """Return the declarations of all keys that config.json may have."""
        return {**COMMON_KEYS, **supported_values(model_type=self.model_type), **self.keys}

    def choose_mappings(self, config: ModelConfig, names: Iterable[str]) -> Sequence[WeightMapping]:
        """Return the mappings for files with these tensor names, with one tensor per expert or one for all experts."""
        if self.map_fused_weights and any(name.endswith(".experts.down_proj") for name in names):
            return self.map_fused_weights(config)
        return self.map_weights(config)


ARCHITECTURES: Registry[Architecture] = Registry("Hugging Face architecture")

TRAINING_ONLY = {
    "init.name", "init.std", "dropout", "attention.dropout", "ffn.dropout", "drop_path", "lm_head.label_smoothing",
    "extra_heads.boundary.name", "extra_heads.classifier.label_smoothing", "extra_heads.span.dropout",
    "extra_heads.sentence.dropout", "extra_heads.score.dropout",
    "extra_heads.sentence.class_weights", "extra_heads.score.class_weights",
    "contrastive.scale", "contrastive.max_scale", "contrastive.bias",
    "ffn.router.aux_loss_coef", "ffn.router.seq_aux_loss_coef", "ffn.router.z_loss_coef",
    "ffn.router.jitter", "ffn.router.bias_update_rate",
}  # fmt: skip
"""Keys of ModelConfig that don't change what a trained model computes. Heads among them are skipped with a note."""


TASK_CLASSES = re.compile(
    r"(\w+)For(SequenceClassification|TokenClassification|QuestionAnswering(Simple)?|MultipleChoice|NextSentencePrediction)"
)
"""Names of classes with a task head on a bare model."""
MODEL_TYPE_BY_TENSOR = {
    "bert.embeddings.word_embeddings.weight": "bert",
    "roberta.embeddings.word_embeddings.weight": "roberta",
    "albert.embeddings.word_embeddings.weight": "albert",
    "transformer.wte.weight": "gpt2",
    "transformer.tokens_embed.weight": "openai-gpt",
    "transformer.word_embedding.weight": "xlnet",
}
"""Tensor name → model_type, for files of transformers 2 whose config.json has neither a class nor a model_type."""
HEAD_PREFIXES = ("head.", "sentence.", "span.", "dense.", "verdict.", "classifier.")
"""Prefixes of the names of a head's parameters in megatfm."""


def register_architecture(name: str, architecture: Architecture, *, base: str = "") -> None:
    """Register a class of transformers; base: class of the same model without its head."""
    ARCHITECTURES.register(name)(architecture)
    if base:
        _register_base_model(base, architecture)


def drop_head_mappings(mappings: Iterable[WeightMapping]) -> list[WeightMapping]:
    """Return the mappings of a model without those of its head."""
    return [replace(mapping, tied_names=()) for mapping in mappings if not mapping.megatfm[0].startswith(HEAD_PREFIXES)]


def _register_base_model(name: str, architecture: Architecture) -> None:
    """Register the class of a model without its head."""

    def read(hf_config: Json) -> ModelConfig:
        config = architecture.config_from_hf(hf_config)
        embedding = config.embedding.model_copy(update={"tied": True})
        bare = {"family": "encoder"} if config.family == "discriminator" else {}
        return config.model_copy(
            update={**bare, "lm_head": HeadConfig(name="none"), "extra_heads": {}, "embedding": embedding}
        )

    def without_head(map_weights: MapWeights) -> MapWeights:
        return lambda config: drop_head_mappings(map_weights(config))

    ignored_tensors = tuple(pattern for pattern in architecture.ignored_tensors if "pooler" not in pattern)
    fused = architecture.map_fused_weights and without_head(architecture.map_fused_weights)
    bare = replace(
        architecture, config_from_hf=read, map_weights=without_head(architecture.map_weights), map_fused_weights=fused
    )
    ARCHITECTURES.register(name)(replace(bare, ignored_tensors=ignored_tensors, is_base_model=True))


def list_candidates(config_json: Json) -> list[str]:
    """Return the classes that a folder may hold: the one that config.json names, then the bare model without its head.

    If config.json names none, all classes of its model_type, those with the most heads first. Raises UsageError for an
    unknown class or model_type.
    """
    architecture_names, kind = config_json.get("architectures") or [], config_json.get("model_type")
    if not isinstance(architecture_names, list) or not all(isinstance(name, str) for name in architecture_names):
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
            n for n, a in architecture_of.items() if a.model_type == kind and a.is_base_model and n != candidates[0]
        ]
    candidates = [name for name, architecture in architecture_of.items() if architecture.model_type == kind]
    if not candidates:
        raise UsageError(
            f"config.json names neither an architecture nor a model_type that megatfm reads; there are: "
            f"{', '.join(architecture_of)}"
        )
    return sorted(candidates, key=lambda name: (architecture_of[name].is_base_model, "PreTraining" not in name))


def find_architecture(config: ModelConfig, among: Sequence[str] | None = None) -> tuple[str, Architecture, Json]:
    """Find an architecture (of `among`, if given) that stores a model; returns its name, itself and the config.json.

    An architecture fits if its config.json, read back, describes the same model. Raises UsageError with the nearest
    architecture and the features that it lacks, or its error.
    """
    nearest: list[tuple[int, bool, int, str]] = []
    config = config.with_resolved_factors()  # config.json stores numbers, not formulas such as μP's
    values = list_functional_values(config)
    for name in among or ARCHITECTURES.names():
        architecture = ARCHITECTURES.get(name)
        n_mismatches = sum(values.get(key) != value for key, value in architecture.fingerprint.items())
        try:
            hf_config = {
                "architectures": [name],
                "model_type": architecture.model_type,
                **architecture.config_to_hf(config),
            }
            missing = find_config_differences(config, architecture.parse_config(hf_config, name))
        except (UsageError, ValueError) as error:
            nearest.append((n_mismatches, True, 0, f"the nearest, {name}, can't be: {format_error(error)}"))
            continue
        if not missing:
            return name, architecture, hf_config
        nearest.append((n_mismatches, False, len(missing), f"the nearest, {name}, lacks {', '.join(missing)}"))
    message = min(nearest)[-1]
    raise UsageError(f"no architecture of transformers that megatfm writes stores this model: {message}")


def format_error(error: Exception) -> str:
    """Format an error of reading or writing a config as one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"model.{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def find_config_differences(config: ModelConfig, restored: ModelConfig) -> list[str]:
    """Return the values of `config` that differ in `restored`, as `key = value`."""
    by_layer = bool(config.layer_types or restored.layer_types)
    expected = list_functional_values(config, by_layer=by_layer)
    actual = list_functional_values(restored, by_layer=by_layer)
    keys = [*expected, *(key for key in actual if key.startswith("extra_heads.") and key not in expected)]
    return [f"model.{key} = {expected.get(key)!r}" for key in keys if not _is_close(expected.get(key), actual.get(key))]


def list_functional_values(config: ModelConfig, *, by_layer: bool = False) -> dict[str, Any]:
    """Return key → value of all that determines what a trained model computes, defaults filled in.

    by_layer: expand by layer, so that names of block kinds don't matter.
    """
    if by_layer:
        by_depth = {
            f"block at {depth}.{key}" if key.startswith(PER_LAYER_KEYS) else key: value
            for depth in range(max(config.n_layers, config.encoder_layers))
            for key, value in list_functional_values(config.layer_config(depth)).items()
        }
        # An absolute position is added to the embedding, also where all kinds of blocks have another encoding.
        is_absolute = POSITIONS.get(config.position.name).absolute is not None
        return by_depth | {"position": config.position.model_dump() if is_absolute else None}
    values = {
        key: value for key, value in _flatten(config.with_resolved_factors().model_dump()) if key not in TRAINING_ONLY
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


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_close(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)
