"""Values of config.json that many architectures share: plain keys, activations, rotary positions, types of layers."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from megatfm.config import ModelConfig, RopeConfig, WindowPatternConfig
from megatfm.config.attention import FullPatternConfig
from megatfm.config.position import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megatfm.convert.hf_config import Json, check_table_keys, supported_values, used
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
    "quick_gelu": "quick_gelu",
}
"""transformers' name of a plain activation → megatfm's; the first of several is what we write."""
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "swish": "swiglu"}
"""Megatfm's name of a plain activation → of its gated form."""


def activation_from_hf(hf_name: Any, *, gated: bool = False) -> str:
    """Our name of an activation. Raises UsageError for one that we lack."""
    activation = ACTIVATIONS.get(str(hf_name))
    if gated and activation is not None:
        activation = GATED.get(activation)
    if activation is None:
        raise UsageError(f"config.json: {'gated ' * gated}activation {hf_name!r} is not one of megatfm's")
    return activation


def activation_to_hf(activation: str, *, gated: bool = False) -> str:
    """The reverse of `activation`. Raises UsageError for one that they lack."""
    for hf_name, plain in ACTIVATIONS.items():
        if (GATED.get(plain) if gated else plain) == activation:
            return hf_name
    raise UsageError(f"model.ffn.activation = {activation!r} is not one that transformers has here")


def read_mapped(hf_config: Mapping[str, Any], mapping: Mapping[str, str]) -> Json:
    """Values of config.json under our keys, of those that differ in their names alone; mapping: their key → ours."""
    return {key: hf_config[hf_key] for hf_key, key in mapping.items()}


def write_mapped(config: ModelConfig, mapping: Mapping[str, str]) -> Json:
    """The reverse of `read_mapped`, with the values that defaults of ours stand for."""
    resolved: Json = {
        "attention.n_kv_heads": config.attention.kv_heads,
        f"attention.{config.attention.head_dim_key}": config.head_width,
        "attention.bias": getattr(config.attention, "bias", False),
        "position.max_positions": config.position.limit,
        "init.std": init_std(config),
    }
    return {
        hf_key: resolved[key] if key in resolved else attrgetter(key)(config)
        for hf_key, key in mapping.items()
    }


def check_implied_values(config: Mapping[str, Any], **values: Any) -> None:
    """Check that given keys agree with those that they follow from. Raises UsageError."""
    for key, value in values.items():
        if config[key] is not None and config[key] != value:
            raise UsageError(
                f"config.json: {key} = {config[key]!r} is not supported, only {value!r}, which its other keys give"
            )


def init_std(config: ModelConfig) -> float:
    """Standard deviation of the initial weights; transformers' usual one where the initialisation has none."""
    return float(getattr(config.init, "std", 0.02))


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
"""Keys that each kind reads, besides its name and rope_theta."""


def rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """`position.theta` and `.scaling` of ours, from rope_parameters or the older rope_theta and rope_scaling."""
    older, newer = config["rope_scaling"], config["rope_parameters"]
    if older and newer and older != newer:
        raise UsageError(
            "config.json: rope_scaling and rope_parameters both, and they differ: take out the one that does not hold"
        )
    place = "rope_scaling" if older else "rope_parameters"
    table = older or newer or {}
    theta = _either(table, "rope_theta", config, place)
    theta = 10_000.0 if theta is None else theta
    return {"position.theta": float(theta), "position.scaling": _scaling(table, config, place)}


