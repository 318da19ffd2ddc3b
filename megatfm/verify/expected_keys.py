"""Tokens that a rank needs from other ranks: keys of its queries, one by one, and tokens that its own tokens look up.

The closed form of a query is one or a few runs of keys of its document. It covers the keys that the plain model's mask
lets the query see, and is wider where kernels fetch whole blocks or strides.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatfm.config import (
    BigBirdPatternConfig,
    ChunkedPatternConfig,
    Config,
    FixedPatternConfig,
    LongformerPatternConfig,
    ModelConfig,
    StridedPatternConfig,
    WindowPatternConfig,
)
from megatfm.config.image_text import make_image_tower
from megatfm.config.section import Section
from megatfm.verify.module_calls import Shape

Runs = Sequence[tuple[int, int]]
"""Half-open runs of keys (first, end), which may reach beyond the document."""


@dataclass(frozen=True)
class MicroBatchRows:
    """Rows of a micro-batch. documents: int64 [B, S], −1 for padding; None if each row is one document. prefix: bool
    [B, S], tokens visible to their whole document."""

    count: int
    length: int
    documents: NDArray[Any] | None
    prefix: NDArray[Any] | None

    @classmethod
    def take(cls, batch: Mapping[str, NDArray[Any]], side: str, first: int, count: int) -> "MicroBatchRows":
        """Take `count` rows of a side of the batch, from row `first` on."""
        fields = {
            name: batch[side + name][first : first + count]
            for name in ("positions", "documents", "prefix")
            if side + name in batch
        }
        prefix = fields["prefix"].astype(bool) if "prefix" in fields else None
        _, length = fields["positions"].shape
        return cls(count, length, fields.get("documents"), prefix)

    def is_padding(self, row: int, token: int) -> bool:
        """Return whether a token belongs to no document."""
        return self.documents is not None and bool(self.documents[row, token] < 0)

    def iter_documents(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, begin and end of each document; padding counts as a document."""
        for row in range(self.count):
            cuts = np.flatnonzero(np.diff(self.documents[row])) + 1 if self.documents is not None else ()
            for begin, end in pairwise([0, *map(int, cuts), self.length]):
                yield row, begin, end


def get_block_config(config: Config, path: str) -> ModelConfig:
    """Return the config of the block that contains a module. Blocks of multi-token prediction follow the stack's."""
    if mtp := re.match(r"future\.(\d+)\.", path):
        return config.model.layer_config(config.model.n_layers + int(mtp[1]) - 1)
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", path)
    has_image_tower = config.model.vision_tower is not None and path.startswith("encoder.")
    model = make_image_tower(config.model) if has_image_tower else config.model
    return model.layer_config(int(layer[1]) if layer else 0)


def get_pattern_config(config: Config, path: str) -> Section:
    """Return the config section of a module's attention pattern."""
    section: Section = get_block_config(config, path).attention.pattern
    return section


def has_causal_mask(config: Config, path: str) -> bool:
    """Return whether queries see only earlier tokens of their row."""
    model = config.model
    if model.text_tower is not None:
        return model.text_tower.causal and path.startswith("text.")
    return model.family == "decoder" or (
        model.family in ("encoder_decoder", "vision_language") and not path.startswith("encoder.")
    )


def is_cross_attention(path: str) -> bool:
    """Return whether keys are an encoder's output."""
    return ".cross." in path


