"""DeBERTa's, windowed, Linformer's and memory-compressed attention against their definitions, document by document."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from megatfm.config import ModelConfig, load_config
from megatfm.cost import TokenCounts, compute_module_cost
from megatfm.errors import UsageError
from megatfm.layers.attention import linformer
from megatfm.layers.attention.memory_compressed import MemoryCompressedPattern
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.attention.relative import assign_log_buckets
from megatfm.layers.attention.windowed import WindowedAttention, Windows2d
from megatfm.layers.block import Block
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import MapSequence
from megatfm.models import build
from megatfm.ops.attention import block_sparse, kernels
from tests.support.reference_gradients import perturb
from tests.support.tensors import assert_same_gradients, draw, move_parameters

HEADS, WIDTH = 3, 12


def check_each_document(
    layer: nn.Module,
    attend: Callable[[Tensor], Tensor],
    documents: Tensor,
    packed: bool,
    shared: tuple[Tensor, ...] = (),
    padding_is_compared: bool = False,
) -> None:
    """Compare a layer on rows of documents, or of one each, with `attend` on each alone: values and every gradient."""
    x, y = (draw(2, documents.shape[1], WIDTH, seed=seed) for seed in (0, 1))
    sequence = SequenceMetadata(torch.arange(documents.shape[1]).expand(2, -1), documents if packed else None)
    documents = documents if packed else torch.zeros_like(documents)
    expected = torch.zeros_like(x)
    for row in range(2):
        for document in documents[row].unique():
            at = documents[row] == document
            expected[row, at] = attend(x[row, at])
    actual, counted = layer(x, sequence, *shared), (documents >= 0) | padding_is_compared
    torch.testing.assert_close(actual[counted], expected[counted])
    parameters = [*layer.parameters(), *(tensor for tensor in shared if tensor.requires_grad)]
    gradients, expected_gradients = (
        torch.autograd.grad((output * y)[counted].sum(), parameters) for output in (actual, expected)
    )
    largest = max(gradient.norm() for gradient in expected_gradients)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).norm() <= 1e-12 * largest


LENGTH, RANK = 13, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2, [0] * 13])


def config_of(share: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_dotted(
        {"family": "encoder", "vocab_size": 7, "d_model": WIDTH, "n_layers": 1, "attention.name": "linformer",
         "attention.n_heads": HEADS, "attention.max_length": LENGTH + 2, "attention.projected_length": RANK,
         "attention.share": share, "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes},
    )  # fmt: skip


def written_out(layer: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    """softmax(Q (E K)ᵀ / √d) (F V) of one document [T, D], equation 7."""
    q, k, v = (getattr(layer, f"w{part}")(x).unflatten(-1, (HEADS, -1)) for part in "qkv")
    e = shared if layer.of_keys is None else layer.of_keys.weight
    f = e if layer.of_values is None else layer.of_values.weight
    heads = []
    for n in range(HEADS):
        e_TR, f_TR = ((w[..., n] if w.dim() == 3 else w)[: len(x)] for w in (e, f))
        scores = q[:, n] @ (e_TR.T @ k[:, n]).T / (WIDTH / HEADS) ** 0.5
        heads.append(scores.softmax(-1) @ (f_TR.T @ v[:, n]))
    return layer.wo(torch.cat(heads, -1))


@pytest.mark.parametrize(("packed", "piece", "max_score_bytes"), [
    (False, 4096, 2**24), (True, 4096, 2**24), (False, 4, 2**24), (False, 4096, 2 * HEADS * RANK * 5 * 8),
])  # fmt: skip
@pytest.mark.parametrize("share", ["none", "headwise", "key_value", "layerwise"])
def test_linformer_equals_the_formula(
    share: str, packed: bool, piece: int, max_score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linformer, "MAX_QUERIES_PER_CHUNK", piece)
    monkeypatch.setattr(linformer, "MAX_SCORE_BYTES", max_score_bytes)
    layer = Block(config_of(share), "encoder").attn.double()
    perturb(layer, scale=0.5)
    shared = draw(LENGTH + 2, RANK, seed=2).requires_grad_(share == "layerwise")
    check_each_document(layer, lambda x: written_out(layer, x, shared), DOCUMENTS, packed, (shared,))


def test_linformer_in_pieces_drops_what_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Block(config_of("headwise", **{"attention.dropout": 0.5}), "encoder").attn.double()
    heads = [draw(2, HEADS, n, 4, seed=seed) for seed, n in enumerate((LENGTH, RANK, RANK))]
    keys = torch.randint(2**60, (2, HEADS, LENGTH))
    attended = layer._attend(*heads, keys)
    assert not torch.allclose(attended, layer._attend(*heads, None)), "nothing was dropped"
    monkeypatch.setattr(linformer, "MAX_QUERIES_PER_CHUNK", 4)
    torch.testing.assert_close(layer._attend(*heads, keys), attended, rtol=0, atol=1e-15)


def test_linformer_logs_its_kernel_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = Block(config_of("headwise"), "encoder").attn
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        for _ in range(2):
            layer(torch.zeros(1, LENGTH, WIDTH), SequenceMetadata(torch.arange(LENGTH)[None]))
    message = f"attention Linformer(rank={RANK}) on cpu in float32 runs in kernel products, without a mask"
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.parametrize(("share", "more"), [
    ("headwise", 1_572_864), ("key_value", 786_432), ("layerwise", 65_536), ("none", 18_874_368),
])  # fmt: skip
def test_linformer_adds_these_parameters_to_roberta(share: str, more: int) -> None:
    options = ["model.attention.name=linformer", "model.attention.max_length=512", f"model.attention.share={share}"]
    with torch.device("meta"):
        model = build(load_config("roberta-base", options).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_697_433 + more


@pytest.mark.parametrize(("changes", "message"), [
    ({"family": "decoder"}, "it would leak the future in family = 'decoder'"),
    ({"position.name": "rope"}, "position.name = 'learned', 'sinusoidal' or 'none'"),
    ({"attention.pattern": {"name": "window", "width": 3}},
     "'linformer' supports full attention only: leave the pattern"),
])  # fmt: skip
def test_models_that_linformer_can_not_serve_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(config_of("none", **changes))


def test_linformer_refuses_rows_beyond_its_length() -> None:
    layer = Block(config_of("none"), "encoder").attn
    long = LENGTH + 3
    with pytest.raises(UsageError, match=r"rows have 16 tokens, but model\.attention\.max_length = 15: shorten"):
        layer(torch.zeros(1, long, WIDTH), SequenceMetadata(torch.arange(long)[None]))


def test_the_encoder_of_an_encoder_decoder_has_linformer() -> None:
    model = build(config_of("layerwise", family="encoder_decoder", n_layers=2))
    encoder, decoder = (next(iter(stack.layers.values())) for stack in (model.encoder, model.decoder))
    kinds = [type(layer).__name__ for layer in (encoder.attn, decoder.attn, decoder.cross)]
    assert kinds == ["LinformerAttention", "GroupedQueryAttention", "GroupedQueryAttention"]
    assert [name for name, _ in model.named_parameters() if "sketch" in name] == ["encoder.sketch.weight"]


def test_linformer_layers_that_share_have_the_same_sizes() -> None:
    kinds = {"layer_types": ["a", "b"], "n_layers": 2, "layer_type.a": {}}
    kinds["layer_type.b.attention.projected_length"] = RANK + 1
    message = r"model\.layer_type changes max_length or projected_length: give all layers the same, or choose"
    with pytest.raises(UsageError, match=message):
        build(config_of("layerwise", **kinds))


def test_linformer_costs_its_rank() -> None:
    """Each key, value and query meets as many numbers as the rank, besides the four projections."""
    layer = Block(config_of("none"), "encoder").attn
    cost = layer.cost(TokenCounts(LENGTH))
    assert cost.attention_macs == cost.visible_attention_macs == 4 * RANK * LENGTH * WIDTH
    assert cost.matmul_macs == 4 * WIDTH * WIDTH * LENGTH


COMPRESSED_LENGTH = 29
DOCUMENTS_OF_COMPRESSED = torch.tensor([[0] * 1 + [1] * 13 + [2] * 9 + [3] * 2 + [-1] * 4, [0] * 29])


def compressed_config(factor: int, **changes: object) -> ModelConfig:
    return ModelConfig.from_dotted(
        {"vocab_size": 7, "d_model": WIDTH, "n_layers": 1, "attention.name": "compressed", "attention.n_heads": HEADS,
         "attention.factor": factor, "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes},
    )  # fmt: skip


def convolved(weight_FHHN: Tensor, x_TNH: Tensor, head: int) -> list[Tensor]:
    """The first token, and what torch's strided convolution makes of one head's keys or values."""
    kernel = weight_FHHN[..., head].permute(2, 1, 0)  # [H out, H in, F]
    result = nn.functional.conv1d(x_TNH[:, head].T[None], kernel, stride=len(weight_FHHN))[0].T
    return [x_TNH[0, head], *result]


def attend_compressed(layer: nn.Module, x: Tensor, factor: int) -> Tensor:
    """Attention of one document [T, D]."""
    q, k, v = (getattr(layer, f"w{part}")(x).unflatten(-1, (HEADS, -1)) for part in "qkv")
    if len(x) < factor:  # the kernel would be larger than the document
        k, v = (torch.cat([item, item.new_zeros(factor, *item.shape[1:])]) for item in (k, v))
    heads = []
    for n in range(HEADS):
        keys = torch.stack(convolved(layer.of_keys.weight, k, n))
        values = torch.stack(convolved(layer.of_values.weight, v, n))
        scores = q[:, n] @ keys.T / (WIDTH / HEADS) ** 0.5
        mask = torch.tensor([[key <= place // factor for key in range(len(keys))] for place in range(len(x))])
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values)
    return layer.wo(torch.cat(heads, -1))


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_compressed_attention_equals_the_definition(
    factor: int, packed: bool, by_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Block(compressed_config(factor), "decoder").attn.double()
    perturb(layer, scale=0.5)
    monkeypatch.setattr(kernels, "LONG", 1 if by_blocks else 1024)
    monkeypatch.setattr(block_sparse, "SIZE", 4)
    monkeypatch.setattr(block_sparse, "MAX_SCORES", 200)
    check_each_document(
        layer, lambda x: attend_compressed(layer, x, factor), DOCUMENTS_OF_COMPRESSED, packed, padding_is_compared=True
    )


def test_visible_pairs_of_compressed_attention_are_counted() -> None:
    """A key is 3 tokens, so of those that are drawn each counts a third; the first counts as one more."""
    pattern = MemoryCompressedPattern(3)
    for length in (1, 3, 14):
        mask = PatternMask(pattern, SequenceMetadata(torch.arange(length)[None])).mask()
        assert mask is not None
        n_keys = [1 + int(mask[0, 0, q, : q // 3 * 3].sum()) // 3 for q in range(length)]
        assert not any(mask[0, 0, q, max(1, q // 3 * 3) :].any() for q in range(length))
        assert pattern.count_pairs(length) == sum(n_keys)


@pytest.mark.parametrize(("changes", "message"), [
    ({"family": "encoder"}, "does not work in family = 'encoder'"),
    ({"family": "encoder_decoder"}, "does not work in family = 'encoder_decoder'"),
    ({"position.name": "rope"}, "position.name = 'learned', 'sinusoidal' or 'none'"),
    ({"position.name": "alibi"}, "position.name = 'learned', 'sinusoidal' or 'none'"),
    ({"attention.pattern": {"name": "window", "width": 3}}, "supports full attention only: leave the pattern out"),
])  # fmt: skip
def test_models_that_compressed_attention_can_not_serve_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(compressed_config(3, **changes))


def test_memory_compressed_attention_costs_matrices_and_pairs() -> None:
    cost = compute_module_cost(Block(compressed_config(4), "decoder").attn, TokenCounts(COMPRESSED_LENGTH))
    n_pairs = MemoryCompressedPattern(4).count_pairs(COMPRESSED_LENGTH)
    assert cost.attention_macs == cost.visible_attention_macs == 2 * WIDTH * n_pairs
    assert cost.matmul_macs == COMPRESSED_LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // HEADS)


def test_compressed_attention_refuses_prefixes() -> None:
    layer = Block(compressed_config(3), "decoder").attn
    sequence = SequenceMetadata(torch.arange(5)[None], prefix=torch.arange(5)[None] < 2)
    with pytest.raises(UsageError, match=r"all tokens of a document see its prefix: use objective\.name = 'causal'"):
        layer(torch.zeros(1, 5, WIDTH), sequence)


DEBERTA = ModelConfig(
    family="encoder", vocab_size=23, d_model=12, n_layers=2, attention={"name": "deberta", "n_heads": 2},
    ffn={"d_ff": 20}, position={"name": "deberta", "max_distance": 3},
)  # fmt: skip
BUCKETS = {"name": "deberta_v2", "buckets": 4, "max_distance": 7}
DEBERTA_V2 = DEBERTA.with_changes({"attention.name": "deberta_v2", "position": BUCKETS})


@pytest.mark.parametrize(("n", "farthest"), [(256, 512), (6, 15), (4, 5), (32, 128)])
def test_deberta_buckets_are_those_of_the_released_code(n: int, farthest: int) -> None:
    distances = torch.arange(1 - 2 * farthest, 2 * farthest)
    actual, reference = assign_log_buckets(distances, n, farthest), make_log_bucket_position(distances, n, farthest)
    assert torch.equal(actual, reference.long())
    assert actual.dtype == torch.int64
    assert actual[distances.abs() < farthest].abs().max() < n


@pytest.mark.parametrize(("config", "change"), [
    (DEBERTA, {"position.name": "none"}), (DEBERTA, {"family": "decoder"}),
    (DEBERTA, {"position.name": "rope", "family": "decoder"}),
    (DEBERTA_V2, {"position.name": "deberta"}), (DEBERTA_V2, {"family": "decoder"}),
])  # fmt: skip
def test_deberta_needs_its_own_positions_and_sees_all(config: ModelConfig, change: dict[str, str]) -> None:
    message = rf"needs model\.position\.name = '{config.attention.name}' and family = 'encoder'"
    with pytest.raises(UsageError, match=message):
        build(config.with_changes(change))


def test_deberta_buckets_that_leave_no_room_are_refused() -> None:
    """The refusal comes before anything is built; the smallest number that passes orders distances by buckets."""
    with pytest.raises(ValidationError, match=r"max_distance = 3 .*buckets = 8: choose 6 or more"):
        DEBERTA_V2.with_changes({"position.buckets": 8, "position.max_distance": 3})
    DEBERTA_V2.with_changes({"position.buckets": 8, "position.max_distance": 6})
    assert (assign_log_buckets(torch.arange(-40, 40), 8, 6).diff() >= 0).all()


# -------------------------------------------------------------------------------------------- windows of maps


OPTIONS: dict[str, Any] = {
    "family": "encoder", "d_model": WIDTH, "n_layers": 1, "attention.name": "windowed", "attention.n_heads": HEADS,
    "ffn.d_ff": 8, "position.name": "relative_2d", "vocab_size": 8,
}  # fmt: skip
MAPS = {
    "padded": ((5, 4), 3), "whole windows": ((6, 9), 3), "one row of windows": ((3, 8), 3), "one window": ((4, 4), 4),
    "smaller than a window": ((2, 3), 4), "narrow": ((7, 2), 4), "one token": ((1, 1), 3), "even": ((8, 8), 4),
}  # fmt: skip


def make(window: int, shifted: bool, **options: Any) -> WindowedAttention:
    values = OPTIONS | {"attention.pattern": {"name": "windows_2d", "window": window}} | options
    config = ModelConfig.from_dotted(**values)
    return move_parameters(WindowedAttention(config, make_initialiser(config), Windows2d(window, shifted)), 0.7)


def by_definition(module: WindowedAttention, x_HWD: Tensor, window: int, shifted: bool) -> Tensor:
    """Attention over the whole padded map, pair by pair of tokens; no roll, no windows, no region mask."""
    height, width, _ = x_HWD.shape
    m = min(window, height, width)
    shift = m // 2 if shifted and min(height, width) > window else 0
    x = F.pad(x_HWD, (0, 0, 0, -width % m, 0, -height % m))
    rows, columns = x.shape[:2]
    row, column = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
    cells = [(int(r - shift) // m, int(c - shift) // m) for r, c in zip(row, column, strict=True)]
    q, k, v = (
        F.linear(x.flatten(0, 1), w.weight, w.bias).unflatten(-1, (HEADS, -1))
        for w in (module.wq, module.wk, module.wv)
    )
    out = []
    for at in range(rows * columns):
        neighbours = [other for other in range(rows * columns) if cells[other] == cells[at]]
        down, right = (places[at] - places[neighbours] + window - 1 for places in (row, column))
        bias = module.position.weight[down * (2 * window - 1) + right].T
        scores = torch.einsum("nh,snh->ns", q[at], k[neighbours]) / (WIDTH // HEADS) ** 0.5 + bias
        out.append(torch.einsum("ns,snh->nh", scores.softmax(-1), v[neighbours]).flatten())
    y = torch.stack(out).unflatten(0, (rows, columns))[:height, :width]
    return F.linear(y, module.wo.weight, module.wo.bias)


@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
@pytest.mark.parametrize("name", MAPS)
def test_map_windows_are_cells(name: str, shifted: bool) -> None:
    (height, width), window = MAPS[name]
    module = make(window, shifted)
    x = draw(2, 3 * height * width, WIDTH).requires_grad_()
    positions = torch.arange(3 * height * width).expand(2, -1)
    actual = module(x, MapSequence.from_sequence(SequenceMetadata(positions), (height, width)))
    maps = x.unflatten(1, (3, height, width)).flatten(0, 1)
    expected = torch.stack([by_definition(module, first, window, shifted) for first in maps]).reshape(actual.shape)
    assert_same_gradients(actual, expected, [x, *module.parameters()], rtol=1e-11, atol=1e-11)


def test_pairs_are_those_of_map_windows() -> None:
    """Costs count the pairs within a window."""
    assert Windows2d(7).count_pairs(56 * 56) == 64 * 49**2
    assert Windows2d(7).count_pairs(16) == 16 * 16


def test_windowed_attention_drops_each_image_s_probabilities_otherwise() -> None:
    """Two equal images of a row, which without dropout have equal outputs."""
    module = make(3, True, **{"attention.dropout": 0.5}).train()
    row = draw(1, 20, WIDTH).repeat(1, 2, 1)
    sequence = SequenceMetadata(torch.arange(40).expand(1, -1), rng_keys=torch.tensor([1]))
    maps = MapSequence.from_sequence(sequence, (5, 4))
    first, second = module(row, maps).chunk(2, 1)
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(module(row, maps), module(row, maps))
    first, second = module.eval()(row, maps).chunk(2, 1)
    torch.testing.assert_close(first, second)
