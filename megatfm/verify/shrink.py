"""A config made small enough to be verified in seconds, with everything kept that a layout could get wrong."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

import torch

from megatfm.config import Config, HeadsAttentionConfig, ModelConfig
from megatfm.config.base import Section, nested
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.parallel.mesh import SHARD, axis_sizes

MAX_RANKS = 16
"""Processes that one machine is asked to start."""

LAYERS, HEAD_DIM, WIDTH, LENGTH = 2, 8, 64, 24
MICRO_BATCH, MICROBATCHES = 2, 2
VOCABULARY = 1000  # where a config leaves it to the tokenizer, which is not needed here


def shrink(config: Config) -> tuple[Config, list[str]]:
    """The small config, and what was changed, in words. Raises UsageError for a layout of too many processes.

    Kept: parts, ties, optimizer, the ratio of query to key-value heads, and the remainders of vocabulary and
    feed-forward width modulo the ranks that share them. Axes stay as they are; dp_shard = −1 becomes 2, or 1
    beside other axes, or what `ep` needs. There are as many layers as pipeline stages, and a block of every kind; the
    cuts are where they are by themselves. What is inexact by design is left out.
    """
    parallel = config.parallel
    if parallel.dp_shard == -1:
        few = 2 if parallel.tp * parallel.pp * parallel.cp == 1 else 1
        each = parallel.ep // gcd(parallel.ep, -parallel.ep_within)
        parallel = parallel.model_copy(update={"dp_shard": -(-few // each) * each})
    parallel = parallel.model_copy(update={"cuts": []})
    world_size = parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp
    if world_size > MAX_RANKS:
        raise UsageError(
            f"this layout has {world_size} processes, and verify starts them all on this machine, at most "
            f"{MAX_RANKS}: give smaller axes, e.g. parallel.dp_replicate=1 parallel.dp_shard=2"
        )
    data_ranks = parallel.dp_replicate * axis_sizes(parallel, world_size)[SHARD]
    lengths = {
        key: length and _fit(length, max(LENGTH, 2 * parallel.cp * parallel.tp), parallel.tp)
        for key, length in config.data.model_dump(include={"sequence_length", "target_length"}).items()
    }
    small = config.model_copy(
        update={
            "model": _model(
                config.model,
                parallel.tp * parallel.cp,
                parallel.tp * parallel.dp_shard,
                parallel.pp * parallel.stages_per_rank,
            ),
            "parallel": parallel.model_copy(
                update={"reduce_dtype": "full", "comm_memory": "torch", "async_tp": False}
            ),
            "data": config.data.model_copy(update=lengths),
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
    still = [pattern for pattern in config.train.freeze if _matches(small, pattern)]
    small = small.model_copy(update={"train": small.train.model_copy(update={"freeze": still})})
    inexact = config.deepspeed.quantized
    exact = config.deepspeed.model_copy(update=dict.fromkeys(inexact, False))
    left = [
        f"deepspeed.{key} true → false: {config.deepspeed.INEXACT}, and is for GPUs alone" for key in inexact
    ]
    return small.model_copy(update={"deepspeed": exact}), _changes(config, small) + left


def _matches(config: Config, pattern: str) -> bool:
    """Whether the small model, which may have fewer layers, has weights of such names."""
    with torch.device("meta"):
        return any(fnmatchcase(name, pattern) for name, _ in build(config.model).named_parameters())


def _model(model: ModelConfig, tp: int, shards: int, stages: int) -> ModelConfig:
    kv_heads = min(model.attention.kv_heads, 2 * tp)  # two a rank, so that their order shows
    heads = kv_heads * (model.attention.n_heads // model.attention.kv_heads)
    head_dim = min(model.head_width, HEAD_DIM)
    joined = model.d_model == model.attention.n_heads * model.head_width
    changes: dict[str, Any] = {
        "vocab_size": _fit(model.vocab_size or VOCABULARY, WIDTH, shards),
        "n_layers": min(
            model.n_layers, max(LAYERS, stages, *(model.blocks.index(kind) + 1 for kind in model.block))
        ),
        "d_model": heads * head_dim if joined else _fit(model.d_model, WIDTH, shards),
        "attention.n_heads": heads,
        "attention.head_dim": model.attention.head_dim and head_dim,
        "ffn.d_ff": _fit(model.ffn.d_ff, WIDTH, shards),
    }
    if isinstance(model.attention, HeadsAttentionConfig):
        changes["attention.n_kv_heads"] = model.attention.n_kv_heads and kv_heads
    changes["block"] = {kind: _block(model, kind, tp, shards) for kind in model.block}
    return model.changed(changes)


def _block(model: ModelConfig, kind: str, tp: int, shards: int) -> dict[str, Any]:
    """What the blocks of a kind have otherwise, with its sizes made small as the model's are."""
    keys, own = nested(model.block[kind]), model.of_kind(kind)
    if "d_ff" in keys.get("ffn", {}):
        keys["ffn"] = {**keys["ffn"], "d_ff": _fit(own.ffn.d_ff, WIDTH, shards)}
    if {"n_heads", "n_kv_heads", "head_dim"} & keys.get("attention", {}).keys():
        kv_heads = min(own.attention.kv_heads, 2 * tp)
        heads = kv_heads * (own.attention.n_heads // own.attention.kv_heads)
        sizes = {"n_heads": heads, "head_dim": min(own.head_width, HEAD_DIM)}
        if isinstance(own.attention, HeadsAttentionConfig):
            sizes["n_kv_heads"] = kv_heads
        keys["attention"] = {**keys["attention"], **sizes}
    return keys


def _fit(size: int, least: int, modulus: int) -> int:
    """The smallest number from `least` on with the remainder of `size`; `size` itself where that is smaller."""
    return min(size, least + (size - least) % modulus)


def _changes(before: Config, after: Config) -> list[str]:
    return [
        change
        for section in ("model", "parallel", "data", "train")
        for change in _differences(section, getattr(before, section), getattr(after, section))
    ]


def _differences(place: str, old: Section, new: Section) -> Iterator[str]:
    for key in type(old).model_fields:
        one, other = getattr(old, key), getattr(new, key)
        if isinstance(one, Section) and isinstance(other, Section):
            yield from _differences(f"{place}.{key}", one, other)
        elif one != other:
            yield f"{place}.{key} {'(not set)' if one is None else one} → {other}"