def sees_key_runs(pattern: Section, length: int, *, causal: bool) -> bool | None:
    """Return whether queries see only a few runs of keys in rows of a length, so that only these are fetched.

    None for a plugin's pattern. A window or chunk as wide as the row counts as full attention.
    """
    match pattern:
        case WindowPatternConfig():
            side = (pattern.width - 1 if causal else pattern.width // 2) * pattern.dilation
            return pattern.dilation > 1 or side < length - 1
        case ChunkedPatternConfig():
            return pattern.size < length
        case BigBirdPatternConfig() | LongformerPatternConfig():
            return True
        case StridedPatternConfig() | FixedPatternConfig():
            return False
    return False if getattr(pattern, "name", "") == "full" else None


def is_imbalanced(pattern: Section, length: int, *, causal: bool) -> bool:
    """Return whether later queries see more keys, so that rows are assigned in zigzag order to balance the load."""
    return causal and not sees_key_runs(pattern, length, causal=causal)


def find_key_runs(pattern: Section, q: int, length: int, *, causal: bool) -> Runs:
    """Return the runs of keys of query q in a document of `length` tokens."""
    match pattern:
        case WindowPatternConfig():
            if causal:
                left = (pattern.width - 1) * pattern.dilation
                return (q - left, q + 1), (0, min(pattern.initial_tokens, q + 1))
            side = pattern.width // 2 * pattern.dilation
            return ((q - side, q + side + 1),)
        case ChunkedPatternConfig():
            begin = q - q % pattern.size
            return ((begin, q + 1 if causal else begin + pattern.size),)
        case LongformerPatternConfig():
            side = pattern.width // 2
            return (q - side, q + side + 1), *((token, token + 1) for token in pattern.global_tokens)
        case BigBirdPatternConfig():
            return _find_bigbird_runs(pattern, q, length, causal=causal)
    return ((0, q + 1 if causal else length),)


def _find_bigbird_runs(pattern: BigBirdPatternConfig, q: int, length: int, *, causal: bool) -> Runs:
    """Return the query's block and its neighbours, the first and last (or global tokens), and those sampled from."""
    size, n_sampled_blocks = pattern.block_size, 5 + 2 * pattern.n_random_blocks
    if not causal and length <= n_sampled_blocks * size:
        return ((0, length),)
    begin = q - q % size
    n_first = max(pattern.n_global_tokens or size, n_sampled_blocks * size if pattern.n_random_blocks else 0)
    if causal:
        return (begin - size, q + 1), (0, min(n_first, q + 1))
    neighbours, first = (begin - size, begin + 2 * size), (0, n_first)
    last = (length - 1) // size * size
    return (neighbours, first) if pattern.n_global_tokens else (neighbours, first, (last, length))


def find_global_query_runs(pattern: Section, length: int, *, causal: bool) -> Runs:
    """Return the queries of a document that see all of it."""
    match pattern:
        case LongformerPatternConfig():
            return tuple((token, token + 1) for token in pattern.global_tokens)
        case BigBirdPatternConfig() if not causal and length > (5 + 2 * pattern.n_random_blocks) * pattern.block_size:
            if pattern.n_global_tokens:
                return ((0, pattern.n_global_tokens),)
            last = (length - 1) // pattern.block_size * pattern.block_size
            return (0, pattern.block_size), (last, length)
    return ()


def find_needed_keys(
    pattern: Section, module: nn.Module, rows: MicroBatchRows, query_positions: NDArray[Any], *, causal: bool
) -> NDArray[Any]:
    """Return bool [S]: tokens that queries at `query_positions` need in any row, by closed form or mask; padding needs
    none."""
    is_needed = np.zeros(rows.length, np.bool_)
    for row, begin, end in rows.iter_documents():
        length = end - begin
        queries = query_positions[(query_positions >= begin) & (query_positions < end)] - begin
        if not len(queries) or rows.is_padding(row, begin):
            continue
        is_seen = np.zeros(length, np.bool_)
        for q in queries.tolist():
            for first, stop in find_key_runs(pattern, q, length, causal=causal):
                is_seen[max(first, 0) : max(stop, 0)] = True
        is_local = np.ones(length, np.bool_)
        for first, stop in find_global_query_runs(pattern, length, causal=causal):
            is_local[first:stop] = False
        mask = compute_dense_mask(module.pattern, int(module.n_heads), length)  # type: ignore[arg-type]
        is_seen |= mask[queries[is_local[queries]]].any(0)
        if rows.prefix is not None:
            is_seen |= rows.prefix[row, begin:end]
        is_needed[begin:end] |= is_seen
    return is_needed


@lru_cache(maxsize=1024)
def compute_dense_mask(pattern: Any, n_heads: int, length: int) -> NDArray[Any]:
    """Return bool [T, S] for a single document: whether a query sees a key in any head, pair by pair."""
    n_heads = n_heads if pattern.differs_by_head else 1
    tokens, heads = torch.arange(length), torch.arange(n_heads)[None, :, None, None]
    q, k = tokens[None, None, :, None], tokens[None, None, None, :]
    is_seen = pattern.mask_mod_for_lengths(q, k, heads, torch.full((1, 1, 1, 1), length))
    mask: NDArray[Any] = is_seen.expand(1, n_heads, length, length).flatten(0, 1).any(0).numpy()
    return mask


def count_global_queries(pattern: Section, rows: MicroBatchRows, rank_of: NDArray[Any], *, causal: bool) -> int:
    """Count positions that in any row hold a global query of a document on several ranks. rank_of: position → rank."""
    is_global = np.zeros(rows.length, np.bool_)
    for row, begin, end in rows.iter_documents():
        if len(set(rank_of[begin:end].tolist())) > 1 and not rows.is_padding(row, begin):
            for first, stop in find_global_query_runs(pattern, end - begin, causal=causal):
                is_global[begin + first : min(begin + stop, end)] = True
    return int(is_global.sum())


def assign_tokens(length: int, ranks: int, unit_size: int, *, is_zigzag: bool) -> list[NDArray[Any]]:
    """Assign the tokens of a row to ranks; returns the ascending positions of each rank.

    Cuts the row into one run per rank, or in zigzag order into two: rank r has runs r and 2·ranks − 1 − r, which
    balances the load of causal attention. unit_size: tokens that stay together.
    """
    runs, units = ranks * (2 if is_zigzag else 1), length // unit_size
    positions_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for token in range(length):
        unit = min(token // unit_size, units - 1)
        run = max(i for i in range(runs) if i * units // runs <= unit)
        positions_by_rank[min(run, runs - 1 - run) if is_zigzag else run].append(token)
    return [np.array(token_indices) for token_indices in positions_by_rank]


def find_span_boundaries(
    left: NDArray[Any], right: NDArray[Any], by_rank: Sequence[NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return the tokens beside masked spans, by the rank that looks them up.

    left, right: [B, T], distances of masked tokens to them, 0 elsewhere.
    """
    looked_up = []
    for local_positions in by_rank:
        boundaries: set[int] = set()
        for row in range(len(left)):
            for token in local_positions.tolist():
                if left[row, token] > 0:
                    boundaries |= {token - int(left[row, token]), token + int(right[row, token])}
        looked_up.append(_sort_tokens(boundaries))
    return looked_up


def find_visible_tokens(rows: Mapping[str, NDArray[Any]], by_rank: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the encoder's tokens that a masked autoencoder's decoder looks up, by rank.

    rows: fields of a micro-batch; `source` [B, T] is the index among an image's visible tokens, −1 where masked.
    """
    images = rows.get("documents", np.zeros_like(rows["source"]))
    encoder_images = rows.get("encoder_documents", np.zeros_like(rows["encoder_positions"]))
    looked_up = []
    for local_positions in by_rank:
        tokens: set[int] = set()
        for row, sources in enumerate(rows["source"]):
            for token in local_positions[sources[local_positions] >= 0].tolist():
                tokens_of_image = np.flatnonzero(encoder_images[row] == images[row, token])
                tokens.add(int(tokens_of_image[sources[token]]))
        looked_up.append(_sort_tokens(tokens))
    return looked_up


def find_image_tokens(
    rows: Mapping[str, NDArray[Any]], by_rank: Sequence[NDArray[Any]], image_token: int, n_special: int
) -> list[NDArray[Any]]:
    """Return the tokens of the image rows that the text's image tokens stand for, by rank.

    rows: fields of a micro-batch. The k-th image token of a row stands for its k-th patch. n_special: class and
    register tokens of each image.
    """
    looked_up: list[set[int]] = [set() for _ in by_rank]
    for row, tokens in enumerate(rows["tokens"]):
        is_patch = (rows["encoder_positions"][row] >= n_special) & (rows["encoder_documents"][row] >= 0)
        image_tokens, patch_tokens = np.flatnonzero(tokens == image_token), np.flatnonzero(is_patch)
        patch_of = dict(zip(image_tokens.tolist(), patch_tokens.tolist(), strict=True))
        for patches, local_positions in zip(looked_up, by_rank, strict=True):
            patches |= {patch_of[token] for token in local_positions.tolist() if token in patch_of}
    return [_sort_tokens(patches) for patches in looked_up]


def compute_fetched_share(by_rank: Sequence[NDArray[Any]], fetched: Sequence[NDArray[Any]]) -> Fraction:
    """Return the most keys that a rank fetches, as a share of the keys that a ring brings it."""
    c, length = len(by_rank), sum(map(len, by_rank))
    max_fetched = max(len(np.setdiff1d(keys, local)) for keys, local in zip(fetched, by_rank, strict=True))
    return Fraction(max_fetched * c, (c - 1) * length)


def is_ulysses(config: Config, qkv: Sequence[Shape], numel_per_token: int, share: Fraction | None) -> bool:
    """Return whether Ulysses is used: if configured, or if heads divide and it sends less.

    A ring sends three times the keys and values, a fetch twice a share of them, Ulysses twice 1/c of queries, keys,
    values and outputs. share: of a fetch; None for a ring.
    """
    parallel, (q, k, v) = config.parallel, qkv
    if parallel.cp_method != "auto":
        return parallel.cp_method == "ulysses"
    (heads, keys), c = count_local_heads(config, q, k), parallel.cp
    is_divisible = heads % c == 0 and (keys % c == 0 or c % keys == 0)
    ulysses_numel = 2 * (heads + max(keys, c)) * (q[3] + v[3]) * q[0]
    return is_divisible and ulysses_numel < (3 if share is None else 2 * share) * c * numel_per_token


def count_elements_per_token(config: Config, sent_shapes: Sequence[Shape]) -> int:
    """Return the elements sent per position, over all rows, by a tensor-parallel rank; a single head is on all."""
    tp = config.parallel.tp
    return sum(rows * max(1, heads // tp) * channels for rows, heads, _, channels in sent_shapes)


def keep_lookups_inside(shard: dict[str, NDArray[Any]], model: ModelConfig) -> None:
    """Change the fields of a rank's tokens so that a forward pass can run, of which only shapes matter."""
    if "span_left" in shard:  # spans stay inside the shard
        tokens = shard["span_left"].shape[1]
        shard["span_left"] = np.minimum(shard["span_left"], tokens)
        shard["span_right"] = np.minimum(shard["span_right"], np.arange(tokens)[::-1])
    if "source" in shard:
        shard["source"] = np.minimum(shard["source"], 0)
        shard["documents"] = np.minimum(shard["documents"], shard["encoder_documents"].max())
    if model.contrastive is not None:  # as many images as captions: one, or none
        shard["documents"] = np.minimum(shard["documents"], 0)
        has_caption = shard["documents"].max(axis=1, keepdims=True)
        shard["encoder_documents"] = np.zeros_like(shard["encoder_documents"]) + has_caption
    if model.connector is not None:  # as many image tokens as patches: none
        image_token = model.connector.image_token_id
        is_image = shard["tokens"] == image_token
        shard["tokens"] = np.where(is_image, abs(image_token - 1), shard["tokens"])
        shard["encoder_positions"] = np.zeros_like(shard["encoder_positions"])


def count_local_heads(config: Config, q: Shape, k: Shape) -> tuple[int, int]:
    """Return the query and key heads of a tensor-parallel rank."""
    tp = config.parallel.tp
    return q[1] // tp, max(1, k[1] // tp)


def _sort_tokens(tokens: set[int]) -> NDArray[Any]:
    return np.array(sorted(tokens), np.int64)
