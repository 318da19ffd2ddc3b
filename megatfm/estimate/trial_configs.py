"""Small copies of a config, whose steps a calibration measures: few layers, several widths, several numbers of tokens.

A copy has what the original's operators depend on: ties, biases, patterns, and a block of each kind, stage and tower.
Heads are as wide as the original's, and fewer; a single head becomes narrower. There are a few experts for each choice.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megatfm.config import Config, GQAAttentionConfig, MLAAttentionConfig, ModelConfig, ParallelConfig
from megatfm.config.attention import AttentionSection
from megatfm.config.ffn import DenseFFNConfig, MoEConfig
from megatfm.config.section import unflatten
from megatfm.describe import describe
from megatfm.errors import UsageError
from megatfm.train.build import fit_frozen_patterns

MAX_FLOPS: Mapping[str, float] = {"cpu": 4e10, "cuda": 1e14}
"""FLOPs of the largest trial step, which takes about half a second."""
MAX_PARAMETERS: Mapping[str, float] = {"cpu": 1e8, "cuda": 3e8}
"""Parameters of the largest trial: all trials are in memory at once."""
MAX_VOCABULARY: Mapping[str, int] = {"cpu": 4096, "cuda": 32768}
"""Tokens of the largest vocabulary of a trial."""
WIDTH_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Divisors of a model's width in trials; the largest `N_WIDTHS` widths that are small enough take part."""
N_WIDTHS = 4
WIDTH_MULTIPLE = 8
"""Divided widths are multiples of it."""
MIN_LAYERS = 2
"""Blocks of a trial, and of each stage: stochastic depth drops none of the first, and windows shift in every second."""
MIN_EXPERTS, EXPERTS_PER_CHOICE = 8, 4
"""Experts of a trial: at least so many, and so many for each that a token chooses."""
ROWS: Mapping[str, Sequence[tuple[int, int]]] = {
    "cpu": ((1, 128), (2, 192), (1, 320), (2, 512)),
    "cuda": ((1, 1024), (2, 1024), (1, 4096)),
}
"""Rows and tokens of a row of trials. Rows of images keep their length."""
SECOND_STACKS = ("generator", "pixel_decoder", "text_tower", "vision_tower")
"""Sections of a model with sizes of blocks of their own."""


def list_trials(config: Config, kind: str, precision: str) -> list[Config]:
    """Return small copies of a config, on one rank: few layers, several widths, and several numbers of tokens.

    kind: of the device, as torch names it. Raises UsageError with the reason where no copy can be made.
    """
    device = {"train.device": kind, "train.precision": precision}
    trials: list[Config] = []
    reason = ""
    for divisor, (rows, length) in itertools.product(WIDTH_DIVISORS, ROWS[kind]):
        try:
            changes = _make_changes(config, divisor, rows, length, MAX_VOCABULARY[kind]) | device
            trial = fit_frozen_patterns(config.with_changes(changes), config)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            continue
        widths = {earlier.model.d_model for earlier in trials}
        if trial in trials or (len(widths) == N_WIDTHS and trial.model.d_model not in widths):
            continue
        description = describe(trial)
        flops = description.flops_full * description.tokens_per_step
        if flops <= MAX_FLOPS[kind] and description.parameters <= MAX_PARAMETERS[kind]:
            trials.append(trial)
        else:
            width, weights = trial.model.d_model, description.parameters
            reason = f"of width {width}, it has {weights:,} parameters, and a step takes {flops:.0e} FLOPs"
    if not trials:
        raise UsageError(f"no small copy of {config.name} can be made: {reason}")
    return trials


def _make_changes(config: Config, divisor: int, rows: int, length: int, max_vocabulary: int) -> dict[str, Any]:
    """Return the changes of a config that make it small. length: tokens of a row of text."""
    data, model = config.data, config.model
    changes: dict[str, Any] = {
        "parallel": ParallelConfig(zero=0, dp_shard=1),
        "train.micro_batch": rows,
        "train.global_batch": rows,
        "train.recompute": "none",
        "train.compile": False,
        "train.cuda_graphs": False,
    }
    if model.patch_embedding is None:
        changes["data.sequence_length"] = min(length, data.sequence_length)
    elif model.vision_tower is not None and data.target_length is not None:  # a row of text holds an image, too
        changes["data.target_length"] = min(data.sequence_length + length, data.target_length)
    sizes = _shrink_depth(model) | _shrink_vocabulary(model, max_vocabulary)
    if divisor > 1:
        sizes |= _divide_model(model, divisor)
    kinds = {
        kind: _shrink_layer_type(model, kind, sizes.get("d_model", model.d_model), divisor) for kind in model.layer_type
    }
    sizes |= {"layer_type": kinds} | _prefix("ffn", _shrink_experts(model.ffn))
    return changes | _prefix("model", sizes)


def _prefix(section: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in changes.items()}


# ------------------------------------------------------------------------------------------------ fewer


