"""Attention patterns: every form against loops over queries and keys, document by document."""

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns import PATTERNS, AttentionPattern, local
from megatfm.layers.attention.patterns.bigbird import BigBird, draw_random_blocks
from megatfm.layers.attention.patterns.local import Chunked, Fixed, Full, Longformer, Strided, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.attention.patterns.pattern import MAX_CACHED_COUNTS, BlockBounds, _count_pairs_once
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from tests.support.models import SameChunkPattern

T = 13
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [-1], [0] * 3 + [1] * 2 + [2] * 8])
N = 2


@dataclass(frozen=True)
class LastTokensPattern(AttentionPattern):
    """The last `width` tokens."""

    width: int

    @property
    def is_relative(self) -> bool:
        return True

    def mask_mod(self, q: Tensor, k: Tensor, heads: Tensor) -> Tensor:
        return (k <= q) & (k > q - self.width)

    def block_mask(self, q: BlockBounds, k: BlockBounds, heads: Tensor) -> Tensor:
        return (k.first <= q.last) & (k.last > q.first - self.width)


BOTH = (True, False)
ALL = [
    Full(),
    Full(causal=True),
    LastTokensPattern(3),
    SameChunkPattern(2),
    *(Window(left, right) for left, right in ((0, 0), (2, 0), (12, 0), (11, 0), (3, 3), (2, 4), (20, 20), (20, 2))),
    *(Window(6, right, step=3) for right in (0, 6)),
    *(Window(left, first=first, step=step) for left, first, step in ((2, 1, 1), (4, 6, 2), (3, 40, 1))),
    *(Chunked(size, causal) for size in (1, 4, 5, 13) for causal in BOTH),
    *(Strided(stride, causal) for stride in (1, 3, 5, 20) for causal in BOTH),
    *(
        BigBird(1, 1, extra, N, causal, layer)
        for extra, causal, layer in ((0, False, 0), (0, False, 3), (0, True, 1), (2, False, 1), (2, True, 0))
    ),
    BigBird(2, 1, 0, N),
    BigBird(2, 0, 0, N),
    *(Longformer(side, tokens) for side, tokens in ((1, (0,)), (2, (0, 3, 9)), (0, (5, 40)), (1, ()))),
    *(Fixed(stride, summary, causal) for stride, summary in ((4, 1), (5, 2), (20, 3)) for causal in BOTH),
]


@cache
def list_visible_pairs(pattern: AttentionPattern, row: tuple[int, ...], head: int) -> Tensor:
    """[T, T], asking the pattern about one pair of a row of documents at a time, with places counted by hand."""
    numbers, mask = torch.arange(T + 1).unbind(), torch.zeros(T, T, dtype=torch.bool)
    for q, k in itertools.product(range(T), range(T)):
        if row[q] == row[k]:
            first = row.index(row[q])
            places = (numbers[place] for place in (q - first, k - first, head, row.count(row[q])))
            mask[q, k] = bool(pattern.mask_mod_for_lengths(*places))
    return mask


def expected_mask(pattern: AttentionPattern, documents: Tensor | None, prefix: Tensor | None) -> Tensor:
    """[B, N, T, T]: what the pattern shows, and all of a document's prefix."""
    rows = torch.zeros(2, T, dtype=torch.int64) if documents is None else documents
    mask = torch.stack([
        torch.stack([list_visible_pairs(pattern, tuple(row), head) for head in range(N)]) for row in rows.tolist()
    ])  # fmt: skip
    if prefix is None:
        return mask
    return mask | ((rows[:, :, None] == rows[:, None]) & prefix[:, None])[:, None]


def dense(pattern: AttentionPattern, sequence: SequenceMetadata) -> Tensor:
    """[B, N, T, T], whatever form the pattern gives it."""
    pattern_mask = PatternMask(pattern, sequence, 0, N)
    mask = pattern_mask.mask()
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool)
        mask = (mask.tril() if pattern_mask.builtin_mask == "causal" else mask)[None, None]
    else:
        assert pattern_mask.builtin_mask is None
    return mask.expand(2, N, T, T)


