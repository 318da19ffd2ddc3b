"""Shrinks a config so that verifying it takes seconds, keeping all that a layout could get wrong, and draws a batch."""

from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from megatfm import rng
from megatfm.config import (
    BigBirdPatternConfig,
    ChunkedPatternConfig,
    CompressedAttentionConfig,
    Config,
    FixedPatternConfig,
    GQAAttentionConfig,
    LinformerAttentionConfig,
    LongformerPatternConfig,
    MLAAttentionConfig,
    ModelConfig,
    ParallelConfig,
    StridedPatternConfig,
    TrainConfig,
    WindowPatternConfig,
    make_usage_error,
)
from megatfm.config.attention import AttentionSection
from megatfm.config.section import Section, unflatten
from megatfm.config.world_size import compute_axis_sizes
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig, needs_own_row
from megatfm.errors import UsageError
from megatfm.objectives import Objective, SpecialTokens, build_objective, reads_text
from megatfm.parallel.mesh import SHARD
from megatfm.train.build import fit_frozen_patterns
from megatfm.verify.layouts import Documents, count_ranks
from megatfm.verify.shrink_images import (
    shrink_features,
    shrink_image_section,
    shrink_masks,
    shrink_patches,
    shrink_rows,
    shrink_second_tower,
    shrink_stages,
)

MAX_RANKS = 16
"""Largest number of processes to start on one machine."""

LAYERS, HEAD_DIM, WIDTH, RANK = 2, 8, 64, 32
LENGTH = 64
"""Tokens of a row: several documents, windows, chunks and blocks, some of which span ranks."""
MICRO_BATCH, MICROBATCHES = 2, 2
VOCABULARY = 1000  # for configs that take it from the tokenizer, which need not exist here


class RowLengths(NamedTuple):
    """Tokens of the longest row in the original and in the small config."""

    original: int
    length: int


def shrink(config: Config) -> tuple[Config, list[str]]:
    """Return the small config, and a line for each change. Raises UsageError for a layout of too many processes.

    Keeps modules, ties, the optimizer, the ratio of query to key-value heads, and the remainders of vocabulary and
    feed-forward width modulo the ranks that share them. Attention windows, chunks and blocks shrink with the rows, so
    that a row has several. Axes keep their sizes; dp_shard = −1 becomes 2, or 1 beside other axes, or what `ep` needs.
    The model has a layer for each pipeline stage and kind of block; split points are chosen automatically. Options that
    are inexact by design are switched off.
    """
    parallel = _resolve_layout(config.parallel)
    data_ranks = parallel.dp_replicate * compute_axis_sizes(parallel, count_ranks(parallel))[SHARD]
    original_lengths = config.data.model_dump(include={"sequence_length", "target_length"})
    lengths = {
        key: length and _shrink_size(length, max(LENGTH, 2 * parallel.cp * parallel.tp), parallel.tp)
        for key, length in original_lengths.items()
    }
    images: dict[str, Any] = {}
    if config.model.stages is not None:
        lengths["sequence_length"], side = shrink_rows(config, config.model.stages)
        images = {"images": config.data.images.model_copy(update={"size": side})}
    rows = RowLengths(*(max(filter(None, lengths_by_key.values())) for lengths_by_key in (original_lengths, lengths)))
    try:
        model = _shrink_model(
            config.model,
            head_ranks=parallel.tp * parallel.cp,
            shards=parallel.tp * parallel.zero_shards,
            stages=parallel.pp * parallel.stages_per_rank,
            rows=rows,
        )
    except ValidationError as error:
        raise make_usage_error("verify can't make this model small", error) from None
    small = config.model_copy(
        update={
            "model": model,
            "objective": shrink_masks(config, model),
            "parallel": parallel.model_copy(
                update={"reduce_dtype": "param", "comm_buffers": "torch", "async_tp": False}
            ),
            "data": config.data.model_copy(update=lengths | (images or shrink_image_section(config, model))),
            "train": _shrink_train(config.train, parallel, data_ranks),
        }
    )
    small = fit_frozen_patterns(small, config)
    return small, _list_changes(config, small)


def _shrink_train(train: TrainConfig, parallel: ParallelConfig, data_ranks: int) -> TrainConfig:
    """Return the section with few small micro-batches, on a CPU, in the widest precision of the engine."""
    return train.model_copy(
        update={
            "micro_batch": MICRO_BATCH,
            "global_batch": MICRO_BATCH * (MICROBATCHES + parallel.pp - 1) * data_ranks,
            # DeepSpeed keeps the optimizer's weights in float32.
            "precision": "fp32" if parallel.engine == "deepspeed" else "fp64",
            "device": "cpu",
            "compile": False,
            "recompute": "none" if train.recompute.endswith("%") else train.recompute,
        }
    )


