"""Keys that ranks fetch are those that queries see, and sequence parallelism copies nothing besides what it sends."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import ParallelConfig
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import find_global_queries, find_reachable_keys
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel import collectives
from megatfm.parallel.context_parallel import ContextParallel, FetchPlan, compute_token_indices, is_sparse_fetch
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, LENGTH, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

ROW_LENGTH, ROWS, HEADS = 61, 2, 4
KINDS = {
    "one": (61, 61), "short": (1, 9), "long": (20, 45), "whole parts": (12, 12), "padding": (3, 9),
    "all padding": (61, 61),
}  # fmt: skip

EXACT: dict[str, AttentionPattern] = {
    "full": Full(),
    "causal": Full(causal=True),
    "window as wide as the row": Window(60),
    "window": Window(15),
    "window, first": Window(15, 0, 1, 2),
    "window of both sides": Window(8, 8),
    "window of one": Window(0),
    "chunked, causal": Chunked(21, causal=True),
    "chunked": Chunked(7, causal=False),
    "bigbird without random blocks, causal": BigBird(3, 0, 0, HEADS, causal=True),
}
"""Patterns for which not one key too many is fetched."""

MORE: dict[str, tuple[AttentionPattern, float]] = {
    "window, step": (Window(21, 0, 3), 1.5),
    "bigbird": (BigBird(4, 2, 0, HEADS), 1.5),
    "bigbird, extra": (BigBird(4, 1, 5, HEADS), 1.5),
    "bigbird, causal": (BigBird(4, 1, 0, HEADS, causal=True), 1.5),
    "longformer": (Longformer(3, (0, 7)), 1.5),
    "strided": (Strided(5, causal=True), 1.5),
    "fixed": (Fixed(6, 2, causal=True), 2.5),
}
"""And of these up to so many times those that are seen."""


def rows_of(kind: str, random: np.random.Generator) -> SequenceMetadata:
    """Documents of lengths in a range; of "padding", the last third of the first row and nearly all of the second."""
    least, most = KINDS[kind]
    documents = np.zeros((ROWS, ROW_LENGTH), np.int64)
    for row in range(ROWS):
        ends = np.cumsum(random.integers(least, most + 1, ROW_LENGTH))
        documents[row] = np.searchsorted(ends, np.arange(ROW_LENGTH), "right")
    if kind == "padding":
        documents[0, 40:] = documents[1, 5:] = -1
    if kind == "all padding":
        documents[0] = -1
    sequence = SequenceMetadata(torch.zeros(ROWS, ROW_LENGTH, dtype=torch.int64), torch.from_numpy(documents))
    return SequenceMetadata(sequence.positions_in_document()[0], sequence.documents)


def needed_by(pattern: AttentionPattern, row: SequenceMetadata) -> Tensor:
    """Boolean [T, S]: whether a query that is no padding sees a key, in any row and head."""
    mask = pattern.mask(row, 0, HEADS if pattern.differs_by_head else 1)
    assert mask is not None
    return (mask.expand(ROWS, -1, -1, -1) & row.non_padding_mask[:, None, :, None]).flatten(0, 1).any(0)


@pytest.mark.parametrize("name", [*EXACT, *MORE])
@pytest.mark.parametrize("prefix", [0, 2])
def test_fetched_keys_are_those_that_queries_see(name: str, prefix: int) -> None:
    pattern, bound = (EXACT[name], 1.0) if name in EXACT else MORE[name]
    pattern = pattern.simplify(ROW_LENGTH)
    fetched = expected = 0
    for kind, ranks, folded, unit in product(KINDS, (2, 3, 5), (False, True), (1, 2)):
        row = rows_of(kind, np.random.default_rng(ranks))
        if prefix:
            row.prefix = (row.positions < prefix) & row.non_padding_mask
        needed, dealt = needed_by(pattern, row), compute_token_indices(ROW_LENGTH, ranks, folded, unit)
        narrow = torch.ones(ROW_LENGTH, dtype=torch.bool)
        narrow[find_global_queries(pattern, row, dealt)] = False
        for local in dealt:
            is_fetched = torch.zeros(ROW_LENGTH, dtype=torch.bool)
            is_fetched[find_reachable_keys(pattern, row, local)] = True
            assert is_fetched[local].all()
            is_needed = needed[local[narrow[local]]].any(0)
            assert not (is_needed & ~is_fetched).any(), f"{kind}, {ranks} ranks: keys that are seen stay away"
            is_fetched[local] = is_needed[local] = False
            fetched, expected = fetched + int(is_fetched.sum()), expected + int(is_needed.sum())
    assert expected <= fetched <= bound * expected


@dataclass(frozen=True)
class FakeContextParallel:
    """Stands for `ContextParallel` on one of several ranks."""

    rank: int
    size: int


def test_a_fetch_is_sparse_below_half_of_the_other_tokens() -> None:
    """By counting; and what one rank gives another is what that one gets of it."""
    littles = set()
    for kind, ranks, folded in product(KINDS, (2, 3, 5), (False, True)):
        row, dealt = rows_of(kind, np.random.default_rng(ranks)), compute_token_indices(ROW_LENGTH, ranks, folded)
        needed = needed_by(Full(causal=True), row)
        by_rank = [set(needed[at].any(0).nonzero()[:, 0].tolist()) - set(at.tolist()) for at in dealt]
        needs = [find_reachable_keys(Full(causal=True), row, at) for at in dealt]
        result = [
            FetchPlan.build(cast(ContextParallel, FakeContextParallel(rank, ranks)), dealt, needs)
            for rank in range(ranks)
        ]
        most = max(map(len, by_rank))
        littles.add(is_sparse_fetch(dealt, needs))
        assert is_sparse_fetch(dealt, needs) == (most < ROW_LENGTH * (ranks - 1) / ranks / 2)
        for rank, local in enumerate(result):
            assert (local.max_fetched, local.length) == (most, ROW_LENGTH)
            assert {int(x) for gets in local.recv_indices for x in gets} == by_rank[rank]
            for other in range(ranks):
                assert torch.equal(dealt[other][result[other].send_indices[rank]], local.recv_indices[other])
    assert littles == {True, False}


def test_planning_a_long_row_asks_for_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two a run, however many there are."""
    requested = []
    real = Window.key_ranges
    monkeypatch.setattr(Window, "key_ranges", lambda *inputs: requested.append(inputs) or real(*inputs))
    length = 4096
    row = SequenceMetadata(torch.arange(length)[None] % 3, torch.arange(length)[None] // 3)
    find_reachable_keys(Window(2), row, compute_token_indices(length, 8, is_zigzag=True)[3])
    assert len(requested) <= 4


# ----------------------------------------------------------------------------------------------------- copies


COPIES = (
    "aten::clone", "aten::copy_", "aten::cat", "aten::index_select", "aten::_to_copy", "aten::contiguous",
)  # fmt: skip


class Copies(TorchDispatchMode):
    """Counts bytes that are laid anew, but by gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.sends = False
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in COPIES and isinstance(result, Tensor):
            self.bytes["copied"] += result.nbytes * (not self.sends)
        return result


def copied(rows: int, parallel: ParallelConfig) -> dict[str, int]:
    """Bytes of a micro-batch of so many rows, forward and backward, in float32; calls of collectives."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp32")
    batch = global_batch(seed=0, rows=rows)
    calls = Counter[str]()
    with pytest.MonkeyPatch.context() as patch, Copies() as copies:
        for name in ("_gather", "_reduce_scatter"):
            real = getattr(collectives, name)

            def watched(x: Tensor, dim: int, group: Any, real: Any = real, name: str = name) -> Tensor:
                calls[name] += 1
                calls["laid anew"] += not x.movedim(dim, 0).is_contiguous()
                copies.sends = True
                try:
                    return real(x, dim, group)
                finally:
                    copies.sends = False

            patch.setattr(collectives, name, watched)
        engine.forward_backward([batch], CAUSAL)
    return {**copies.bytes, **calls}


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_collectives_along_the_sequence_copy_nothing(workers: Workers, rows: int) -> None:
    """And what they give needs no copy to be multiplied: a rank lays no more anew than one device does alone."""
    (alone,) = workers.run(copied, 1, rows, ParallelConfig())
    for rank in workers.run(copied, 2, rows, ParallelConfig(tp=2)):
        assert rank["_gather"] >= 2 * UNTIED_MODEL.n_layers
        assert rank["_reduce_scatter"] >= 2 * UNTIED_MODEL.n_layers
        assert rank["laid anew"] == 0
        assert rank["copied"] <= alone["copied"]


def part(rows: int) -> tuple[list[int], list[int], list[list[float]]]:
    """A rank's part of numbered tokens, their gather, and sums of rows."""
    from megatfm.parallel.collectives import TensorParallelGroup
    from megatfm.parallel.mesh import TENSOR, build_mesh

    ranks = TensorParallelGroup(build_mesh(ParallelConfig(tp=2), 2, "cpu").group(TENSOR), sequence_parallel=True)
    tokens_BT1 = torch.arange(rows * LENGTH).view(rows, LENGTH, 1).double()
    tokens = ranks.split_tokens(tokens_BT1)
    assert tokens.shape == (rows, LENGTH // 2, 1)
    return (
        tokens.flatten().int().tolist(),
        ranks.gather_replicated(tokens).flatten().int().tolist(),
        ranks.sum_rows(tokens).tolist(),
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_parts_follow_one_another_through_the_rows(workers: Workers, rows: int) -> None:
    (first, full, selected), (second, _, remaining) = workers.run(part, 2, rows)
    assert first + second == full == list(range(rows * LENGTH))
    sums = torch.arange(rows * LENGTH).view(rows, LENGTH, 1).sum(1).tolist()
    assert [[a[0] + b[0]] for a, b in zip(selected, remaining, strict=True)] == sums