def layouts() -> Iterator[tuple[SequenceMetadata, Tensor | None, Tensor | None]]:
    positions = torch.arange(T).expand(2, T)
    prefix = (torch.arange(T) < 2) | (torch.arange(T) == 6)
    for documents in (None, DOCUMENTS):
        yield SequenceMetadata(positions, documents), documents, None
        opened = prefix.expand(2, T)
        yield SequenceMetadata(positions, documents, prefix=opened), documents, opened


@pytest.mark.parametrize("pattern", ALL, ids=repr)
def test_masks_say_what_the_pattern_says(pattern: AttentionPattern) -> None:
    for sequence, documents, prefix in layouts():
        assert torch.equal(dense(pattern, sequence), expected_mask(pattern, documents, prefix))


@pytest.mark.parametrize("pattern", ALL, ids=repr)
@pytest.mark.parametrize("size", [1, 4])
def test_every_pair_is_in_a_block_of_the_table(pattern: AttentionPattern, size: int) -> None:
    for sequence, documents, _ in layouts():
        table = PatternMask(pattern, sequence, 0, N).block_mask(size).expand(2, N, -(-T // size), -(-T // size))
        spread = table.repeat_interleave(size, 2).repeat_interleave(size, 3)[..., :T, :T]
        mask = dense(pattern, sequence)
        assert (spread | ~mask).all()
        lengths_differ = pattern.depends_on_length and documents is not None
        if size == 1 and sequence.prefix_mask is None and not lengths_differ:
            assert torch.equal(spread, mask), "a table of single tokens says exactly what is seen"
        full_table = PatternMask(pattern, sequence, 0, N).full_block_mask(size).expand(table.shape)
        assert (table | ~full_table).all()
        surely = full_table.repeat_interleave(size, 2).repeat_interleave(size, 3)[..., :T, :T]
        assert (mask | ~surely).all()


@pytest.mark.parametrize("pattern", ALL, ids=repr)
def test_single_pairs_are_those_of_the_mask(pattern: AttentionPattern) -> None:
    for sequence, *_ in layouts():
        b, n, q, k = torch.meshgrid(*(torch.arange(length) for length in (2, N, T, T)), indexing="ij")
        assert torch.equal(PatternMask(pattern, sequence, 0, N).mask_mod(b, n, q, k), dense(pattern, sequence))


@pytest.mark.parametrize("pattern", ALL, ids=repr)
def test_blocks_that_repeat_have_equal_masks(pattern: AttentionPattern) -> None:
    size, count = 2, T // 2
    for sequence, *_ in layouts():
        repeats = PatternMask(pattern, sequence, 0, N).find_translation_invariant_blocks(size)
        if repeats is None:
            continue
        queries, keys = (x.expand(2, -1) for x in repeats)
        mask, actual = dense(pattern, sequence)[..., : 2 * count, : 2 * count], {}
        for b, n, i, j in torch.cartesian_prod(*(torch.arange(x) for x in (2, N, count, count))).tolist():
            part = mask[b, n, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            if queries[b, i] and keys[b, j] and part.any():
                assert torch.equal(actual.setdefault((n, j - i), part), part)


def make_pattern(section: dict[str, object], causal: bool) -> AttentionPattern:
    attention = {"n_heads": 2, "pattern": section}
    config = ModelConfig(vocab_size=7, d_model=8, n_layers=1, attention=attention, ffn={"d_ff": 8})
    return PATTERNS.get(config.attention.pattern.name)(config, causal)


@pytest.mark.parametrize(("pattern", "causal", "rows"), [
    ({"name": "window", "width": 2}, True, ["x....", "xx...", ".xx..", "..xx.", "...xx"]),
    ({"name": "window", "width": 2}, False, ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]),
    ({"name": "window", "width": 2, "dilation": 2}, True, ["x....", ".x...", "x.x..", ".x.x.", "..x.x"]),
    ({"name": "window", "width": 2, "initial_tokens": 1}, True, ["x....", "xx...", "xxx..", "x.xx.", "x..xx"]),
    ({"name": "chunked", "size": 3}, True, ["x....", "xx...", "xxx..", "...x.", "...xx"]),
    ({"name": "chunked", "size": 3}, False, ["xxx..", "xxx..", "xxx..", "...xx", "...xx"]),
    ({"name": "strided", "stride": 2}, True, ["x....", "xx...", "xxx..", ".xxx.", "x.xxx"]),
    ({"name": "strided", "stride": 3}, False, ["xxxx.", "xxxxx", "xxxxx", "xxxxx", ".xxxx"]),
    ({"name": "longformer", "width": 2, "global_tokens": [0]}, False, ["xxxxx", "xxx..", "xxxx.", "x.xxx", "x..xx"]),
    ({"name": "bigbird", "block_size": 1, "n_random_blocks": 0, "n_global_tokens": 1}, True,
     ["x....", "xx...", "xxx..", "x.xx.", "x..xx"]),
    ({"name": "fixed", "stride": 2, "n_summary_tokens": 1}, True, ["x....", "xx...", ".xx..", ".xxx.", ".x.xx"]),
    ({"name": "fixed", "stride": 2, "n_summary_tokens": 1}, False, ["xx.x.", "xx.x.", ".xxx.", ".xxx.", ".x.xx"]),
])  # fmt: skip
def test_a_pattern_s_mask_follows_its_config(pattern: dict[str, object], causal: bool, rows: list[str]) -> None:
    mask = PatternMask(make_pattern(pattern, causal), SequenceMetadata(torch.arange(5)[None])).mask()
    assert mask is not None
    assert ["".join("x" if visible else "." for visible in row) for row in mask[0, 0]] == rows


@pytest.mark.parametrize(("pattern", "causal", "message"), [
    ({"name": "window", "width": 4, "initial_tokens": 2}, False,
     "pattern.initial_tokens = 2: in an encoder, initial tokens"),
    ({"name": "longformer", "width": 4}, True, "'longformer' has global tokens, which see later tokens"),
    ({"name": "bigbird", "n_random_blocks": 65}, False, "n_random_blocks = 65: more than 64 random blocks"),
    ({"name": "fixed", "stride": 4, "n_summary_tokens": 4}, True,
     "n_summary_tokens = 4 with stride = 4 is full attention"),
])  # fmt: skip
def test_contradictory_options_of_patterns_are_refused(pattern: dict[str, object], causal: bool, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make_pattern(pattern, causal)


@pytest.mark.parametrize("changes", [
    {"attention.n_kv_heads": 1}, {"attention.qk_norm": True}, {"attention.sinks": True},
    {"attention.key_bias": False}, {"attention.output_bias": True}, {"position.name": "rope"},
])  # fmt: skip
def test_longformer_refuses_what_its_global_projections_lack(changes: dict[str, object]) -> None:
    config = ModelConfig.from_dotted(
        {"family": "encoder", "vocab_size": 7, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
         "attention.name": "longformer", "attention.pattern": {"name": "longformer", "width": 2},
         "position.name": "learned", "position.max_positions": 8, "attention.bias": True}
    )  # fmt: skip
    build(config)
    ((key, value),) = changes.items()
    with pytest.raises(UsageError, match=r"'longformer' supports .*: leave out n_kv_heads, .*key_bias and output_bias"):
        build(config.with_changes({key: value} if key != "position.name" else {"position": {"name": value}}))


def test_one_new_token_after_cached_ones_needs_no_mask() -> None:
    for causal in (Full(causal=True), Window(T + 3), Chunked(T + 9, causal=True)):
        mask = PatternMask(causal, SequenceMetadata(torch.tensor([[T]]), past=T))
        assert (mask.builtin_mask, mask.mask()) == ("all", None)
    two = PatternMask(Full(causal=True), SequenceMetadata(torch.tensor([[T, T + 1]]), past=T))
    assert two.mask()[0, 0].tolist() == [[True] * (T + 1) + [False], [True] * (T + 2)]
    first = PatternMask(Full(causal=True), SequenceMetadata(torch.zeros(1, 1, dtype=torch.int64)))
    assert first.builtin_mask == "causal"
    evicting = PatternMask(Window(T - 2), SequenceMetadata(torch.tensor([[T]]), past=T))
    assert evicting.builtin_mask is None
    padded = SequenceMetadata(
        torch.tensor([[T], [T]]), torch.zeros(2, 1, dtype=torch.int64), past=T,
        past_documents=torch.tensor([[0] * T, [-1, *[0] * (T - 1)]]),
    )  # fmt: skip
    dense_mask = PatternMask(Full(causal=True), padded).mask()
    assert dense_mask[:, 0, 0].tolist() == [[True] * (T + 1), [False, *[True] * T]]


def test_a_window_that_holds_all_is_plain() -> None:
    sequence = SequenceMetadata(torch.arange(T)[None])
    assert PatternMask(Window(T - 1), sequence).builtin_mask == "causal"
    assert PatternMask(Window(T - 1, T - 1), sequence).builtin_mask == "all"
    assert PatternMask(Window(T - 2), sequence).builtin_mask is None
    assert PatternMask(Chunked(T, causal=True), sequence).builtin_mask == "causal"


@pytest.mark.parametrize("pattern", [pattern for pattern in ALL if not pattern.depends_on_length], ids=repr)
def test_cached_tokens_are_seen_as_before(pattern: AttentionPattern) -> None:
    past = 4
    for documents in (None, DOCUMENTS):
        full = dense(pattern, SequenceMetadata(torch.arange(T).expand(2, T), documents))
        past_documents, new = (None, None) if documents is None else (documents[:, :past], documents[:, past:])
        positions = torch.arange(past, T).expand(2, -1)
        later = SequenceMetadata(positions, new, past=past, past_documents=past_documents)
        pattern_mask = PatternMask(pattern, later, 0, N)
        mask = pattern_mask.mask()
        if mask is None:
            assert pattern_mask.builtin_mask == "all"
            continue
        assert torch.equal(mask.expand(2, N, T - past, T), full[:, :, past:])


@pytest.mark.parametrize("pattern", ALL, ids=repr)
def test_pairs_are_counted(pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEFAULT_BLOCK": 2, "BLOCKS_AT_ONCE": 3}.items():
        monkeypatch.setattr(f"megatfm.layers.attention.patterns.pattern.{name}", value)
    assert pattern.count_pairs(T, N) == expected_mask(pattern, None, None)[0].sum().item() / N


def test_counts_of_pairs_are_remembered_up_to_a_bound() -> None:
    """A pattern, and its count for a length, aren't kept for ever."""
    window = Window(2, 0)
    for heads in range(1, MAX_CACHED_COUNTS + 9):
        assert _count_pairs_once(window, 4, heads) == 3 + 3 + 2 + 1
    assert _count_pairs_once.cache_info().currsize <= MAX_CACHED_COUNTS


def test_heads_of_a_part_are_those_of_the_whole() -> None:
    sequence = SequenceMetadata(torch.arange(T).expand(2, T), DOCUMENTS)
    mask, second = (PatternMask(SameChunkPattern(2), sequence, first, n).mask() for first, n in ((0, 2), (1, 1)))
    assert torch.equal(mask[:, 1:], second)
    assert not torch.equal(mask[:, :1], second)


def test_a_memory_is_seen_by_document() -> None:
    memory = SequenceMetadata(torch.arange(3).expand(2, 3), torch.tensor([[0, 1, 1], [2, 1, -1]]))
    sequence = SequenceMetadata(torch.arange(T).expand(2, T), DOCUMENTS, memory=memory)
    mask = sequence.mask(local.CrossAttentionPattern())
    assert torch.equal(mask[:, 0], DOCUMENTS[:, :, None] == memory.documents[:, None, :])
    assert torch.equal(PatternMask(local.CrossAttentionPattern(), sequence).block_mask(1)[:, 0], mask[:, 0])


def test_the_kernel_of_a_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build(ModelConfig(vocab_size=7, d_model=8, n_layers=2, attention={"n_heads": 2}, ffn={"d_ff": 8}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.decoder.layers["1"].compile(fullgraph=True, backend="eager")
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        for _ in range(2):
            model(torch.arange(5)[None])
        model.double()(torch.arange(5)[None])
    assert [record.message for record in caplog.records if "attention" in record.message] == [
        f"attention Full(causal=True) on cpu in {dtype} runs in kernel fused, with its causal mask"
        for dtype in ("float32", "float64")
    ]


def test_random_blocks_that_a_fake_pass_drew_first_are_real() -> None:
    """The table is kept for all passes of a process: an estimate's must not leave a fake one."""
    seed = 9_173  # of no other test
    with FakeTensorMode():
        draw_random_blocks(12, 2, 1, seed)
    assert not isinstance(draw_random_blocks(12, 2, 1, seed), FakeTensor)
