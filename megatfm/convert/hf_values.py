"""Config.json values that many architectures share: renamed keys, activations, rotary positions, layer types."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from megatfm.config import ModelConfig, RopeConfig, WindowPatternConfig
from megatfm.config.attention import FullPatternConfig
from megatfm.config.position import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megatfm.config.section import MAX_LAYERS
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
"""Name of an activation in transformers → in megatfm. Of several names in transformers, the first is written."""
GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "swish": "swiglu"}
"""Name of an activation in megatfm → of its gated form."""


def activation_from_hf(hf_name: Any, *, gated: bool = False) -> str:
    """Return megatfm's name of an activation. Raises UsageError for an unknown one."""
    activation = ACTIVATIONS.get(str(hf_name))
    if gated and activation is not None:
        activation = GATED.get(activation)
    if activation is None:
        raise UsageError(f"config.json: {'gated ' * gated}activation {hf_name!r} is not one of megatfm's")
    return activation


def activation_to_hf(activation: str, *, gated: bool = False) -> str:
    """Return transformers' name of an activation. Raises UsageError for one that it lacks."""
    for hf_name, plain in ACTIVATIONS.items():
        if (GATED.get(plain) if gated else plain) == activation:
            return hf_name
    raise UsageError(f"model.ffn.activation = {activation!r} is not one that transformers has here")


def read_mapped(hf_config: Mapping[str, Any], mapping: Mapping[str, str]) -> Json:
    """Return the values of keys that differ only in name; mapping: transformers' key → megatfm's."""
    return {key: hf_config[hf_key] for hf_key, key in mapping.items()}


def write_mapped(config: ModelConfig, mapping: Mapping[str, str]) -> Json:
    """Return transformers' values of keys that differ only in name, with megatfm's defaults filled in."""
    resolved: Json = {
        "attention.n_kv_heads": config.attention.kv_heads,
        f"attention.{config.attention.head_dim_key}": config.head_width,
        "attention.bias": getattr(config.attention, "bias", False),
        "position.max_positions": config.position.limit,
        "init.std": getattr(config.init, "std", 0.02),  # transformers' default
    }
    return {hf_key: resolved[key] if key in resolved else attrgetter(key)(config) for hf_key, key in mapping.items()}


def check_implied_values(config: Mapping[str, Any], **values: Any) -> None:
    """Raise UsageError if keys differ from the values that other keys imply. values: key → implied value."""
    for key, value in values.items():
        if config[key] is not None and config[key] != value:
            raise UsageError(
                f"config.json: {key} = {config[key]!r} is not supported, only {value!r}, which its other keys imply"
            )


PIXEL_KEYS = ("image_mean", "image_std")
"""Keys of preprocessor_config.json that are part of the model in megatfm."""

ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_KEYS = {
    **used(rope_parameters=(None, dict, None), rope_scaling=(None, dict, None), rope_theta=(None, float)),
    **supported_values(partial_rotary_factor=(None, 1.0)),
    **used(original_max_position_embeddings=(None, int)),
}
"""Keys of config.json about rotary positions."""
ROPE_TYPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""rope_type → keys that it reads besides rope_theta."""
REQUIRED_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")


def rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `position.theta` and `position.scaling` from rope_parameters or the older rope_theta and rope_scaling."""
    legacy, current = config["rope_scaling"], config["rope_parameters"]
    if legacy and current and legacy != current:
        raise UsageError("config.json: rope_scaling and rope_parameters differ: remove the wrong one")
    table_name = "rope_scaling" if legacy else "rope_parameters"
    table = legacy or current or {}
    theta = _read_number(table, "rope_theta", config, table_name)
    theta = 10_000.0 if theta is None else theta
    return {"position.theta": float(theta), "position.scaling": _convert_scaling(table, config, table_name)}


