"""Disentangled attention against the sums of its paper, written out pair by pair."""

import math
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention import ATTENTIONS
from megatfm.layers.attention.deberta import assign_log_buckets
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build

K, T, D, N = 3, 9, 12, 2
CONFIG = ModelConfig(
    family="encoder",
    vocab_size=23,
    d_model=D,
    n_layers=2,
    attention={"name": "deberta", "n_heads": N},
    ffn={"d_ff": 20, "activation": "gelu"},
    norm={"name": "layer_norm", "placement": "post"},
    position={"name": "deberta", "max_distance": K},
)


BUCKETS, FARTHEST = 4, 7
SHARED = CONFIG.with_changes(
    {
        "attention.name": "deberta_v2", "position.name": "deberta_v2", "position.buckets": BUCKETS,
        "position.max_distance": FARTHEST,
    }
)  # fmt: skip


def moved(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    module = module.double()
    for parameter in module.parameters():
        parameter.data = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def delta(i: int, j: int) -> int:
    """He et al. 2021, equation 3."""
    if i - j <= -K:
        return 0
    return 2 * K - 1 if i - j >= K else i - j + K


def by_pairs(
    attention: torch.nn.Module,
    x_TD: Tensor,
    table_RD: Tensor,
    documents: list[int],
    delta: Callable[[int, int], int],
) -> Tensor:
    """He et al. 2021, equation 4, for one row and head by head; only tokens of one document see one another.

    But the position in position-to-content is δ(i, j), as in the released code, where the paper has δ(j, i).
    """
    h = D // N
    q, k, v = (projection(x_TD) for projection in (attention.wq, attention.wk, attention.wv))
    shared = not hasattr(attention, "wq_position")
    q_r = (attention.wq if shared else attention.wq_position)(table_RD)
    k_r = (attention.wk if shared else attention.wk_position)(table_RD)
    out = []
    for head in range(N):
        part = slice(head * h, (head + 1) * h)
        rows = []
        for i in range(T):
            seen = [j for j in range(T) if documents[j] == documents[i]]
            scores = torch.stack(
                [
                    q[i, part] @ k[j, part]
                    + q[i, part] @ k_r[delta(i, j), part]
                    + k[j, part] @ q_r[delta(i, j), part]
                    for j in seen
                ]
            ) / math.sqrt(3 * h)
            rows.append(scores.softmax(0) @ v[seen][:, part])
        out.append(torch.stack(rows))
    return attention.wo(torch.cat(out, dim=-1))


def bucket(i: int, j: int) -> int:
    """The row that transformers' DeBERTa v2 reads for query i and key j."""
    distance = torch.tensor(i - j)
    return int(make_log_bucket_position(distance, BUCKETS, FARTHEST).clamp(-BUCKETS, BUCKETS - 1)) + BUCKETS


@pytest.mark.parametrize(("n", "farthest"), [(256, 512), (6, 15), (4, 5), (32, 128)])
def test_buckets_are_those_of_the_released_code(n: int, farthest: int) -> None:
    distances = torch.arange(1 - 2 * farthest, 2 * farthest)
    actual, reference = (
        assign_log_buckets(distances, n, farthest),
        make_log_bucket_position(distances, n, farthest),
    )
    assert torch.equal(actual, reference.long())
    assert actual.dtype == torch.int64
    assert actual[distances.abs() < farthest].abs().max() < n


@pytest.mark.parametrize(("config", "rows"), [(CONFIG, delta), (SHARED, bucket)], ids=["own", "shared"])
def test_values_and_gradients(config: ModelConfig, rows: Callable[[int, int], int]) -> None:
    attention = moved(ATTENTIONS.get(config.attention.name)(config, make_initialiser(config), Full()))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(
        2 * (K if config is CONFIG else BUCKETS),
        D,
        generator=generator,
        dtype=torch.float64,
        requires_grad=True,
    )
    weights = torch.randn(2, T, D, generator=generator, dtype=torch.float64)
    documents = [[0] * 4 + [1] * 3 + [-1] * 2, [0] * T]
    sequence = SequenceMetadata(torch.arange(T).expand(2, T), torch.tensor(documents))
    actual = attention(x, sequence, table)
    expected = torch.stack(
        [by_pairs(attention, row, table, where, rows) for row, where in zip(x, documents, strict=True)]
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, table, *attention.parameters()]
    one = torch.autograd.grad((actual * weights).sum(), inputs)
    other = torch.autograd.grad((expected * weights).sum(), inputs)
    for mine, reference in zip(one, other, strict=True):
        assert reference.norm() > 1e-3 or mine.shape == (D,)
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


def test_the_table_is_one_for_all_layers_and_gets_all_their_gradients() -> None:
    model = moved(build(CONFIG))
    tables = [name for name, p in model.named_parameters() if tuple(p.shape) == (2 * K, D)]
    assert len(tables) == 1
    tokens = torch.randint(0, 23, (2, T), generator=torch.Generator().manual_seed(4))
    gradients = []
    for kept in ("01", "0", "1"):
        model.zero_grad()
        for name, block in model.encoder.layers.items():
            for part in ("wq_position", "wk_position"):
                getattr(block.attn, part).requires_grad_(name in kept)
        hooks = [
            block.attn.register_forward_pre_hook(
                lambda _, inputs: (*inputs[:2], inputs[2].detach(), *inputs[3:])
            )
            for name, block in model.encoder.layers.items()
            if name not in kept
        ]
        model(tokens).hidden.square().sum().backward()
        gradients.append(model.get_parameter(tables[0]).grad.clone())
        for hook in hooks:
            hook.remove()
    both, first, second = gradients
    assert first.norm() > 1e-3
    assert second.norm() > 1e-3
    torch.testing.assert_close(both, first + second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [{"position.name": "none"}, {"family": "decoder"}, {"position.name": "rope", "family": "decoder"}],
)
def test_deberta_needs_its_own_positions_and_sees_all(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"needs model\.position\.name = 'deberta' and family = 'encoder'"):
        build(CONFIG.with_changes(change))


@pytest.mark.parametrize("change", [{"position.name": "deberta"}, {"family": "decoder"}])
def test_the_shared_one_needs_buckets(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"needs model\.position\.name = 'deberta_v2' and family ="):
        build(SHARED.with_changes(change))


def test_buckets_that_leave_no_room_are_refused() -> None:
    """Before anything is built; the least that passes gives distances an order of buckets."""
    with pytest.raises(ValidationError, match=r"max_distance = 3 .*buckets = 8: choose 6 or more"):
        SHARED.with_changes({"position.buckets": 8, "position.max_distance": 3})
    SHARED.with_changes({"position.buckets": 8, "position.max_distance": 6})
    assert (assign_log_buckets(torch.arange(-40, 40), 8, 6).diff() >= 0).all()
