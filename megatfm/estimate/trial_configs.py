"""Small copies of a config, whose steps a calibration measures: few layers, many widths, several numbers of tokens.

A copy has what the original's operators depend on: ties, biases, patterns, and a block of each kind, stage and tower.
Heads are as wide as the original's, and fewer; a single head becomes narrower. There are a few experts for each choice.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

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
WIDTH_SHARES = tuple(Fraction(*ratio) for ratio in (
    (1,), (3, 4), (2, 3), (1, 2), (5, 12), (1, 3), (1, 4), (1, 6), (1, 8), (1, 12), (1, 16), (1, 24), (1, 32),
    (1, 48), (1, 64),
))  # fmt: skip
"""Shares of a model's width in trials; the largest `N_WIDTHS` widths that are small enough take part."""
N_WIDTHS: Mapping[str, int] = {"cpu": 8, "cuda": 4}
WIDTH_MULTIPLE = 8
"""Widths that are no whole heads are multiples of it."""
N_LAYERS = (2, 4)
"""Blocks of trials, and of each stage, in turns: the first of equal operators in a step takes longer than the next.
Two at least: stochastic depth drops none of the first, and windows shift in every second."""
MIN_EXPERTS, EXPERTS_PER_CHOICE = 8, 4
"""Experts of a trial: at least so many, and so many for each that a token chooses."""
ROWS: Mapping[str, Sequence[Sequence[tuple[int, int]]]] = {
    "cpu": (((1, 128), (2, 512)), ((2, 192), (1, 320))),
    "cuda": (((1, 1024), (2, 1024), (1, 4096)),),
}
"""Rows and tokens of a row of trials of a width; widths take turns. Rows of images keep their length."""
SECOND_STACKS = ("generator", "pixel_decoder", "text_tower", "vision_tower")
"""Sections of a model with sizes of blocks of their own."""


def list_trials(config: Config, kind: str, precision: str) -> list[Config]:
    """Return small copies of a config, on one rank: few layers, many widths, and several numbers of tokens.

    kind: of the device, as torch names it. Raises UsageError with the reason where no copy can be made.
    """
    trials: list[Config] = []
    widths: set[int] = set()
    reason: UsageError | None = None
    for share in WIDTH_SHARES:
        if len(widths) == N_WIDTHS[kind]:
            break
        for index, rows in enumerate(ROWS[kind][len(widths) % len(ROWS[kind])]):
            n_layers = N_LAYERS[(len(widths) + index) % len(N_LAYERS)]
            try:
                trial = _make_trial(config, kind, precision, share, n_layers, rows)
            except UsageError as error:
                reason = error
                continue
            if trial not in trials:
                trials.append(trial)
        widths = {trial.model.d_model for trial in trials}
    if not trials:
        raise UsageError(f"no small copy of {config.name} can be made: {reason}")
    return trials


def _make_trial(
    config: Config, kind: str, precision: str, share: Fraction, n_layers: int, rows: tuple[int, int]
) -> Config:
    """Return a small copy of a config, with fewer layers if it would be too large with `n_layers`.

    share: of its width; rows: their number and tokens. Raises UsageError for one that is too large with the fewest
    layers, or whose sizes do not fit together.
    """
    changes = {"train.device": kind, "train.precision": precision}
    changes |= _make_changes(config, share, n_layers, rows, MAX_VOCABULARY[kind])
    trial = fit_frozen_patterns(config.with_changes(changes), config)
    description = describe(trial)
    flops, weights = description.flops_full * description.tokens_per_step, description.parameters
    if flops > MAX_FLOPS[kind] or weights > MAX_PARAMETERS[kind]:
        if n_layers > min(N_LAYERS):
            return _make_trial(config, kind, precision, share, min(N_LAYERS), rows)
        width = trial.model.d_model
        raise UsageError(f"of width {width}, it has {weights:,} parameters, and a step takes {flops:.0e} FLOPs")
    return trial


def _make_changes(
    config: Config, share: Fraction, n_layers: int, rows: tuple[int, int], max_vocabulary: int
) -> dict[str, Any]:
    """Return the changes of a config that make it small. share, rows: see `_make_trial`."""
    data, model = config.data, config.model
    n_rows, length = rows
    changes: dict[str, Any] = {
        "parallel": ParallelConfig(zero=0, dp_shard=1),
        "train.micro_batch": n_rows,
        "train.global_batch": n_rows,
        "train.recompute": "none",
        "train.compile": False,
        "train.cuda_graphs": False,
    }
    if model.patch_embedding is None:
        changes["data.sequence_length"] = min(length, data.sequence_length)
    elif model.vision_tower is not None and data.target_length is not None:  # a row of text holds an image, too
        changes["data.target_length"] = min(data.sequence_length + length, data.target_length)
    sizes = _shrink_depth(model, n_layers) | _shrink_vocabulary(model, max_vocabulary)
    if share < 1:
        sizes |= _narrow_model(model, share)
    kinds = {
        kind: _shrink_layer_type(model, kind, sizes.get("d_model", model.d_model), share) for kind in model.layer_type
    }
    sizes |= {"layer_type": kinds} | _prefix("ffn", _shrink_experts(model.ffn))
    return changes | _prefix("model", sizes)