def rope_of_layer_type(
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
    table = older or (tables or {}).get(kind, {})
    if not isinstance(table, dict):
        raise UsageError(f"config.json: rope_parameters.{kind} = {table!r:.80} is no table")
    if "rope_theta" in table and config[older_theta] is not None:
        raise UsageError(
            f"config.json: rope_parameters.{kind}.rope_theta and {older_theta}: take out one of them"
        )
    mapping = {
        "rope_parameters": table,
        "rope_scaling": None,
        "rope_theta": config[older_theta],
        "original_max_position_embeddings": None,
        "max_position_embeddings": config["max_position_embeddings"],
    }
    if mapping["rope_theta"] is None and "rope_theta" not in table:
        mapping["rope_theta"] = theta
    read = rope_from_hf(mapping)
    scaling: RopeScaling | None = read["position.scaling"]
    return {
        "name": "rope",
        "theta": read["position.theta"],
        **({"scaling": scaling.model_dump(exclude_none=True)} if scaling else {}),
    }


def _either(table: Mapping[str, Any], key: str, config: Mapping[str, Any], place: str) -> Any:
    """A number that may stand in the table or beside it."""
    in_table, at_top_level = table.get(key), config[key]
    if key in table and (isinstance(in_table, bool) or not isinstance(in_table, int | float)):
        raise UsageError(f"config.json: {place}.{key} = {in_table!r} is no number")
    if in_table is not None and at_top_level is not None and in_table != at_top_level:
        raise UsageError(
            f"config.json: {place}.{key} = {in_table} and {key} = {at_top_level}: take out the one that does not hold"
        )
    return at_top_level if in_table is None else in_table


def rope_to_hf(config: ModelConfig) -> Json:
    """The key rope_parameters; of positions or a scaling that they lack, it has the usual ones."""
    position = config.position if isinstance(config.position, RopeConfig) else RopeConfig()
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


def _scaling(table: Mapping[str, Any], config: Mapping[str, Any], place: str) -> RopeScaling | None:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"config.json: rope_type {kind!r} is not supported; there are: {', '.join(ROPE_TYPES)}"
        )
    check_table_keys(
        place, table, ("rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPES[kind])
    )
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("config.json: partial_rotary_factor other than 1 is not supported")
    if not isinstance(truncate := table.get("truncate", True), bool):
        raise UsageError(f"config.json: {place}.truncate = {truncate!r} is not true or false")
    if kind == "default":
        return None
    original: Any = None
    if kind != "linear":
        original = _either(table, "original_max_position_embeddings", config, place)
        original = config["max_position_embeddings"] if original is None else original
    for key in {"factor", "low_freq_factor", "high_freq_factor"} & {*ROPE_TYPES[kind]}:
        if isinstance(table.get(key), bool) or not isinstance(table.get(key), int | float):
            raise UsageError(f"config.json: {place}.{key} = {table.get(key)!r} is no number")
    match kind:
        case "linear":
            return LinearScaling(factor=table["factor"])
        case "yarn":
            return YarnScaling(
                factor=table["factor"],
                original_length=original,
                beta_fast=table.get("beta_fast") or 32.0,
                beta_slow=table.get("beta_slow") or 1.0,
                attention_factor=_attention_factor(table),
                truncate=truncate,
            )
        case _:
            return Llama3Scaling(
                factor=table["factor"],
                original_length=original,
                low_freq_factor=table["low_freq_factor"],
                high_freq_factor=table["high_freq_factor"],
            )


def _attention_factor(table: Mapping[str, Any]) -> float | None:
    """YaRN's factor on the scores, from mscale and mscale_all_dim where it is not given itself."""
    factor, mscale, mscale_all_dims = (
        table.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if factor is not None or not (mscale and mscale_all_dims):
        return factor
    stretch = math.log(max(float(table["factor"]), 1.0))
    return float((0.1 * mscale * stretch + 1.0) / (0.1 * mscale_all_dims * stretch + 1.0))


LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read_layer_types(hf_config: Json, global_every: int, *, first: str = LOCAL) -> list[str]:
    """Read `layer_types`; if left out, every `global_every`-th layer is full attention (with `first` GLOBAL: isn't
    sliding).

    Raises UsageError.
    """
    n, layer_types = hf_config["num_hidden_layers"], hf_config["layer_types"]
    if layer_types is None and first == LOCAL:
        return [LOCAL if (i + 1) % global_every else GLOBAL for i in range(n)]
    if layer_types is None:
        return [LOCAL if i % global_every else GLOBAL for i in range(n)]
    if len(layer_types) != n or not set(layer_types) <= {LOCAL, GLOBAL}:
        raise UsageError(
            f"config.json: layer_types = {layer_types!r:.80} is not {LOCAL} or {GLOBAL} for each of "
            f"num_hidden_layers = {n}"
        )
    return list(layer_types)


def layer_type_blocks(kinds: Sequence[str], local: Json, full: Json) -> Json:
    """Our keys for them: a cycle of the kinds "local" and "global", and what each of these has otherwise."""
    names = ["local" if kind == LOCAL else "global" for kind in kinds]
    cycle = next(
        i for i in range(1, len(names) + 1) if all(a == b for a, b in zip(names[i:], names, strict=False))
    )
    sections = {"local": local, "global": full}
    return {
        "layer_types": names[:cycle],
        **{f"layer_type.{name}": sections[name] for name in dict.fromkeys(names)},
    }


def write_layer_types(config: ModelConfig) -> list[str]:
    """The reverse of `read`. Raises UsageError for a block of another pattern."""
    return [GLOBAL if width is None else LOCAL for width in window_widths(config)]


def window_widths(config: ModelConfig) -> list[int | None]:
    """Width of each block's window; None: it sees all. Raises UsageError."""
    window_widths: list[int | None] = []
    for depth in range(config.n_layers):
        pattern = config.layer_config(depth).attention.pattern
        if not isinstance(pattern, WindowPatternConfig | FullPatternConfig):
            raise UsageError(
                f"model.attention.pattern.name = {pattern.name!r}: only windows and full are stored"
            )
        window_widths.append(pattern.width if isinstance(pattern, WindowPatternConfig) else None)
    return window_widths


def window_width(config: ModelConfig, otherwise: int) -> int:
    """The width of the windows; of several, the first one's."""
    return next((width for width in window_widths(config) if width is not None), otherwise)
