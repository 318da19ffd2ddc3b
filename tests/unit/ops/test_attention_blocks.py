"""Attention by blocks against the written-out reference: output and every gradient, in float64 to the last digits."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.ops import keyed_random
from megatfm.ops.attention import bands, block_plan, block_sparse, flex, tile
from megatfm.ops.attention.mask import AttentionMask, Band, DenseMask, expand_bias, slice_tile
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from tests.support.layouts import EXTENDED, SLOW
from tests.support.models import SameChunkPattern
from tests.support.tensors import draw

B, N, T, H, SIZE = 2, 4, 77, 4, 8
DOCUMENTS = torch.tensor([[0] * 19 + [1] * 1 + [2] * 40 + [-1] * 17, [0] * 16 + [1] * 8 + [2] * 53])
PATTERNS = [
    Window(10), Window(0), Window(7, 9), Window(200), Window(12, step=3), Window(9, first=3),
    Chunked(20, causal=True), Chunked(8, causal=False), Strided(9, causal=True), Fixed(12, 2, causal=True),
    BigBird(4, 1, 0, N), BigBird(8, 1, 0, N, layer=2), BigBird(4, 2, 3, N, causal=True), Longformer(9, (0, 17)),
    Full(causal=True), SameChunkPattern(11),
]  # fmt: skip


@pytest.fixture(autouse=True)
def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and tiles that T is no multiple of, several chunks of each, and masks made in several parts."""
    monkeypatch.setattr(bands, "TILE_SIZES", (4, 8, 16))
    monkeypatch.setattr(bands, "KEY_ALIGNMENT", 4)
    monkeypatch.setattr(bands, "MIN_MEAN_LENGTH", 1)
    monkeypatch.setattr(bands, "MAX_CAUSAL_TILE", 45)
    monkeypatch.setattr(tile, "MAX_TILE_SCORES", 3 * B * N * 16)
    monkeypatch.setattr(block_sparse, "SIZE", SIZE)
    monkeypatch.setattr(block_sparse, "MAX_SCORES", 3 * N * SIZE * SIZE)
    monkeypatch.setattr(block_plan, "MAX_MASK_PAIRS", 3 * SIZE * SIZE)


def iter_layouts(rows: int = B) -> Iterator[SequenceMetadata]:
    positions, prefix = torch.arange(T).expand(rows, T), (torch.arange(T) < 5) | (torch.arange(T) == 30)
    for documents in (None, DOCUMENTS[:rows]):
        yield SequenceMetadata(positions, documents)
        yield SequenceMetadata(positions, documents, prefix=prefix.expand(rows, T))


