"""A config made small enough to be verified in seconds, with all that a layout could get wrong, and a batch for it."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import gcd
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
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
    StridedPatternConfig,
    WindowPatternConfig,
    invalid,
)
from megatfm.config.attention import AttentionSection
from megatfm.config.section import Section, unflatten
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig, needs_own_row
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.objectives import Objective, SpecialTokens, build_objective, reads_text
from megatfm.parallel.mesh import SHARD, axis_sizes
from megatfm.verify.shrink_images import (
    shrunk_features,
    shrunk_images,
    shrunk_masks,
    shrunk_patches,
    shrunk_second_stack,
)
from megatfm.verify.shrink_stages import shrunk_rows, shrunk_stages

MAX_RANKS = 16
"""Processes that one machine is asked to start."""

LAYERS, HEAD_DIM, WIDTH, RANK = 2, 8, 64, 32
LENGTH = 64
"""Tokens of a row, which holds several documents, windows, chunks and blocks; a rank's part cuts some of them."""
MICRO_BATCH, MICROBATCHES = 2, 2
VOCABULARY = 1000  # where a config leaves it to the tokenizer, which is not needed here


class RowLengths(NamedTuple):
    """Tokens of the longest row: in the config, and in the small one."""

    before: int
    length: int


def shrink(config: Config) -> tuple[Config, list[str]]:
    """The small config, and what was changed, in words. Raises UsageError for a layout of too many processes.

    Kept: parts, ties, optimizer, the ratio of query to key-value heads, and the remainders of vocabulary and
    feed-forward width modulo the ranks that share them. Windows, chunks and blocks of attention shrink with the rows,
    so that these have several of them. Axes stay as they are; dp_shard = −1 becomes 2, or 1 beside other axes, or what
    `ep` needs. There are as many layers as pipeline stages, and a block of every kind; the cuts are where they are by
    themselves. What is inexact by design is left out.
    """
    parallel = config.parallel
    if parallel.dp_shard == -1:
        n_rows = 2 if parallel.tp * parallel.pp * parallel.cp == 1 else 1
        ep_multiple = parallel.ep // gcd(parallel.ep, -parallel.expert_mesh_size)
        parallel = parallel.model_copy(update={"dp_shard": -(-n_rows // ep_multiple) * ep_multiple})
    parallel = parallel.model_copy(update={"pp_split_points": []})
    world_size = parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp
    if world_size > MAX_RANKS:
        raise UsageError(
            f"this layout has {world_size} processes, and verify starts them all on this machine, at most "
            f"{MAX_RANKS}: give smaller axes, e.g. parallel.dp_replicate=1 parallel.dp_shard=2"
        )
    data_ranks = parallel.dp_replicate * axis_sizes(parallel, world_size)[SHARD]
    original_lengths = config.data.model_dump(include={"sequence_length", "target_length"})
    lengths = {
        key: length and _shrunk_size(length, max(LENGTH, 2 * parallel.cp * parallel.tp), parallel.tp)
        for key, length in original_lengths.items()
    }
    images: dict[str, Any] = {}
    if config.model.stages is not None:
        lengths["sequence_length"], side = shrunk_rows(config, config.model.stages)
        images = {"images": config.data.images.model_copy(update={"size": side})}
    rows = RowLengths(*(max(filter(None, of.values())) for of in (original_lengths, lengths)))
    try:
        model = _model(
            config.model,
            heads_over=parallel.tp * parallel.cp,
            shards=parallel.tp * parallel.dp_shard,
            stages=parallel.pp * parallel.stages_per_rank,
            rows=rows,
        )
    except ValidationError as error:
        raise invalid("verify can't make this model small", error) from None
    small = config.model_copy(
        update={
            "model": model,
            "objective": shrunk_masks(config, model),
            "parallel": parallel.model_copy(
                update={"reduce_dtype": "param", "comm_buffers": "torch", "async_tp": False}
            ),
            "data": config.data.model_copy(update=lengths | (images or shrunk_images(config, model))),
            "train": config.train.model_copy(
                update={
                    "micro_batch": MICRO_BATCH,
                    "global_batch": MICRO_BATCH * (MICROBATCHES + parallel.pp - 1) * data_ranks,
                    # DeepSpeed keeps the weights that an optimizer moves in float32.
                    "precision": "fp32" if parallel.engine == "deepspeed" else "fp64",
                    "device": "cpu",
                    "compile": False,
                    "recompute": "none" if config.train.recompute.endswith("%") else config.train.recompute,
                }
            ),
        }
    )
    matching_patterns = [pattern for pattern in config.train.freeze if _matches(small, pattern)]
    small = small.model_copy(update={"train": small.train.model_copy(update={"freeze": matching_patterns})})
    inexact = config.deepspeed.quantized
    exact = config.deepspeed.model_copy(update=dict.fromkeys(inexact, False))
    overrides_left = [
        f"deepspeed.{key} true → false: {config.deepspeed.INEXACT}, and is for GPUs alone" for key in inexact
    ]
    return small.model_copy(update={"deepspeed": exact}), _changes(config, small) + overrides_left


def _matches(config: Config, pattern: str) -> bool:
    """Whether the small model, which may have fewer layers, has weights of such names."""
    with torch.device("meta"):
        return any(fnmatchcase(name, pattern) for name, _ in build(config.model).named_parameters())


def _model(model: ModelConfig, *, heads_over: int, shards: int, stages: int, rows: RowLengths) -> ModelConfig:
    """heads_over: ranks that may take heads, of tensor and context parallelism. shards: ranks that cut widths."""
    kv_heads = min(model.attention.kv_heads, 2 * heads_over)  # two a rank, so that their order shows
    heads = kv_heads * (model.attention.n_heads // model.attention.kv_heads)
    head_dim = min(model.head_width, HEAD_DIM)
    is_square = model.d_model == model.attention.n_heads * model.head_width
    distinct = model.distinct_layers and min(model.distinct_layers, LAYERS)
    first_depths = (model.layer_types.index(kind) + 1 for kind in model.layer_type)
    # One block more than there are distinct layers, so that two share weights.
    layers = max(LAYERS, stages, 1 + (distinct or 0), *first_depths)
    changes: dict[str, Any] = {
        "vocab_size": _shrunk_size(model.vocab_size or VOCABULARY, WIDTH, shards),
        "n_layers": min(model.n_layers, layers),
        "n_encoder_layers": model.n_encoder_layers and min(model.n_encoder_layers, layers),
        "distinct_layers": distinct,
        "d_model": heads * head_dim if is_square else _shrunk_size(model.d_model, WIDTH, shards),
        "attention.n_heads": heads,
        f"attention.{model.attention.head_dim_key}": model.attention.head_dim_or_none and head_dim,
        "ffn.d_ff": _shrunk_size(model.ffn.d_ff, WIDTH, shards),
    }
    changes |= shrunk_stages(model, heads_over, HEAD_DIM)
    if isinstance(model.attention, GQAAttentionConfig):
        changes["attention.n_kv_heads"] = model.attention.n_kv_heads and kv_heads
    for key, size in _sizes(model.attention, rows.length, shards).items():
        changes[f"attention.{key}"] = size
    for key, size in _sizes_of_pattern(model.attention.pattern, rows).items():
        changes[f"attention.pattern.{key}"] = size
    if (generator := model.generator) is not None:
        n_heads = min(generator.n_heads, 2 * heads_over)
        ep_multiple = generator.d_model // generator.n_heads
        changes["generator"] = {
            "d_model": n_heads * min(ep_multiple, HEAD_DIM),
            "n_heads": n_heads,
            "d_ff": _shrunk_size(generator.d_ff, WIDTH, shards),
            "n_layers": generator.n_layers and min(generator.n_layers, layers),
        }
    changes |= shrunk_patches(model)
    changes |= shrunk_second_stack(
        model, heads_over, layers, HEAD_DIM, lambda width: _shrunk_size(width, WIDTH, shards)
    )
    changes |= shrunk_features(model, changes["d_model"])
    if model.connector is not None and changes.get("vocab_size"):
        changes["connector.image_token_id"] = min(model.connector.image_token_id, changes["vocab_size"] - 1)
    changes["layer_type"] = {kind: _block(model, kind, heads_over, shards, rows) for kind in model.layer_type}
    return model.with_changes(changes)


def _sizes(attention: AttentionSection, length: int, shards: int) -> dict[str, Any]:
    """Sizes of an attention layer beside heads and pattern. length: tokens of the longest row."""
    if isinstance(attention, MLAAttentionConfig):
        width = attention.v_head_dim
        return {
            "kv_lora_rank": _shrunk_size(attention.kv_lora_rank, RANK, shards),
            "q_lora_rank": attention.q_lora_rank and _shrunk_size(attention.q_lora_rank, RANK, shards),
            "qk_rope_head_dim": _shrunk_size(attention.qk_rope_head_dim, HEAD_DIM, 2),
            # Keeps another width than keys have, if it had one.
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


def _sizes_of_pattern(pattern: Section, rows: RowLengths) -> dict[str, Any]:
    """Options of a pattern that shrink with the row, so that it has several windows, chunks or blocks. A window as wide
    as the row stays so; a plugin's pattern keeps its options."""
    old_length, length = rows
    fourth, eighth = max(1, length // 4), max(1, length // 8)
    match pattern:
        case WindowPatternConfig():
            step = min(pattern.dilation, 2)
            width = _shrunk_size(pattern.width, max(1, fourth // step), 2)
            if pattern.width * pattern.dilation >= old_length:
                width = pattern.width * pattern.dilation * length // old_length // step
            return {"width": width, "dilation": step, "initial_tokens": min(pattern.initial_tokens, 2)}
        case LongformerPatternConfig():
            width = _shrunk_size(pattern.width, fourth, 2)
            tokens = dict.fromkeys(min(token, length // 2) for token in pattern.global_tokens)
            return {
                "width": width if pattern.width < old_length else pattern.width * length // old_length,
                "global_tokens": tuple(tokens),
            }
        case ChunkedPatternConfig():
            size = min(pattern.size, max(1, length // 3))  # thirds end nowhere near a rank's part
            return {"size": size if pattern.size < old_length else pattern.size * length // old_length}
        case StridedPatternConfig():
            return {"stride": min(pattern.stride, eighth)}
        case FixedPatternConfig():
            stride = min(pattern.stride, eighth)
            return {"stride": stride, "n_summary_tokens": max(1, min(pattern.n_summary_tokens, stride // 3))}
        case BigBirdPatternConfig():
            # Documents of at most `n_blocks` blocks are seen whole: a row keeps more blocks than that if it had more.
            random, extra = min(pattern.n_random_blocks, 2), min(pattern.n_global_tokens, eighth)
            n_blocks, kept_options = 5 + 2 * random, {"n_random_blocks": random, "n_global_tokens": extra}
            if (5 + 2 * pattern.n_random_blocks) * pattern.block_size >= old_length:
                return {"block_size": -(-length // n_blocks), **kept_options}
            return {"block_size": min(pattern.block_size, max(1, length // (n_blocks + 4))), **kept_options}
    return {}


def _block(model: ModelConfig, kind: str, heads_over: int, shards: int, rows: RowLengths) -> dict[str, Any]:
    """Keys of a kind of blocks, with sizes made small as the model's are."""
    keys, layer = unflatten(model.layer_type[kind]), model.type_config(kind)
    if "d_ff" in keys.get("ffn", {}):
        keys["ffn"] = {**keys["ffn"], "d_ff": _shrunk_size(layer.ffn.d_ff, WIDTH, shards)}
    attention = dict(keys.get("attention", {}))
    if {"n_heads", "n_kv_heads", layer.attention.head_dim_key} & attention.keys():
        kv_heads = min(layer.attention.kv_heads, 2 * heads_over)
        heads = kv_heads * (layer.attention.n_heads // layer.attention.kv_heads)
        attention |= {"n_heads": heads, layer.attention.head_dim_key: min(layer.head_width, HEAD_DIM)}
        if isinstance(layer.attention, GQAAttentionConfig):
            attention["n_kv_heads"] = kv_heads
    sizes = _sizes(layer.attention, rows.length, shards)
    attention |= {key: sizes[key] for key in attention.keys() & sizes.keys()}
    if "pattern" in attention:
        pattern = layer.attention.pattern
        attention["pattern"] = {**pattern.model_dump(), **_sizes_of_pattern(pattern, rows)}
    return {**keys, **({"attention": attention} if attention else {})}


def _shrunk_size(size: int, min_size: int, modulus: int) -> int:
    """The smallest number from `min_size` on with the remainder of `size`; `size` itself where that is smaller."""
    return min(size, min_size + (size - min_size) % modulus)


def _changes(original: Config, shrunk: Config) -> list[str]:
    return [
        change
        for section in ("model", "parallel", "data", "train")
        for change in _differences(section, getattr(original, section), getattr(shrunk, section))
    ]


def _differences(place: str, old: Section, new: Section) -> Iterator[str]:
    for key in type(old).model_fields:
        yield from _difference(f"{place}.{key}", getattr(old, key), getattr(new, key))


def _difference(place: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, Section) and isinstance(new, Section):
        yield from _differences(place, old, new)
    elif isinstance(old, dict) and isinstance(new, dict):  # of kinds of blocks
        for key, value in unflatten(old).items():
            yield from _difference(f"{place}.{key}", value, unflatten(new).get(key, value))
    elif isinstance(old, str) and isinstance(new, dict):  # a pattern's name alone
        return
    elif old != new:
        yield f"{place} {'(not set)' if old is None else old} → {new}"


Arrays = dict[str, NDArray[Any]]

Documents = Literal["mixed", "short", "long", "one", "sparse"]
"""Documents of a row. "short": many; "long": two, the second cut off; "one": one as long as the row; "sparse": a short
one, then padding; "mixed": rows of these kinds in turn."""

BY_TURNS: tuple[Documents, ...] = ("short", "one", "sparse", "long")
KINDS_OF_DOCUMENTS: tuple[Documents, ...] = get_args(Documents)


def objective_for(config: Config) -> Objective:
    """The objective, with special tokens that every vocabulary has: a third of it are sentinels."""
    size = config.model.vocab_size
    if size is None and not reads_text(config.objective.name):
        return build_objective(config.objective, config.model, None, side_lengths(config), config.data.images)
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
    return build_objective(config.objective, config.model, special, side_lengths(config), config.data.images)


def side_lengths(config: Config) -> tuple[int, ...]:
    """Lengths of rows by side, for the sides that the config has."""
    return tuple(n for n in (config.data.sequence_length, config.data.target_length) if n is not None)


def random_batch(config: Config, documents: Documents = "mixed") -> Arrays:
    """The fields of a global batch, and "keys" [global_batch]: documents of such kinds where the objective packs them,
    one cut off or padding at a row's end."""
    objective, lengths = objective_for(config), side_lengths(config)
    seed = config.train.seed
    across = config.data.attend_across_documents
    packing = PackingConfig(
        objective, lengths[: len(objective.field_prefixes)], seed, attend_across_documents=across
    )
    rows = []
    for number in range(config.train.global_batch):
        random = np.random.Generator(rng.bit_generator(seed, "verify", number))
        kind = BY_TURNS[number % len(BY_TURNS)] if documents == "mixed" else documents
        pieces = list(random_pieces(config, objective, random, kind))
        members = [piece.files for piece in pieces] if objective.needs_files else None
        rows.append(pack_in_memory([piece.tokens for piece in pieces], packing, members=members).row(0))
    fields: Arrays = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    return fields | {"keys": rng.row_keys(seed, np.arange(len(rows)))}


def random_pieces(
    config: Config, objective: Objective, random: np.random.Generator, kind: Documents = "short"
) -> Iterator[DocumentChunk]:
    """Documents that fill a row, or a part of it. kind: any but "mixed"."""
    length, filled = min(side_lengths(config)), 0
    # Tokens of a document, at least and below, and of all documents. One token is too short for some objectives.
    min_value, max_value, requested = {
        "short": (2, max(3, length // 6), int(random.integers(length * 3 // 4, length * 3 // 2))),
        "long": (max(2, length // 2), max(3, length * 3 // 4), length * 3 // 2),
        "one": (2 * length, 2 * length + 1, 1),
        "sparse": (2, max(3, length // 6), 1),
    }[kind]
    while filled < requested:
        if objective.needs_files or not objective.reads_text:
            piece = objective.random_piece(random)
        else:
            piece = DocumentChunk(
                random.integers(0, config.model.vocab_size or 1, random.integers(min_value, max_value))
            )
        yield piece
        filled += requested if needs_own_row(objective) else len(piece.tokens) + 1
