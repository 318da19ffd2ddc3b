"""Each collective and its adjoint: <f(x), y> = <x, fᵀ(y)> in float64, and the forms that its docstring names.

A product over the ranks is Σ_r <a_r, b_r>, where a pair of replicated tensors counts once. A partial tensor is drawn
anew on each rank, so that whoever forgets a sum is found out.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.config import ParallelConfig
from megatfm.ops.cross_entropy import LogitOptions, cross_entropy, cross_entropy_reference
from megatfm.parallel import collectives, styles
from megatfm.parallel.collectives import all_reduce_no_grad
from megatfm.parallel.styles import make_vocabulary_shard, vocab_parallel_embedding
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

Form = Literal["sharded", "replicated", "partial"]


class Forms(NamedTuple):
    """Forms of a collective's input and output, and of the gradient that comes back to its output."""

    source: Form
    result: Form
    gradient: Form
    cuts: bool
    """Whether it takes a dim."""

    @property
    def source_gradient(self) -> Form:
        """The dual of the source: <partial, replicated> and <sharded, sharded>; replicated inputs get their sum."""
        return "sharded" if self.source == "sharded" else "replicated"


COLLECTIVES = {
    "all_gather": Forms("sharded", "replicated", "partial", True),
    "reduce_scatter": Forms("partial", "sharded", "sharded", True),
    "reduce_from_group": Forms("partial", "replicated", "replicated", False),
    "copy_to_group": Forms("replicated", "replicated", "partial", False),
    "all_gather_replicated": Forms("sharded", "replicated", "replicated", True),
}


def draw(form: Form, shape: tuple[int, ...], seed: int) -> Tensor:
    rank = 0 if form == "replicated" else dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def product(a: Tensor, a_form: Form, b: Tensor, b_form: Form, group: ProcessGroup) -> float:
    local = torch.sum(a.detach() * b.detach())
    once = local / group.size() if (a_form, b_form) == ("replicated", "replicated") else local
    return float(all_reduce_no_grad(once, group))


def global_tensor(x: Tensor, form: Form, dim: int, group: ProcessGroup) -> Tensor:
    """The one tensor that the ranks' forms stand for, by all_gather alone."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous())
    if form == "replicated":
        assert all(torch.equal(part, parts[0]) for part in parts), "the ranks' replicas differ"
        return parts[0]
    return torch.cat(parts, dim) if form == "sharded" else torch.stack(parts).sum(0)


def check_adjoint(name: str, dim: int) -> None:
    group, forms = dist.group.WORLD, COLLECTIVES[name]
    assert group is not None
    function: Callable[..., Tensor] = getattr(collectives, name)
    f = partial(function, dim=dim, group=group) if forms.cuts else partial(function, group=group)
    x = draw(forms.source, (6, 6, 2), seed=1).requires_grad_()
    result = f(x)
    y = draw(forms.gradient, tuple(result.shape), seed=2)
    (x_gradient,) = torch.autograd.grad(result, x, y)
    assert x_gradient.shape == x.shape
    left = product(result, forms.result, y, forms.gradient, group)
    right = product(x, forms.source, x_gradient, forms.source_gradient, group)
    assert left == pytest.approx(right, rel=1e-12)
    assert abs(left) > 0.1
    # The forward pass only moves and sums, so the global tensor is the same before and after.
    before, after = (global_tensor(t, form, dim, group) for t, form in ((x, forms.source), (result, forms.result)))
    torch.testing.assert_close(after, before, rtol=1e-14, atol=1e-14)
    # Neither does the gradient change on its way back.
    before, after = (
        global_tensor(t, form, dim, group) for t, form in ((y, forms.gradient), (x_gradient, forms.source_gradient))
    )
    torch.testing.assert_close(after, before, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "dim"), [(name, dim) for name, forms in COLLECTIVES.items() for dim in range(2 if forms.cuts else 1)]
)
def test_a_collective_s_backward_is_its_adjoint(workers: Workers, name: str, dim: int, ranks: int) -> None:
    workers.run(check_adjoint, ranks, name, dim)


VOCABULARY, WIDTH, TOKENS = 12, 5, 17


def select_rank_rows(table: Tensor) -> Tensor:
    """This rank's rows."""
    return table.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