def draw_inputs(
    kv_heads: int = N, queries: int = T, width: int = H, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = [(B, N, queries, H), (B, kv_heads, T, H), (B, kv_heads, T, width)]
    return [(2 * draw(*shape, seed=seed)).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]


PLAIN = AttentionOptions()


def compare(
    tensors: list[Tensor],
    pattern_mask: AttentionMask,
    variant: AttentionOptions = PLAIN,
    keys: Tensor | None = None,
    bias: Tensor | None = None,
    function: Callable[..., Tensor] = block_sparse.block_sparse_attention,
) -> float:
    """The largest error of output and gradients, relative to each, or to a hundredth of the largest."""
    actual, expected = (
        function(*tensors[:3], pattern_mask, bias, variant, keys, *tensors[3:])
        for function in (function, attention_reference)
    )
    if bias is not None and bias.requires_grad:
        tensors = [*tensors, bias]
    y = draw(*expected.shape).to(expected.dtype)
    result = (actual, *torch.autograd.grad(actual, tensors, y))
    expected = (expected, *torch.autograd.grad(expected, tensors, y))
    least = 1e-2 * max(x.norm() for x in expected)
    return max(((a - b).norm() / max(b.norm(), least)).item() for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("kv_heads", [N, 2, 1])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_gradients_against_the_reference(pattern: AttentionPattern, kv_heads: int) -> None:
    for layout in iter_layouts():
        assert compare(draw_inputs(kv_heads), PatternMask(pattern, layout, 0, N)) < 1e-13


@pytest.mark.parametrize("kv_heads", [N, 2])
def test_full_attention_is_computed_in_tiles(kv_heads: int) -> None:
    """BigBird's first and last block, where blocks divide a row; with and without biases by distance."""
    length = 64
    tensors = [x[:, :, :length].detach().requires_grad_() for x in draw_inputs(kv_heads)]
    layout = SequenceMetadata(torch.arange(length).expand(B, -1))
    pattern_mask = PatternMask(BigBird(4, 1, 0, N), layout, 0, N)
    visits, *_ = block_sparse._plan_visits(pattern_mask, tensors[0], tensors[1], has_dropout=False, fused=True)
    wide = [visit for visit in visits if isinstance(visit, Band)]
    assert sorted((band.row, band.first_query, band.queries, band.keys) for band in wide) == [
        (row, first, 4, length) for row in range(B) for first in (0, length - 4)
    ]
    assert compare(tensors, pattern_mask) < 1e-13
    near = draw_biases()[:, T - length : T + length - 1].detach().requires_grad_()
    assert compare(tensors, pattern_mask, bias=near) < 1e-13


SHARDS = [
    ([*range(0, 11), *range(66, 77)], [*range(0, 11), *range(66, 77)]),  # a rank's own keys, zig-zag
    ([*range(0, 11), *range(66, 77)], [*range(11, 22), *range(55, 66)]),
    ([*range(30, 50)], [*range(3, 8), *range(19, 41), *range(45, 77)]),  # fetched keys, some of them queries
    ([5, 9, 76], [9]),
    ([0, 1], [*range(40, 77)]),  # later keys alone
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shard", range(len(SHARDS)))
def test_bands_of_a_shard_hold_each_visible_pair_once(shard: int, causal: bool) -> None:
    q, k = (torch.tensor(indices) for indices in SHARDS[shard])
    for documents in (None, DOCUMENTS):
        counts = torch.zeros(B, len(q), len(k), dtype=torch.int64)
        visited = torch.zeros(B, len(q), dtype=torch.bool)
        sequence = SequenceShard(SequenceMetadata(torch.arange(T).expand(B, T), documents), q)
        for band in PatternMask(Full(causal), sequence.with_keys_at("", k)).shard_bands() or ():
            rows = slice(None) if band.row is None else slice(band.row, band.row + 1)
            queries = slice(band.first_query, band.first_query + band.queries)
            pairs = torch.ones(band.queries, band.keys, dtype=torch.int64)
            counts[rows, queries, band.first_key : band.first_key + band.keys] += pairs.tril() if band.causal else pairs
            assert band.accumulates or not visited[rows, queries].any()
            visited[rows, queries] = True
        ids = torch.zeros(B, T) if documents is None else documents
        is_visible = ids[:, q, None] == ids[:, None, k]
        assert torch.equal(counts, (is_visible & (k <= q[:, None]) if causal else is_visible).long())


def test_documents_longer_than_a_tile_hide_later_tokens_in_float16() -> None:
    """CPUs have no fused kernel for float16, so that the built-in causal mask is not there either."""
    layout = SequenceMetadata(torch.arange(T).expand(B, T), DOCUMENTS)
    inputs = [x.detach() for x in draw_inputs(dtype=torch.float16)]
    expected = attention_reference(*(x.double() for x in inputs), PatternMask(Full(True), layout), None, PLAIN, None)
    out = block_sparse.block_sparse_attention(*inputs, PatternMask(Full(True), layout), None, PLAIN, None)
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()


def make_sinks() -> Tensor:
    return torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)


def draw_biases() -> Tensor:
    """A number for each head and distance, as large as scores."""
    return 3 * draw(N, 2 * T - 1)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_biases_by_distance(pattern: AttentionPattern) -> None:
    """Biases have a gradient (T5), or none (ALiBi)."""
    for kv_heads, layout in zip((N, 2, 1, N), iter_layouts(), strict=True):
        pattern_mask = PatternMask(pattern, layout, 0, N)
        assert compare(draw_inputs(kv_heads), pattern_mask, bias=draw_biases()) < 1e-13
        assert compare(draw_inputs(kv_heads), pattern_mask, bias=draw_biases().requires_grad_()) < 1e-13


@pytest.mark.parametrize("pattern", [Window(10), Full(causal=True), BigBird(4, 1, 0, N)], ids=repr)
def test_biases_by_distance_combine_with_other_options(pattern: AttentionPattern) -> None:
    variant = AttentionOptions(softcap=2.0, dropout=0.3)
    tensors, bias = [*draw_inputs(2, width=6), make_sinks().requires_grad_()], draw_biases().requires_grad_()
    for layout in iter_layouts():
        assert compare(tensors, PatternMask(pattern, layout, 0, N), variant, KEYS, bias) < 1e-13


def test_a_relative_bias_equals_its_expansion_to_pairs() -> None:
    """Written out, for queries that end at the last key as those after a cache do."""
    queries, keys, bias = 5, 9, torch.randn(2, 13)
    rows = [torch.stack([bias[:, j - i + queries - 1] for j in range(keys)], -1) for i in range(queries)]
    expected = torch.stack(rows, 1)
    assert torch.equal(expand_bias(bias, keys), expected)
    assert torch.equal(slice_tile(bias, queries, 1, 3, 4, 5), expected[:, 1:4, 4:9])


KEYS = keyed_random.fold_in(torch.arange(B * N * T).view(B, N, T), 5)


@pytest.mark.parametrize("pattern", [Window(10), SameChunkPattern(11), Full(causal=True)], ids=repr)
@pytest.mark.parametrize(("variant", "keys", "width"), [
    (AttentionOptions(scale=0.3), None, H),
    (AttentionOptions(softcap=1.5), None, H),
    (AttentionOptions(dropout=0.3), KEYS, H),
    (AttentionOptions(scale=0.3, softcap=2.0, dropout=0.3), KEYS, 6),
    (PLAIN, None, 6),
], ids=["scale", "soft cap", "dropout", "all of them", "values of another width"])  # fmt: skip
def test_variants_of_block_sparse_attention_equal_the_dense_reference(
    pattern: AttentionPattern, variant: AttentionOptions, keys: Tensor | None, width: int
) -> None:
    for layout in iter_layouts():
        assert compare(draw_inputs(2, width=width), PatternMask(pattern, layout, 0, N), variant, keys) < 1e-13
        sinks = make_sinks().requires_grad_()
        assert compare([*draw_inputs(2, width=width), sinks], PatternMask(pattern, layout, 0, N), variant, keys) < 1e-13


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_queries_after_cached_tokens(pattern: AttentionPattern) -> None:
    past = 21
    layout = SequenceMetadata(
        torch.arange(past, T).expand(B, -1), DOCUMENTS[:, past:], past=past, past_documents=DOCUMENTS[:, :past],
    )  # fmt: skip
    assert compare(draw_inputs(2, queries=T - past), PatternMask(pattern, layout, 0, N)) < 1e-13


def test_a_shard_of_the_heads() -> None:
    layout = next(iter_layouts())
    q, k, v = draw_inputs()
    full, second = (
        block_sparse.block_sparse_attention(
            *(x[:, part] for x in (q, k, v)), PatternMask(SameChunkPattern(3), layout, first, n), None, PLAIN, None
        )
        for part, first, n in ((slice(0, 4), 0, 4), (slice(2, 4), 2, 2))
    )
    torch.testing.assert_close(full[:, 2:], second)


def test_dense_masks() -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, N, T, T, generator=generator) < 0.05
    mask |= torch.eye(T, dtype=torch.bool)
    for part in (mask, mask[:1, :1], mask[:, :1], mask[:1]):
        assert compare(draw_inputs(2), DenseMask(None, part)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_is_close_to_the_reference(dtype: torch.dtype) -> None:
    pattern_mask, tensors = PatternMask(Window(30), next(iter_layouts())), draw_inputs(2, dtype=dtype)
    y = draw(B, N, T, H)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(attention_reference(*exact, pattern_mask), exact, y)

    def errors(function) -> list[float]:  # type: ignore[no-untyped-def]
        result = torch.autograd.grad(function(*tensors, pattern_mask, None, PLAIN, None), tensors, y.to(dtype))
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(result, expected, strict=True)]

    blocked, dense = errors(block_sparse.block_sparse_attention), errors(attention_reference)
    assert all(error < 2 * reference + 1e-6 for error, reference in zip(blocked, dense, strict=True))


def test_tables_of_block_sparse_attention_grow_linearly() -> None:
    """Masks and tables of pieces: twice the tokens, about twice the numbers."""

    def held(length: int, pattern: AttentionPattern, documents: Tensor | None) -> int:
        pattern_mask = PatternMask(pattern, SequenceMetadata(torch.arange(length)[None], documents))
        plan = block_plan.plan_blocks(pattern_mask, block_plan.BlockGrid(1, length, length, SIZE))
        return sum(0 if piece.mask is None else piece.mask.numel() for piece in plan)

    for pattern in (Window(40), Full(causal=True), Chunked(40, causal=True), Window(40, first=3)):
        for packed in (False, True):
            short, long = (held(n, pattern, torch.arange(n)[None] // 100 if packed else None) for n in (1000, 2000))
            assert long <= 2.2 * short + 2 * SIZE * SIZE


def copy_layout(layout: SequenceMetadata) -> SequenceMetadata:
    return SequenceMetadata(layout.positions, layout.documents)


@pytest.mark.parametrize(("fault", "pattern"), [
    ("a block too many is taken as whole", Window(10)),
    ("a document's end is lost", Window(10)),
    ("a document's end is lost", Full(causal=True)),
    ("the random blocks of another head", BigBird(4, 1, 0, N)),
    ("keys beyond the last", Window(7, 9)),
])  # fmt: skip
def test_faults_in_block_masks_show(fault: str, pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above, with the kernel's own view of a pattern broken."""
    monkeypatch.setattr(bands, "MIN_MEAN_LENGTH", T)
    documents = torch.tensor([[0] * 30 + [1] * 47]).expand(B, -1)
    layout = SequenceMetadata(torch.arange(T).expand(B, -1), documents)
    broken = PatternMask(pattern, copy_layout(layout), 0, N)
    if fault.startswith("a block"):
        monkeypatch.setattr(broken, "full_block_mask", broken.block_mask)
    elif fault.startswith("a document"):
        broken = PatternMask(pattern, SequenceMetadata(torch.arange(T).expand(B, -1)), 0, N)
    elif fault.startswith("the random"):
        broken = PatternMask(pattern, copy_layout(layout), 1, N - 1)
    else:
        requested = broken.mask_mod
        monkeypatch.setattr(broken, "mask_mod", lambda b, n, q, k: requested(b, n, q, (k - 1).clamp(min=0)))
    heads = N - 1 if fault.startswith("the random") else N
    q, k, v = (x[:, :heads] for x in draw_inputs())
    mask = PatternMask(pattern, layout, 0, heads)
    expected = block_sparse.block_sparse_attention(q, k, v, mask, None, PLAIN, None)
    torch.testing.assert_close(expected, attention_reference(q, k, v, PatternMask(pattern, layout, 0, heads)))
    wrong = block_sparse.block_sparse_attention(q, k, v, broken, None, PLAIN, None)
    assert ((wrong - expected).norm() / expected.norm()) > 1e-3


@pytest.mark.parametrize("pattern", [Window(10), Chunked(20, causal=True), Longformer(9, (0, 17))], ids=repr)
def test_faults_of_bands_are_found(pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side one token too long, a chunk too long, a token that sees all forgotten; and documents that are lost."""
    layout = SequenceMetadata(torch.arange(T).expand(B, -1), DOCUMENTS)
    wrong = {"left": 11} if pattern == Window(10) else {"chunk": 21} if pattern.band.chunk else {"global_tokens": (0,)}
    pattern_mask = PatternMask(pattern, layout, 0, N)
    assert compare(draw_inputs(2), pattern_mask) < 1e-13
    assert pattern_mask.bands(fused=True)
    for sides, documents in ((replace(pattern.band, **wrong), layout.document_spans()), (pattern.band, [(None, 0, T)])):
        broken = PatternMask(pattern, copy_layout(layout), 0, N)
        broken_bands = bands.make_bands(sides, documents, torch.device("cpu"), fused=True)
        monkeypatch.setattr(broken, "bands", lambda *, fused, result=broken_bands: result)
        assert compare(draw_inputs(2), broken) > 1e-3


IN_FLEX = {4: (), 6: (), 11: (), 13: (), 0: (EXTENDED,), 8: (EXTENDED,), 9: (EXTENDED,)}
"""Marks of one of each kind: windows with steps, chunks, BigBird, Longformer; windows, strided, fixed. The others are
slow."""


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "pattern",
    [pytest.param(pattern, id=repr(pattern), marks=IN_FLEX.get(i, (SLOW,))) for i, pattern in enumerate(PATTERNS)],
)
def test_flex_attention_equals_the_reference(pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own table of blocks and masks, run by its reference: on a CPU it has no backward pass."""
    monkeypatch.setattr(flex, "SIZE", SIZE)
    q, k, v = (x.detach() for x in draw_inputs(2))
    variant = AttentionOptions(scale=0.2, softcap=3.0)
    together, apart = ((None, None), (make_sinks(), draw_biases())), ((make_sinks(), None), (None, draw_biases()))
    options = together if PATTERNS.index(pattern) % 2 else apart
    for layout, (given_sinks, bias) in zip(list(iter_layouts())[1:3], options, strict=True):
        pattern_mask = PatternMask(pattern, layout, 0, N)
        result = flex.flex(q, k, v, pattern_mask, bias, variant, None, given_sinks)
        expected = attention_reference(q, k, v, pattern_mask, bias, variant, None, given_sinks)
        torch.testing.assert_close(result, expected)
        visited = flex.block_mask(pattern_mask, T, T).to_dense().bool().expand(B, N, -1, -1)
        assert torch.equal(visited, pattern_mask.block_mask(SIZE).expand(B, N, -1, -1))