def read_layer_type_rope(
    config: Mapping[str, Any], layer_type: str, theta_key: str, theta: float, *, scaled: bool = False
) -> Json:
    """Return our `position` section for one layer type, from its table in rope_parameters or older top-level keys.

    theta_key: top-level key of theta if the table has none; theta: default. scaled: rope_scaling is for this type.
    """
    tables, legacy = config["rope_parameters"], config["rope_scaling"] if scaled else None
    if tables is not None:
        check_table_keys("rope_parameters", tables, ("full_attention", "sliding_attention"))
    if tables and legacy:
        raise UsageError("config.json: has both rope_scaling and rope_parameters: remove the wrong one")
    if legacy and "rope_type" not in legacy:
        raise UsageError("config.json: rope_scaling has no rope_type, so transformers ignores it: add one")
    table = legacy or (tables or {}).get(layer_type, {})
    if not isinstance(table, dict):
        raise UsageError(f"config.json: rope_parameters.{layer_type} = {table!r:.80} is not a table")
    if "rope_theta" in table and config[theta_key] is not None:
        raise UsageError(
            f"config.json: has both rope_parameters.{layer_type}.rope_theta and {theta_key}: remove one of them"
        )
    mapping = {
        "rope_parameters": table,
        "rope_scaling": None,
        "rope_theta": config[theta_key],
        ORIGINAL_LENGTH: None,
        "max_position_embeddings": config["max_position_embeddings"],
    }
    if mapping["rope_theta"] is None and "rope_theta" not in table:
        mapping["rope_theta"] = theta
    rope = rope_from_hf(mapping)
    scaling: RopeScaling | None = rope["position.scaling"]
    return {
        "name": "rope",
        "theta": rope["position.theta"],
        **({"scaling": scaling.model_dump(exclude_none=True)} if scaling else {}),
    }


def set_default_theta(hf_config: Json, theta: float) -> Json:
    """Return a config.json with a class's own default of rope_theta where the file gives none."""
    table = hf_config["rope_scaling"] or hf_config["rope_parameters"] or {}
    has_theta = hf_config["rope_theta"] is not None or "rope_theta" in table
    return hf_config if has_theta else hf_config | {"rope_theta": theta}


def write_layer_type_ropes(config: ModelConfig, local_theta: float) -> Json:
    """Return the key rope_parameters with one table per layer type; local_theta: of a type that no layer has."""
    layer_types = write_layer_types(config)
    tables = {
        kind: rope_to_hf(config.layer_config(layer_types.index(kind)))["rope_parameters"] for kind in set(layer_types)
    }
    absent = {"rope_type": "default", "rope_theta": local_theta}
    return {"rope_parameters": {kind: tables.get(kind, absent) for kind in (LOCAL, GLOBAL)}}


def _read_number(table: Mapping[str, Any], key: str, config: Mapping[str, Any], table_name: str) -> Any:
    """Read a number from a table or from the top level, which must agree."""
    in_table, at_top_level = table.get(key), config[key]
    if key in table and (isinstance(in_table, bool) or not isinstance(in_table, int | float)):
        raise UsageError(f"config.json: {table_name}.{key} = {in_table!r} is not a number")
    if in_table is not None and at_top_level is not None and in_table != at_top_level:
        raise UsageError(
            f"config.json: {table_name}.{key} = {in_table}, but {key} = {at_top_level}: remove the wrong one"
        )
    return at_top_level if in_table is None else in_table


def rope_to_hf(config: ModelConfig) -> Json:
    """Return the key rope_parameters, with defaults for other position encodings and unknown scalings."""
    position = config.position if isinstance(config.position, RopeConfig) else RopeConfig()
    parameters: dict[str, Any] = {"rope_theta": position.theta, "rope_type": "default"}
    if position.scaling is not None and position.scaling.name in ROPE_TYPE_KEYS:
        values = position.scaling.model_dump(exclude_none=True)
        parameters["rope_type"] = values.pop("name")
        if values.get("truncate"):  # as everywhere but in gpt-oss
            del values["truncate"]
        parameters |= {ORIGINAL_LENGTH if key == "original_length" else key: value for key, value in values.items()}
    return {"rope_parameters": parameters}