def _shrink_depth(model: ModelConfig) -> dict[str, Any]:
    """Return few layers: a block of each kind in the order of the model's, and several of each stage."""
    kinds = tuple(dict.fromkeys(model.layer_types))
    layers = max(MIN_LAYERS, len(kinds))
    changes: dict[str, Any] = {"n_layers": min(model.n_layers, layers), "layer_types": kinds}
    if model.n_encoder_layers:
        changes["n_encoder_layers"] = min(model.n_encoder_layers, layers)
    if model.distinct_layers:
        changes["distinct_layers"] = 1
    changes["n_mtp_heads"] = min(model.n_mtp_heads, 1)
    if model.stages is not None:
        of_stages = [min(n, MIN_LAYERS) for n in model.stages.layers]
        changes |= {"stages.layers": of_stages, "n_layers": sum(of_stages)}
    for name in SECOND_STACKS:
        if (stack := getattr(model, name)) is not None and stack.n_layers is not None:
            changes[f"{name}.n_layers"] = min(stack.n_layers, MIN_LAYERS)
    return changes


def _shrink_vocabulary(model: ModelConfig, max_vocabulary: int) -> dict[str, Any]:
    """Return a small vocabulary, and the id of image tokens in it."""
    if not model.vocab_size:
        return {}
    size = min(model.vocab_size, max_vocabulary)
    changes: dict[str, Any] = {"vocab_size": size}
    if model.connector is not None:
        changes["connector.image_token_id"] = min(model.connector.image_token_id, size - 1)
    return changes


def _shrink_experts(ffn: DenseFFNConfig) -> dict[str, Any]:
    """Return a feed-forward network's few experts: several in each of the router's groups."""
    if not isinstance(ffn, MoEConfig):
        return {}
    n_experts = max(MIN_EXPERTS, EXPERTS_PER_CHOICE * ffn.top_k)
    multiple = 2 * getattr(ffn.router, "n_group", 1)
    return {"n_experts": min(ffn.n_experts, -(-n_experts // multiple) * multiple)}


# ------------------------------------------------------------------------------------------------ narrower


def _divide_model(model: ModelConfig, divisor: int) -> dict[str, Any]:
    """Return the divided widths of a model and of its second stacks."""
    is_square = model.attention.head_dim_or_none is None
    d_model, n_heads = (
        _divide_square(model.d_model, model.attention.n_heads, divisor)
        if is_square
        else (_divide_width(model.d_model, 1 / divisor), 0)
    )
    share = d_model / model.d_model
    changes: dict[str, Any] = {"d_model": d_model, "ffn.d_ff": _divide_width(model.ffn.d_ff, share)}
    changes |= _prefix("attention", _divide_attention(model.attention, divisor, share))
    if model.stages is not None:
        first = model.stages.heads[0]
        changes |= {
            "attention.n_heads": n_heads,
            "stages.heads": [max(1, heads * n_heads // first) for heads in model.stages.heads],
        }
    for name in SECOND_STACKS:
        if (stack := getattr(model, name)) is not None:
            width, heads = _divide_square(stack.d_model, stack.n_heads, divisor)
            sizes = {"d_model": width, "n_heads": heads, "d_ff": _divide_width(stack.d_ff, width / stack.d_model)}
            changes |= _prefix(name, sizes)
    if model.contrastive is not None:
        is_projected = model.contrastive.project_image
        changes["contrastive.width"] = _divide_width(model.contrastive.width, share) if is_projected else d_model
    return changes


def _divide_square(d_model: int, n_heads: int, divisor: int) -> tuple[int, int]:
    """Return the width and the heads of blocks whose heads together are as wide as their input."""
    if n_heads >= divisor:
        heads = n_heads // divisor
        return heads * (d_model // n_heads), heads
    return _divide_width(d_model, 1 / divisor), 1


def _divide_attention(attention: AttentionSection, divisor: int, share: float) -> dict[str, Any]:
    """Return an attention layer's heads and ranks. Query heads that share keys still do. share: of the width."""
    if not isinstance(attention, GQAAttentionConfig) or attention.kv_heads == attention.n_heads:
        changes: dict[str, Any] = {"n_heads": max(1, attention.n_heads // divisor)}
    else:
        kv_heads = max(1, attention.kv_heads // divisor)
        changes = {"n_heads": max(2, attention.n_heads // divisor // kv_heads) * kv_heads, "n_kv_heads": kv_heads}
    if isinstance(attention, MLAAttentionConfig):
        changes["kv_lora_rank"] = _divide_width(attention.kv_lora_rank, share)
        changes["q_lora_rank"] = attention.q_lora_rank and _divide_width(attention.q_lora_rank, share)
    return changes


def _divide_width(size: int, share: float) -> int:
    """Return a share of a width, rounded down to a multiple of `WIDTH_MULTIPLE`."""
    return min(size, max(1, int(size * share) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def _shrink_layer_type(model: ModelConfig, kind: str, d_model: int, divisor: int) -> dict[str, Any]:
    """Return the keys of a kind of blocks, with fewer experts, and divided as the model's. d_model: of the trial."""
    keys, layer = unflatten(model.layer_type[kind]), model.type_config(kind)
    ffn, attention = dict(keys.get("ffn", {})), dict(keys.get("attention", {}))
    share = d_model / model.d_model
    if "d_ff" in ffn and divisor > 1:
        ffn["d_ff"] = _divide_width(layer.ffn.d_ff, share)
    if "n_experts" in ffn:
        ffn |= _shrink_experts(layer.ffn)
    if divisor > 1:
        sizes = _divide_attention(layer.attention, divisor, share)
        attention |= {key: sizes[key] for key in attention.keys() & sizes.keys()}
    return keys | ({"ffn": ffn} if ffn else {}) | ({"attention": attention} if attention else {})