def check_embedding() -> None:
    group = dist.group.WORLD
    assert group is not None
    table = draw("replicated", (VOCABULARY, WIDTH), seed=1).requires_grad_()
    shard = select_rank_rows(table.detach())
    tokens = torch.arange(2 * VOCABULARY).remainder(VOCABULARY).view(3, -1)
    y = draw("replicated", (*tokens.shape, WIDTH), seed=2)
    vectors = vocab_parallel_embedding(tokens, shard, group.rank() * len(shard))
    torch.testing.assert_close(all_reduce_no_grad(vectors.detach(), group), table[tokens].detach(), rtol=0, atol=0)
    torch.autograd.backward([vectors, table[tokens]], [y, y])
    torch.testing.assert_close(shard.grad, select_rank_rows(table.grad).detach(), rtol=1e-14, atol=0)


def check_cross_entropy(chunk: int, scale: float, variant: LogitOptions, with_bias: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    table = (scale * draw("replicated", (VOCABULARY, WIDTH), seed=1)).requires_grad_()
    hidden = draw("replicated", (TOKENS, WIDTH), seed=2).requires_grad_()
    bias = draw("replicated", (VOCABULARY, 1), seed=3)[:, 0].detach().requires_grad_() if with_bias else None
    targets = torch.arange(TOKENS).remainder(VOCABULARY)
    targets[::5] = -100
    expected = cross_entropy_reference(hidden, table, targets, bias, variant)
    shard, hidden_here = select_rank_rows(table.detach()), hidden.detach().clone().requires_grad_()
    own_bias = None if bias is None else select_rank_rows(bias.detach())
    vocabulary_shard = make_vocabulary_shard(group.rank() * len(shard), VOCABULARY, group)
    compute_loss = partial(cross_entropy, chunk=chunk, shard=vocabulary_shard)
    loss = compute_loss(hidden_here, shard, targets, own_bias, variant)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.autograd.backward([loss, expected], [torch.tensor(0.5).double()] * 2)
    torch.testing.assert_close(shard.grad, select_rank_rows(table.grad).detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(all_reduce_no_grad(hidden_here.grad, group), hidden.grad, rtol=1e-11, atol=1e-12)
    if bias is not None and own_bias is not None:
        torch.testing.assert_close(own_bias.grad, select_rank_rows(bias.grad).detach(), rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        repeated = compute_loss(hidden, shard, targets, own_bias, variant)
    assert torch.equal(repeated, loss)
    none = torch.full_like(targets, -100)
    nothing = compute_loss(hidden_here, shard, none, own_bias, variant)
    gradients = torch.autograd.grad(nothing, [hidden_here, shard])
    assert float(nothing.detach()) == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients)


def list_chunk_rows() -> list[int]:
    """Rows of the vocabulary by which this rank chooses the chunks of its loss."""
    rows: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(styles, "choose_chunk", lambda _, n_rows: rows.append(n_rows) or 1024)  # type: ignore[func-returns-value]
        engine = build_engine(UNTIED_MODEL.with_changes({"vocab_size": 99}), ParallelConfig(tp=2, dp_shard=1))
        engine.forward_backward(microbatches(engine, global_batch(seed=0)), CAUSAL)
    assert len(engine.model.get_parameter("head.weight")) == 50 - dist.get_rank()
    return rows


def test_ranks_of_an_uneven_vocabulary_take_the_same_chunks(workers: Workers) -> None:
    """Each chunk is a collective, and a GPU's chunk depends on the rows."""
    first, second = workers.run(list_chunk_rows, 2)
    assert first == second
    assert set(first) == {50}


@pytest.mark.parametrize("ranks", [2, 3])
def test_embedding_cut_by_tokens(workers: Workers, ranks: int) -> None:
    workers.run(check_embedding, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("chunk", "scale"), [(4, 1.0), (17, 1.0), (512, 400.0)])  # 400: exp would overflow
@pytest.mark.parametrize(
    ("variant", "with_bias"),
    [(LogitOptions(), False), (LogitOptions(softcap=1.5, smoothing=0.1), True)],
    ids=["plain", "bias, soft cap and smoothing"],
)
def test_cross_entropy_cut_by_tokens(
    workers: Workers, ranks: int, chunk: int, scale: float, variant: LogitOptions, with_bias: bool
) -> None:
    workers.run(check_cross_entropy, ranks, chunk, scale, variant, with_bias)