def _convert_scaling(table: Mapping[str, Any], config: Mapping[str, Any], table_name: str) -> RopeScaling | None:
    rope_type = table.get("rope_type", table.get("type", "default"))
    if rope_type not in ROPE_TYPE_KEYS:
        raise UsageError(
            f"config.json: rope_type {rope_type!r} is not supported; there are: {', '.join(ROPE_TYPE_KEYS)}"
        )
    check_table_keys(
        table_name, table, ("rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_TYPE_KEYS[rope_type])
    )
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("config.json: partial_rotary_factor other than 1 is not supported")
    if not isinstance(truncate := table.get("truncate", True), bool):
        raise UsageError(f"config.json: {table_name}.truncate = {truncate!r} is not true or false")
    if rope_type == "default":
        return None
    original_length: Any = None
    if rope_type != "linear":
        original_length = _read_number(table, ORIGINAL_LENGTH, config, table_name)
        original_length = config["max_position_embeddings"] if original_length is None else original_length
    factors: Json = {key: table.get(key) for key in ROPE_TYPE_KEYS[rope_type] if key in REQUIRED_FACTORS}
    for key, value in factors.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"config.json: {table_name}.{key} = {value!r} is not a number")
    if rope_type == "linear":
        return LinearScaling(**factors)
    if rope_type == "llama3":
        return Llama3Scaling(original_length=original_length, **factors)
    return YarnScaling(
        **factors,
        original_length=original_length,
        beta_fast=table.get("beta_fast") or 32.0,
        beta_slow=table.get("beta_slow") or 1.0,
        attention_factor=_get_attention_factor(table),
        truncate=truncate,
    )


def _get_attention_factor(table: Mapping[str, Any]) -> float | None:
    """Return YaRN's attention factor, if absent from mscale and mscale_all_dim."""
    factor, mscale, mscale_all_dims = (table.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is not None or not (mscale and mscale_all_dims):
        return factor
    log_factor = math.log(max(float(table["factor"]), 1.0))
    return float((0.1 * mscale * log_factor + 1.0) / (0.1 * mscale_all_dims * log_factor + 1.0))


LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read_n_layers(hf_config: Json) -> int:
    """Return num_hidden_layers. Raises UsageError for a number that no model has: lists of all layers are made next."""
    n_layers = hf_config["num_hidden_layers"]
    if not 1 <= n_layers <= MAX_LAYERS:
        raise UsageError(f"config.json: num_hidden_layers = {n_layers} is not between 1 and {MAX_LAYERS}")
    return int(n_layers)


def read_layer_types(hf_config: Json, global_every: int, *, first: str = LOCAL) -> list[str]:
    """Read `layer_types`. If left out, one in `global_every` layers has full attention, the last or the `first` of
    each run. Raises UsageError."""
    n, layer_types = read_n_layers(hf_config), hf_config["layer_types"]
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


def make_layer_type_blocks(layer_types: Sequence[str], local: Json, full: Json) -> Json:
    """Return our `layer_types`, as a cycle of "local" and "global", and the section of each kind."""
    names = ["local" if layer_type == LOCAL else "global" for layer_type in layer_types]
    cycle = next(i for i in range(1, len(names) + 1) if all(a == b for a, b in zip(names[i:], names, strict=False)))
    sections = {"local": local, "global": full}
    return {"layer_types": names[:cycle], **{f"layer_type.{name}": sections[name] for name in dict.fromkeys(names)}}


def make_window_section(width: int) -> Json:
    """Return the keys of a block whose attention has a window."""
    return {"attention": {"pattern": {"name": "window", "width": width}}}


def write_layer_types(config: ModelConfig) -> list[str]:
    """Return transformers' `layer_types`. Raises UsageError for a block with another pattern."""
    return [GLOBAL if width is None else LOCAL for width in list_window_widths(config)]


def list_window_widths(config: ModelConfig) -> list[int | None]:
    """Return the width of each block's window; None for full attention. Raises UsageError for another pattern."""
    widths: list[int | None] = []
    for depth in range(config.n_layers):
        pattern = config.layer_config(depth).attention.pattern
        if not isinstance(pattern, WindowPatternConfig | FullPatternConfig):
            raise UsageError(
                f"model.attention.pattern.name = {pattern.name!r}: transformers has only windows and full attention"
            )
        widths.append(pattern.width if isinstance(pattern, WindowPatternConfig) else None)
    return widths


def find_window_width(config: ModelConfig, default: int) -> int:
    """Return the width of the first window, or a default if there is none."""
    return next((width for width in list_window_widths(config) if width is not None), default)
