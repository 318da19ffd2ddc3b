"""Memory-compressed attention against the definition, one document and one head at a time."""

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.cost import TokenCounts, compute_module_cost
from megatfm.errors import UsageError
from megatfm.layers.attention.memory_compressed import MemoryCompressedPattern
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.block import Block
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.ops.attention import block_sparse, kernels
from tests.support.reference_gradients import perturb
from tests.support.tensors import draw

LENGTH, HEADS, WIDTH = 29, 3, 12
DOCUMENTS = torch.tensor([[0] * 1 + [1] * 13 + [2] * 9 + [3] * 2 + [-1] * 4, [0] * 29])


def config_of(factor: int, **changes: object) -> ModelConfig:
    return ModelConfig.from_dotted(
        {"vocab_size": 7, "d_model": WIDTH, "n_layers": 1, "attention.name": "compressed", "attention.n_heads": HEADS,
         "attention.factor": factor, "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes},
    )  # fmt: skip


def convolved(weight_FHHN: Tensor, x_TNH: Tensor, head: int) -> list[Tensor]:
    """The first token, and what torch's strided convolution makes of one head's keys or values."""
    kernel = weight_FHHN[..., head].permute(2, 1, 0)  # [H out, H in, F]
    result = nn.functional.conv1d(x_TNH[:, head].T[None], kernel, stride=len(weight_FHHN))[0].T
    return [x_TNH[0, head], *result]


def written_out(layer: nn.Module, x: Tensor, factor: int) -> Tensor:
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
def test_output_and_every_gradient(factor: int, packed: bool, by_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Block(config_of(factor), "decoder").attn.double()
    perturb(layer, scale=0.5)
    x, y = (draw(2, LENGTH, WIDTH, seed=seed) for seed in (0, 1))
    documents = DOCUMENTS if packed else torch.zeros(2, LENGTH, dtype=torch.int64)
    sequence = SequenceMetadata(torch.arange(LENGTH).expand(2, -1), DOCUMENTS if packed else None)
    expected = torch.zeros_like(x)
    for row in range(2):
        for document in documents[row].unique():
            at = documents[row] == document
            expected[row, at] = written_out(layer, x[row, at], factor)
    right = torch.autograd.grad((expected * y).sum(), list(layer.parameters()))
    monkeypatch.setattr(kernels, "LONG", 1 if by_blocks else 1024)
    monkeypatch.setattr(block_sparse, "SIZE", 4)
    monkeypatch.setattr(block_sparse, "MAX_SCORES", 200)
    result = layer(x, sequence)
    actual = torch.autograd.grad((result * y).sum(), list(layer.parameters()))
    torch.testing.assert_close(result, expected)
    largest = max(gradient.norm() for gradient in right)
    for a, b in zip(actual, right, strict=True):
        assert (a - b).norm() <= 1e-12 * largest


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
        build(config_of(3, **changes))


def test_memory_compressed_attention_costs_matrices_and_pairs() -> None:
    cost = compute_module_cost(Block(config_of(4), "decoder").attn, TokenCounts(LENGTH))
    n_pairs = MemoryCompressedPattern(4).count_pairs(LENGTH)
    assert cost.attention_macs == cost.visible_attention_macs == 2 * WIDTH * n_pairs
    assert cost.matmul_macs == LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // HEADS)


def test_prefixes_are_refused() -> None:
    layer = Block(config_of(3), "decoder").attn
    sequence = SequenceMetadata(torch.arange(5)[None], prefix=torch.arange(5)[None] < 2)
    with pytest.raises(UsageError, match=r"all tokens of a document see its prefix: use objective\.name = 'causal'"):
        layer(torch.zeros(1, 5, WIDTH), sequence)