def _prefix(section: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in changes.items()}


# ------------------------------------------------------------------------------------------------ fewer


def _shrink_depth(model: ModelConfig, n_layers: int) -> dict[str, Any]:
    """Return few layers: a block of each kind in the order of the model's, and several of each stage."""
    kinds = tuple(dict.fromkeys(model.layer_types))
    layers = max(n_layers, len(kinds))
    changes: dict[str, Any] = {"n_layers": min(model.n_layers, layers), "layer_types": kinds}
    if model.n_encoder_layers:
        changes["n_encoder_layers"] = min(model.n_encoder_layers, layers)
    if model.distinct_layers:
        changes["distinct_layers"] = 1
    changes["n_mtp_heads"] = min(model.n_mtp_heads, 1)
    if model.stages is not None:
        stage_layers = [min(n, n_layers) for n in model.stages.n_layers]
        changes |= {"stages.n_layers": stage_layers, "n_layers": sum(stage_layers)}
    for name in SECOND_STACKS:
        if (stack := getattr(model, name)) is not None and stack.n_layers is not None:
            changes[f"{name}.n_layers"] = min(stack.n_layers, n_layers)
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


def _narrow_model(model: ModelConfig, share: Fraction) -> dict[str, Any]:
    """Return a share of the widths of a model and of its second stacks."""
    is_square = model.attention.head_dim_or_none is None
    d_model, n_heads = (
        _narrow_square(model.d_model, model.attention.n_heads, share)
        if is_square
        else (_narrow(model.d_model, share), 0)
    )
    width_share = Fraction(d_model, model.d_model)
    changes: dict[str, Any] = {"d_model": d_model, "ffn.d_ff": _narrow(model.ffn.d_ff, width_share)}
    changes |= _prefix("attention", _narrow_attention(model.attention, share, width_share))
    if model.stages is not None:
        first = model.stages.n_heads[0]
        changes |= {
            "attention.n_heads": n_heads,
            "stages.n_heads": [max(1, heads * n_heads // first) for heads in model.stages.n_heads],
        }
    for name in SECOND_STACKS:
        if (stack := getattr(model, name)) is not None:
            width, heads = _narrow_square(stack.d_model, stack.n_heads, share)
            d_ff = _narrow(stack.d_ff, Fraction(width, stack.d_model))
            sizes = {"d_model": width, "n_heads": heads, "d_ff": d_ff}
            changes |= _prefix(name, sizes)
    if model.contrastive is not None:
        is_projected = model.contrastive.project_image
        changes["contrastive.width"] = _narrow(model.contrastive.width, width_share) if is_projected else d_model
    return changes


def _narrow_square(d_model: int, n_heads: int, share: Fraction) -> tuple[int, int]:
    """Return the width and the heads of blocks whose heads together are as wide as their input."""
    if heads := int(n_heads * share):
        return heads * (d_model // n_heads), heads
    return _narrow(d_model, share), 1


def _narrow_attention(attention: AttentionSection, share: Fraction, width_share: Fraction) -> dict[str, Any]:
    """Return an attention layer's heads and ranks. Query heads that share keys still do.

    share: of the heads; width_share: of the model's width, which whole heads may have rounded.
    """
    n_heads = int(attention.n_heads * share)
    if not isinstance(attention, GQAAttentionConfig) or attention.kv_heads == attention.n_heads:
        changes: dict[str, Any] = {"n_heads": max(1, n_heads)}
    else:
        kv_heads = max(1, int(attention.kv_heads * share))
        changes = {"n_heads": max(2, n_heads // kv_heads) * kv_heads, "n_kv_heads": kv_heads}
    if isinstance(attention, MLAAttentionConfig):
        changes["kv_lora_rank"] = _narrow(attention.kv_lora_rank, width_share)
        changes["q_lora_rank"] = attention.q_lora_rank and _narrow(attention.q_lora_rank, width_share)
    return changes


def _narrow(size: int, share: Fraction) -> int:
    """Return a share of a width, rounded down to a multiple of `WIDTH_MULTIPLE`."""
    return min(size, max(1, int(size * share) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def _shrink_layer_type(model: ModelConfig, kind: str, d_model: int, share: Fraction) -> dict[str, Any]:
    """Return the keys of a kind of blocks, with fewer experts, and narrowed as the model's. d_model: of the trial."""
    keys, layer = unflatten(model.layer_type[kind]), model.type_config(kind)
    ffn, attention = dict(keys.get("ffn", {})), dict(keys.get("attention", {}))
    width_share = Fraction(d_model, model.d_model)
    if "d_ff" in ffn and share < 1:
        ffn["d_ff"] = _narrow(layer.ffn.d_ff, width_share)
    if "n_experts" in ffn:
        ffn |= _shrink_experts(layer.ffn)
    if share < 1:
        sizes = _narrow_attention(layer.attention, share, width_share)
        attention |= {key: sizes[key] for key in attention.keys() & sizes.keys()}
    return keys | ({"ffn": ffn} if ffn else {}) | ({"attention": attention} if attention else {})