def _resolve_layout(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout with automatic split points and without dp_shard = −1; UsageError for too many ranks."""
    if parallel.dp_shard == -1:
        min_dp_shard = 2 if parallel.tp * parallel.pp * parallel.cp == 1 else 1
        # Each rank of dp_shard adds −expert_mesh_size ranks (dp_shard is −1 here); `ep` divides all of them.
        multiple = parallel.ep // gcd(parallel.ep, -parallel.expert_mesh_size)
        parallel = parallel.model_copy(update={"dp_shard": -(-min_dp_shard // multiple) * multiple})
    if (world_size := count_ranks(parallel)) > MAX_RANKS:
        raise UsageError(
            f"this layout has {world_size} processes, but verify starts all of them on this machine, at most "
            f"{MAX_RANKS}: use smaller axes, e.g. parallel.dp_replicate=1 parallel.dp_shard=2"
        )
    return parallel.model_copy(update={"pp_split_points": []})


def _shrink_model(model: ModelConfig, *, head_ranks: int, shards: int, stages: int, rows: RowLengths) -> ModelConfig:
    """Return the small model. head_ranks: ranks that divide heads, tp × cp. shards: ranks that divide widths."""
    kv_heads = min(model.attention.kv_heads, 2 * head_ranks)  # two per rank, so that a wrong order shows
    heads = kv_heads * (model.attention.n_heads // model.attention.kv_heads)
    head_dim = min(model.head_width, HEAD_DIM)
    is_square = model.d_model == model.attention.n_heads * model.head_width
    distinct = model.distinct_layers and min(model.distinct_layers, LAYERS)
    first_depths = (model.layer_types.index(kind) + 1 for kind in model.layer_type)
    # One block more than distinct layers, so that two share weights.
    layers = max(LAYERS, stages, 1 + (distinct or 0), *first_depths)
    changes: dict[str, Any] = {
        "vocab_size": _shrink_size(model.vocab_size or VOCABULARY, WIDTH, shards),
        "n_layers": min(model.n_layers, layers),
        "n_encoder_layers": model.n_encoder_layers and min(model.n_encoder_layers, layers),
        "distinct_layers": distinct,
        "d_model": heads * head_dim if is_square else _shrink_size(model.d_model, WIDTH, shards),
        "attention.n_heads": heads,
        f"attention.{model.attention.head_dim_key}": model.attention.head_dim_or_none and head_dim,
        "ffn.d_ff": _shrink_size(model.ffn.d_ff, WIDTH, shards),
    }
    changes |= shrink_stages(model, head_ranks, HEAD_DIM)
    if isinstance(model.attention, GQAAttentionConfig):
        changes["attention.n_kv_heads"] = model.attention.n_kv_heads and kv_heads
    for key, size in _shrink_attention(model.attention, rows.length, shards).items():
        changes[f"attention.{key}"] = size
    for key, size in _shrink_pattern(model.attention.pattern, rows).items():
        changes[f"attention.pattern.{key}"] = size
    if (generator := model.generator) is not None:
        n_heads = min(generator.n_heads, 2 * head_ranks)
        changes["generator"] = {
            "d_model": n_heads * min(generator.d_model // generator.n_heads, HEAD_DIM),
            "n_heads": n_heads,
            "d_ff": _shrink_size(generator.d_ff, WIDTH, shards),
            "n_layers": generator.n_layers and min(generator.n_layers, layers),
        }
    changes |= shrink_patches(model)
    changes |= shrink_second_tower(
        model, head_ranks, layers, HEAD_DIM, lambda width: _shrink_size(width, WIDTH, shards)
    )
    changes |= shrink_features(model, changes["d_model"])
    if model.connector is not None and changes.get("vocab_size"):
        changes["connector.image_token_id"] = min(model.connector.image_token_id, changes["vocab_size"] - 1)
    changes["layer_type"] = {
        kind: _shrink_layer_type(model, kind, head_ranks, shards, rows) for kind in model.layer_type
    }
    return model.with_changes(changes)


def _shrink_attention(attention: AttentionSection, length: int, shards: int) -> dict[str, Any]:
    """Return the small sizes of an attention layer other than heads and pattern. length: tokens of the longest row."""
    if isinstance(attention, MLAAttentionConfig):
        width = attention.v_head_dim
        return {
            "kv_lora_rank": _shrink_size(attention.kv_lora_rank, RANK, shards),
            "q_lora_rank": attention.q_lora_rank and _shrink_size(attention.q_lora_rank, RANK, shards),
            "qk_rope_head_dim": _shrink_size(attention.qk_rope_head_dim, HEAD_DIM, 2),
            # Stays different from the width of keys if it was.
            "v_head_dim": width and min(width, HEAD_DIM + (0 if width == attention.qk_nope_head_dim else 2)),
        }
    if isinstance(attention, LinformerAttentionConfig):
        return {
            "max_length": min(attention.max_length, length),
            "projected_length": min(attention.projected_length, max(1, length // 8)),
        }
    if isinstance(attention, CompressedAttentionConfig):
        return {"factor": min(attention.factor, max(1, length // 8))}
    return {}


def _shrink_pattern(pattern: Section, rows: RowLengths) -> dict[str, Any]:
    """Return the pattern options that shrink with the row, so that a row has several windows, chunks or blocks.

    A window as wide as the row stays as wide as the row; a plugin's pattern keeps its options.
    """
    old_length, length = rows
    quarter, eighth = max(1, length // 4), max(1, length // 8)
    match pattern:
        case WindowPatternConfig():
            step = min(pattern.dilation, 2)
            width = _shrink_size(pattern.width, max(1, quarter // step), 2)
            if pattern.width * pattern.dilation >= old_length:
                width = pattern.width * pattern.dilation * length // old_length // step
            return {"width": width, "dilation": step, "initial_tokens": min(pattern.initial_tokens, 2)}
        case LongformerPatternConfig():
            width = _shrink_size(pattern.width, quarter, 2)
            tokens = dict.fromkeys(min(token, length // 2) for token in pattern.global_tokens)
            return {
                "width": width if pattern.width < old_length else pattern.width * length // old_length,
                "global_tokens": tuple(tokens),
            }
        case ChunkedPatternConfig():
            size = min(pattern.size, max(1, length // 3))  # thirds do not end where a rank's tokens end
            return {"size": size if pattern.size < old_length else pattern.size * length // old_length}
        case StridedPatternConfig():
            return {"stride": min(pattern.stride, eighth)}
        case FixedPatternConfig():
            stride = min(pattern.stride, eighth)
            return {"stride": stride, "n_summary_tokens": max(1, min(pattern.n_summary_tokens, stride // 3))}
        case BigBirdPatternConfig():
            # Documents of up to `n_blocks` blocks have full attention: a row with more blocks keeps more than that.
            random, extra = min(pattern.n_random_blocks, 2), min(pattern.n_global_tokens, eighth)
            n_blocks, options = 5 + 2 * random, {"n_random_blocks": random, "n_global_tokens": extra}
            if (5 + 2 * pattern.n_random_blocks) * pattern.block_size >= old_length:
                return {"block_size": -(-length // n_blocks), **options}
            return {"block_size": min(pattern.block_size, max(1, length // (n_blocks + 4))), **options}
    return {}


def _shrink_layer_type(model: ModelConfig, kind: str, head_ranks: int, shards: int, rows: RowLengths) -> dict[str, Any]:
    """Return the keys of a kind of blocks, shrunk like the model's."""
    keys, layer = unflatten(model.layer_type[kind]), model.type_config(kind)
    if "d_ff" in keys.get("ffn", {}):
        keys["ffn"] = {**keys["ffn"], "d_ff": _shrink_size(layer.ffn.d_ff, WIDTH, shards)}
    attention = dict(keys.get("attention", {}))
    if {"n_heads", "n_kv_heads", layer.attention.head_dim_key} & attention.keys():
        kv_heads = min(layer.attention.kv_heads, 2 * head_ranks)
        heads = kv_heads * (layer.attention.n_heads // layer.attention.kv_heads)
        attention |= {"n_heads": heads, layer.attention.head_dim_key: min(layer.head_width, HEAD_DIM)}
        if isinstance(layer.attention, GQAAttentionConfig):
            attention["n_kv_heads"] = kv_heads
    sizes = _shrink_attention(layer.attention, rows.length, shards)
    attention |= {key: sizes[key] for key in attention.keys() & sizes.keys()}
    if "pattern" in attention:
        pattern = layer.attention.pattern
        attention["pattern"] = {**pattern.model_dump(), **_shrink_pattern(pattern, rows)}
    return {**keys, **({"attention": attention} if attention else {})}


def _shrink_size(size: int, min_size: int, modulus: int) -> int:
    """Return the smallest size ≥ min_size with the same remainder as `size`, but at most `size`."""
    return min(size, min_size + (size - min_size) % modulus)


def _list_changes(original: Config, shrunk: Config) -> list[str]:
    return [
        change
        for section in ("model", "parallel", "data", "train")
        for change in _iter_section_changes(section, getattr(original, section), getattr(shrunk, section))
    ]


def _iter_section_changes(key_path: str, old: Section, new: Section) -> Iterator[str]:
    for key in type(old).model_fields:
        yield from _iter_value_changes(f"{key_path}.{key}", getattr(old, key), getattr(new, key))


def _iter_value_changes(key_path: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, Section) and isinstance(new, Section):
        yield from _iter_section_changes(key_path, old, new)
    elif isinstance(old, dict) and isinstance(new, dict):  # [model.layer_type]
        for key, value in unflatten(old).items():
            yield from _iter_value_changes(f"{key_path}.{key}", value, unflatten(new).get(key, value))
    elif isinstance(old, str) and isinstance(new, dict):  # a pattern given by its name only
        return
    elif old != new:
        yield f"{key_path} {'(not set)' if old is None else old} → {new}"


Arrays = dict[str, NDArray[Any]]

DOCUMENT_CYCLE: tuple[Documents, ...] = ("short", "one", "sparse", "long")


def objective_for(config: Config) -> Objective:
    """Build the objective with made-up special tokens; a third of the vocabulary are sentinels."""
    size = config.model.vocab_size
    if size is None and not reads_text(config.objective.name):
        return build_objective(config.objective, config.model, None, get_side_lengths(config), config.data.images)
    assert size is not None
    special = SpecialTokens(
        bos=1,
        eos=2,
        pad=0,
        vocab_size=size,
        mask=3,
        cls=4,
        sep=5,
        sentinels=range(size - 1, size - 1 - size // 3, -1),
        word_starts=np.arange(size) % 3 > 0,
    )
    return build_objective(config.objective, config.model, special, get_side_lengths(config), config.data.images)


def get_side_lengths(config: Config) -> tuple[int, ...]:
    """Return the row length of each side that the config has."""
    return tuple(n for n in (config.data.sequence_length, config.data.target_length) if n is not None)


def draw_batch(config: Config, documents: Documents = "mixed") -> Arrays:
    """Draw a global batch: field → values [global_batch, S], and "keys" [global_batch], the random keys of rows.

    documents: kind of documents where the objective packs them; a row ends with a cut document or padding.
    """
    objective, lengths = objective_for(config), get_side_lengths(config)
    seed = config.train.seed
    across = config.data.attend_across_documents
    packing = PackingConfig(objective, lengths[: len(objective.field_prefixes)], seed, attend_across_documents=across)
    rows = []
    for row_index in range(config.train.global_batch):
        random = np.random.Generator(rng.bit_generator(seed, "verify", row_index))
        kind = DOCUMENT_CYCLE[row_index % len(DOCUMENT_CYCLE)] if documents == "mixed" else documents
        chunks = list(draw_documents(config, objective, random, kind))
        files = [chunk.files for chunk in chunks] if objective.needs_files else None
        rows.append(pack_in_memory([chunk.tokens for chunk in chunks], packing, members=files).build_row(0))
    fields: Arrays = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    return fields | {"keys": rng.row_keys(seed, np.arange(len(rows)))}


def draw_documents(
    config: Config, objective: Objective, random: np.random.Generator, kind: Documents = "short"
) -> Iterator[DocumentChunk]:
    """Draw documents that fill a row or, for some kinds, part of it. kind: any but "mixed"."""
    length, n_tokens = min(get_side_lengths(config)), 0
    # Half-open range of tokens per document, and tokens of all documents. Some objectives need two tokens.
    min_value, max_value, min_tokens = {
        "short": (2, max(3, length // 6), int(random.integers(length * 3 // 4, length * 3 // 2))),
        "long": (max(2, length // 2), max(3, length * 3 // 4), length * 3 // 2),
        "one": (2 * length, 2 * length + 1, 1),
        "sparse": (2, max(3, length // 6), 1),
    }[kind]
    while n_tokens < min_tokens:
        if objective.needs_files or not objective.reads_text:
            chunk = objective.random_chunk(random)
        else:
            chunk = DocumentChunk(
                random.integers(0, config.model.vocab_size or 1, random.integers(min_value, max_value))
            )
        yield chunk
        n_tokens += min_tokens if needs_own_row(objective) else len(chunk.tokens) + 1
