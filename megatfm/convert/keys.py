"""What the architectures' config.json files have in common."""

from collections.abc import Mapping
from typing import Any

from megatfm.config import ModelConfig, RopeConfig
from megatfm.config.position import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megatfm.errors import UsageError

Json = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "swish",
    "swish": "swish",
}
"""transformers' name of a plain activation → ours; the first of several is what we write."""
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "swish": "swiglu"}
"""Our name of a plain activation → that of its gated form."""


def activation(theirs: Any, *, gated: bool = False) -> str:
    """Our name of an activation. Raises UsageError for one that we lack."""
    ours = ACTIVATIONS.get(str(theirs))
    if gated and ours is not None:
        ours = GATED.get(ours)
    if ours is None:
        raise UsageError(f"config.json: {'gated ' * gated}activation {theirs!r} is not one of megatfm's")
    return ours


def their_activation(ours: str, *, gated: bool = False) -> str:
    """The reverse of `activation`. Raises UsageError for one that they lack."""
    for theirs, plain in ACTIVATIONS.items():
        if (GATED.get(plain) if gated else plain) == ours:
            return theirs
    raise UsageError(f"model.ffn.activation = {ours!r} is not one that transformers has here")


def only(config: Mapping[str, Any], **allowed: Any) -> None:
    """Check that keys have the one value with which we compute the same, or are not there, which means that value.

    Raises UsageError.
    """
    for key, value in allowed.items():
        if config.get(key, value) != value:
            raise UsageError(f"config.json: {key} = {config[key]!r} is not supported, only {value!r}")


def std(ours: ModelConfig) -> float:
    """Standard deviation of the initial weights; transformers' usual one where the initialisation has none."""
    return float(getattr(ours.init, "std", 0.02))


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`position.theta` and `.scaling` of ours, from rope_parameters or the older rope_theta and rope_scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return {"position.theta": float(theta), "position.scaling": _scaling(given, config)}


def their_rope(ours: ModelConfig) -> Json:
    """The key rope_parameters; of positions or a scaling that they lack, it has the usual ones."""
    position = ours.position if isinstance(ours.position, RopeConfig) else RopeConfig()
    scaling = position.scaling
    parameters: dict[str, Any] = {"rope_theta": position.theta, "rope_type": "default"}
    match scaling:
        case LinearScaling(factor=factor):
            parameters |= {"rope_type": "linear", "factor": factor}
        case YarnScaling():
            parameters |= {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if scaling.attention_factor is not None:
                parameters["attention_factor"] = scaling.attention_factor
        case Llama3Scaling():
            parameters |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
    return {"rope_parameters": parameters}


def _scaling(given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return None
    original = int(
        given.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0
    )
    match kind:
        case "linear":
            return LinearScaling(factor=given["factor"])
        case "yarn":
            return YarnScaling(
                factor=given["factor"],
                original_length=original,
                beta_fast=given.get("beta_fast") or 32.0,
                beta_slow=given.get("beta_slow") or 1.0,
                attention_factor=given.get("attention_factor"),
            )
        case "llama3":
            return Llama3Scaling(
                factor=given["factor"],
                original_length=original,
                low_freq_factor=given["low_freq_factor"],
                high_freq_factor=given["high_freq_factor"],
            )
    raise UsageError(
        f"config.json: rope_type {kind!r} is not supported; there are: default, linear, yarn, llama3"
    )
