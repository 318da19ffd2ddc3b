"""What the architectures' config.json files have in common."""

import math
from collections.abc import Mapping
from typing import Any

from megatfm.config import ModelConfig, RopeConfig
from megatfm.config.position import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megatfm.convert.config_keys import Json, check_table_keys, supported_values, used
from megatfm.errors import UsageError

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


def check_implied_values(config: Mapping[str, Any], **values: Any) -> None:
    """Check that keys which follow from others, where they are given, are what follows. Raises UsageError."""
    for key, value in values.items():
        if config[key] is not None and config[key] != value:
            raise UsageError(
                f"config.json: {key} = {config[key]!r} is not supported, only {value!r}, which its other keys give"
            )


def std(ours: ModelConfig) -> float:
    """Standard deviation of the initial weights; transformers' usual one where the initialisation has none."""
    return float(getattr(ours.init, "std", 0.02))


ROPE = {
    "rope_parameters": used(None, dict, None),
    "rope_scaling": used(None, dict, None),
    "rope_theta": used(None, float),
    "partial_rotary_factor": supported_values(None, 1.0),
    "original_max_position_embeddings": used(None, int),
}
"""Keys of config.json that say how queries and keys turn."""
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""What each kind reads, besides its name and rope_theta."""


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`position.theta` and `.scaling` of ours, from rope_parameters or the older rope_theta and rope_scaling."""
    older, newer = config["rope_scaling"], config["rope_parameters"]
    if older and newer and older != newer:
        raise UsageError(
            "config.json: rope_scaling and rope_parameters both, and they differ: take out the one that does not hold"
        )
    place = "rope_scaling" if older else "rope_parameters"
    given = older or newer or {}
    theta = _either(given, "rope_theta", config, place)
    theta = 10_000.0 if theta is None else theta
    return {"position.theta": float(theta), "position.scaling": _scaling(given, config, place)}


def rope_of_kind(
    config: Mapping[str, Any], kind: str, older_theta: str, theta: float, *, scaled: bool = False
) -> Json:
    """Our section `position` for blocks of a kind, from its table in rope_parameters, or from keys beside that.

    older_theta: the key of the base where the table has none. scaled: an older rope_scaling is about this kind.
    """
    tables, older = config["rope_parameters"], config["rope_scaling"] if scaled else None
    if tables is not None:
        check_table_keys("rope_parameters", tables, ("full_attention", "sliding_attention"))
    if tables and older:
        raise UsageError(
            "config.json: rope_scaling and rope_parameters both: take out the one that does not hold"
        )
    if older and "rope_type" not in older:
        raise UsageError(
            "config.json: rope_scaling has no rope_type, without which transformers ignores it: add it"
        )
    given = older or (tables or {}).get(kind, {})
    if not isinstance(given, dict):
        raise UsageError(f"config.json: rope_parameters.{kind} = {given!r:.80} is no table")
    if "rope_theta" in given and config[older_theta] is not None:
        raise UsageError(
            f"config.json: rope_parameters.{kind}.rope_theta and {older_theta}: take out one of them"
        )
    one = {
        "rope_parameters": given,
        "rope_scaling": None,
        "rope_theta": config[older_theta],
        "original_max_position_embeddings": None,
        "max_position_embeddings": config["max_position_embeddings"],
    }
    if one["rope_theta"] is None and "rope_theta" not in given:
        one["rope_theta"] = theta
    read = rope(one)
    scaling: RopeScaling | None = read["position.scaling"]
    return {
        "name": "rope",
        "theta": read["position.theta"],
        **({"scaling": scaling.model_dump(exclude_none=True)} if scaling else {}),
    }


def _either(given: Mapping[str, Any], key: str, config: Mapping[str, Any], place: str) -> Any:
    """A number that may stand in the table or beside it."""
    within, beside = given.get(key), config[key]
    if key in given and (isinstance(within, bool) or not isinstance(within, int | float)):
        raise UsageError(f"config.json: {place}.{key} = {within!r} is no number")
    if within is not None and beside is not None and within != beside:
        raise UsageError(
            f"config.json: {place}.{key} = {within} and {key} = {beside}: take out the one that does not hold"
        )
    return beside if within is None else within


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
            if not scaling.truncate:
                parameters["truncate"] = False
        case Llama3Scaling():
            parameters |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
    return {"rope_parameters": parameters}


def _scaling(given: Mapping[str, Any], config: Mapping[str, Any], place: str) -> RopeScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"config.json: rope_type {kind!r} is not supported; there are: {', '.join(ROPE_TYPES)}"
        )
    check_table_keys(
        place, given, ("rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPES[kind])
    )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("config.json: partial_rotary_factor other than 1 is not supported")
    if not isinstance(truncate := given.get("truncate", True), bool):
        raise UsageError(f"config.json: {place}.truncate = {truncate!r} is not true or false")
    if kind == "default":
        return None
    original: Any = None
    if kind != "linear":
        original = _either(given, "original_max_position_embeddings", config, place)
        original = config["max_position_embeddings"] if original is None else original
    for key in {"factor", "low_freq_factor", "high_freq_factor"} & {*ROPE_TYPES[kind]}:
        if isinstance(given.get(key), bool) or not isinstance(given.get(key), int | float):
            raise UsageError(f"config.json: {place}.{key} = {given.get(key)!r} is no number")
    match kind:
        case "linear":
            return LinearScaling(factor=given["factor"])
        case "yarn":
            return YarnScaling(
                factor=given["factor"],
                original_length=original,
                beta_fast=given.get("beta_fast") or 32.0,
                beta_slow=given.get("beta_slow") or 1.0,
                attention_factor=_attention_factor(given),
                truncate=truncate,
            )
        case _:
            return Llama3Scaling(
                factor=given["factor"],
                original_length=original,
                low_freq_factor=given["low_freq_factor"],
                high_freq_factor=given["high_freq_factor"],
            )


def _attention_factor(given: Mapping[str, Any]) -> float | None:
    """YaRN's factor on the scores, from mscale and mscale_all_dim where it is not given itself."""
    factor, some, every = (given.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is not None or not (some and every):
        return factor
    stretch = math.log(max(float(given["factor"]), 1.0))
    return float((0.1 * some * stretch + 1.0) / (0.1 * every * stretch + 1.0))
