"""Keys that a rank's queries need of other ranks, by looking at each query: closed forms and the dense mask.

The closed form of a query is a run or a few of its document's keys. It is at least what the mask of the plain model
lets the query see, and wider where a kernel's blocks or strides leave keys out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from megatfm.config.section import Section

Runs = Sequence[tuple[int, int]]
"""First key and the one after the last, which may lie beyond the document."""


@dataclass(frozen=True)
class MicroBatchRows:
    """A micro-batch's rows. documents: int64 [B, S], −1 for padding; None: a row is one document. opened: tokens that
    all of their document sees [B, S]."""

    count: int
    length: int
    documents: NDArray[Any] | None
    opened: NDArray[Any] | None

    @classmethod
    def of(cls, batch: Mapping[str, NDArray[Any]], side: str, first: int, count: int) -> "MicroBatchRows":
        """Rows of a side of the batch, from number `first` on."""
        fields = {
            name: batch[side + name][first : first + count]
            for name in ("positions", "documents", "prefix")
            if side + name in batch
        }
        opened = fields["prefix"].astype(bool) if "prefix" in fields else None
        _, length = fields["positions"].shape
        return cls(count, length, fields.get("documents"), opened)

    def is_padding(self, row: int, place: int) -> bool:
        """Whether no document has the token at a place."""
        return self.documents is not None and bool(self.documents[row, place] < 0)

    def bounds(self) -> Iterator[tuple[int, int, int]]:
        """Row, begin and end of each document; padding is one."""
        for row in range(self.count):
            cuts = np.flatnonzero(np.diff(self.documents[row])) + 1 if self.documents is not None else ()
            for begin, end in pairwise([0, *map(int, cuts), self.length]):
                yield row, begin, end


def block_of(config: Config, path: str) -> ModelConfig:
    """The config of the block in which a module lies. Blocks that predict further tokens come after the stack's."""
    if further := re.match(r"future\.(\d+)\.", path):
        return config.model.layer_config(config.model.n_layers + int(further[1]) - 1)
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", path)
    return config.model.layer_config(int(match[1]) if match else 0)


def pattern_of(config: Config, path: str) -> Section:
    """The section of the pattern of a module's attention."""
    section: Section = block_of(config, path).attention.pattern
    return section


def is_causal(config: Config, path: str) -> bool:
    """Whether a query may not see later tokens of its row."""
    return config.model.family == "decoder" or (
        config.model.family in ("encoder_decoder", "vision_language") and not path.startswith("encoder.")
    )


def is_cross_attention(path: str) -> bool:
    """Whether keys are an encoder's output."""
    return ".cross." in path


def sees_runs_alone(pattern: Section, length: int, *, causal: bool) -> bool | None:
    """Whether queries see a few runs of keys in rows of a length, so that these are fetched; None: not known, as the
    pattern is a plugin's. A window or chunk as wide as the row sees all, as full attention does."""
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


def sees_more_later(pattern: Section, length: int, *, causal: bool) -> bool:
    """Whether later queries of rows of a length see ever more keys, so that rows are dealt in folds."""
    return causal and not sees_runs_alone(pattern, length, causal=causal)


def runs_of_query(pattern: Section, q: int, length: int, *, causal: bool) -> Runs:
    """Keys of the query at place q of a document of `length` tokens."""
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
            return _of_bigbird(pattern, q, length, causal=causal)
    return ((0, q + 1 if causal else length),)


def _of_bigbird(pattern: BigBirdPatternConfig, q: int, length: int, *, causal: bool) -> Runs:
    """The block, those beside it, the first (or additional tokens), those drawn from, and the last."""
    size, drawn_from = pattern.block_size, 5 + 2 * pattern.n_random_blocks
    if not causal and length <= drawn_from * size:
        return ((0, length),)
    begin = q - q % size
    n_first = max(pattern.n_global_tokens or size, drawn_from * size if pattern.n_random_blocks else 0)
    if causal:
        return (begin - size, q + 1), (0, min(n_first, q + 1))
    last = (length - 1) // size * size
    return (
        (begin - size, begin + 2 * size),
        (0, n_first),
        *(() if pattern.n_global_tokens else ((last, length),)),
    )


def wide_queries(pattern: Section, length: int, *, causal: bool) -> Runs:
    """Places of a document's queries that see all of it."""
    match pattern:
        case LongformerPatternConfig():
            return tuple((token, token + 1) for token in pattern.global_tokens)
        case BigBirdPatternConfig() if (
            not causal and length > (5 + 2 * pattern.n_random_blocks) * pattern.block_size
        ):
            last = (length - 1) // pattern.block_size * pattern.block_size
            return (
                ((0, pattern.n_global_tokens),)
                if pattern.n_global_tokens
                else ((0, pattern.block_size), (last, length))
            )
    return ()


def needed(
    pattern: Section, module: nn.Module, rows: MicroBatchRows, query_positions: NDArray[Any], *, causal: bool
) -> NDArray[Any]:
    """Boolean [S]: tokens in any of the rows that queries at `query_positions` need, by the closed form or by the mask.
    Padding needs nothing."""
    is_needed = np.zeros(rows.length, np.bool_)
    for row, begin, end in rows.bounds():
        length = end - begin
        queries = query_positions[(query_positions >= begin) & (query_positions < end)] - begin
        if not len(queries) or rows.is_padding(row, begin):
            continue
        is_seen = np.zeros(length, np.bool_)
        for q in queries.tolist():
            for first, beyond in runs_of_query(pattern, q, length, causal=causal):
                is_seen[max(first, 0) : max(beyond, 0)] = True
        narrow = np.ones(length, np.bool_)
        for first, beyond in wide_queries(pattern, length, causal=causal):
            narrow[first:beyond] = False
        is_seen |= dense_mask(module, length)[queries[narrow[queries]]].any(0)
        if rows.opened is not None:
            is_seen |= rows.opened[row, begin:end]
        is_needed[begin:end] |= is_seen
    return is_needed


def dense_mask(module: nn.Module, length: int) -> NDArray[Any]:
    """Boolean [T, S] of a document alone: whether a query sees a key in any head, pair by pair."""
    return _dense_mask(module.pattern, int(module.n_heads), length)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _dense_mask(pattern: Any, n_heads: int, length: int) -> NDArray[Any]:
    n_heads = n_heads if pattern.differs_by_head else 1
    places, heads = torch.arange(length), torch.arange(n_heads)[None, :, None, None]
    q, k = places[None, None, :, None], places[None, None, None, :]
    is_seen = pattern.mask_mod_for_lengths(q, k, heads, torch.full((1, 1, 1, 1), length))
    mask: NDArray[Any] = is_seen.expand(1, n_heads, length, length).flatten(0, 1).any(0).numpy()
    return mask


def count_wide(pattern: Section, rows: MicroBatchRows, rank_of: NDArray[Any], *, causal: bool) -> int:
    """Places in any of the rows of queries that see all of a document which lies on several ranks. stage_to_rank: by
    place."""
    wide = np.zeros(rows.length, np.bool_)
    for row, begin, end in rows.bounds():
        if len(set(rank_of[begin:end].tolist())) > 1 and not rows.is_padding(row, begin):
            for first, beyond in wide_queries(pattern, end - begin, causal=causal):
                wide[begin + first : min(begin + beyond, end)] = True
    return int(wide.sum())


def deal(length: int, ranks: int, multiple_of: int, *, folded: bool) -> list[NDArray[Any]]:
    """Places of each rank, ascending: token by token, by the run in which its unit lies.

    Rows are cut into as many runs as there are ranks, or twice as many, of which rank r has number r and the one as far
    from the end, so that causal attention is equally much work on all.
    """
    runs, units = ranks * (2 if folded else 1), length // multiple_of
    positions_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for token in range(length):
        at = min(token // multiple_of, units - 1)
        run = max(i for i in range(runs) if i * units // runs <= at)
        positions_by_rank[min(run, runs - 1 - run) if folded else run].append(token)
    return [np.array(places) for places in positions_by_rank]
