"""Our Triton kernels against the references, on a GPU or interpreted on a CPU.

`TRITON_INTERPRET=1 python -m tests.support.triton_kernels` is a process of its own, since Triton decides when it is
imported whether it interprets.
"""

import itertools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatfm.engines.interface import ShardLocation
from megatfm.ops import cross_entropy as module
from megatfm.ops import cross_entropy_triton
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, VocabularyShard, cross_entropy, cross_entropy_reference
from megatfm.optim import adamw_triton, optimizers
from megatfm.optim.optimizers import BF16StateAdamW

M, D, V = 13, 6, 45
VARIANTS = LogitOptions(), LogitOptions(2.5), LogitOptions(None, 0.1), LogitOptions(2.5, 0.1)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Hidden vectors, weights and biases; targets, some of which don't count."""
    generator = torch.Generator().manual_seed(1)
    trained = [torch.randn(shape, generator=generator).to(dtype) for shape in ((M, D), (V, D), (V,))]
    targets = torch.randint(0, V, (M,), generator=generator)
    targets[[0, 5, 12]] = IGNORE
    return [x.requires_grad_() for x in trained], targets


def check(dtype: torch.dtype, variant: LogitOptions) -> None:
    """Loss and gradients, through chunks whose rows are longer than the vocabulary; in bfloat16 logits and their
    gradients are rounded to it."""
    strides = []

    def choose(logits: Tensor) -> Any:
        strides.append(logits.stride())
        return cross_entropy_triton

    module._choose_kernels = choose
    trained, targets = inputs(dtype)
    exact = [x.detach().double().requires_grad_() for x in trained]
    actual = cross_entropy(trained[0], trained[1], targets, trained[2], variant, chunk=5)
    expected = cross_entropy_reference(exact[0], exact[1], targets, exact[2], variant)
    assert abs(actual.item() / expected.item() - 1) < CLOSE[dtype], (dtype, variant, actual, expected)
    observed = torch.autograd.grad(actual * 0.5, trained)
    for a, b in zip(observed, torch.autograd.grad(expected * 0.5, exact), strict=True):
        assert (a.double() - b).norm() < CLOSE[dtype] * b.norm(), (dtype, variant)
    assert strides == [(module.ROW_ALIGNMENT, 1)] * 3


BOUNDS = 0, 20, V
"""First rows of two shards of the vocabulary, and its end."""


def check_shards(
    kernels: Any, dtype: torch.dtype, variant: LogitOptions, hidden_shard: int | None, device: str = "cpu"
) -> None:
    """Two shards give the loss, and together the gradients, of the full vocabulary. Each runs twice: the first time,
    it leaves its statistics for the other. kernels: None for torch's operators. hidden_shard: one whose tokens a bias
    of −∞ hides."""
    module._choose_kernels = lambda logits: kernels
    trained, targets = inputs(dtype)
    trained, targets = [x.detach().to(device).requires_grad_() for x in trained], targets.to(device)
    if hidden_shard is not None:
        with torch.no_grad():
            trained[2][slice(*BOUNDS[hidden_shard : hidden_shard + 2])] = -torch.inf
        targets = targets.where(targets == IGNORE, BOUNDS[1 - hidden_shard])
    exact = [x.detach().double().requires_grad_() for x in trained]
    expected = cross_entropy_reference(exact[0], exact[1], targets, exact[2], variant)
    expected_gradients = torch.autograd.grad(expected * 0.5, exact)
    statistics: list[list[Tensor]] = [[], []]
    actual = []
    for is_exchanged in (False, True):
        for rank in range(2):
            rows = slice(*BOUNDS[rank : rank + 2])
            chunks = iter(range(3))

            def all_gather(values: Tensor, rank: int = rank, chunks: Any = chunks) -> Tensor:
                if not is_exchanged:  # noqa: B023
                    statistics[rank].append(values)
                    return torch.stack([values, values])
                at = next(chunks)
                return torch.stack([by_chunk[at] for by_chunk in statistics])

            local = [trained[0], *(x[rows].detach().requires_grad_() for x in trained[1:])]
            shard = VocabularyShard(BOUNDS[rank], V, all_gather)
            loss = cross_entropy(local[0], local[1], targets, local[2], variant, chunk=5, shard=shard)
            if is_exchanged:
                actual.append((loss, torch.autograd.grad(loss * 0.5, local)))
    (loss, gradients), (same_loss, other_gradients) = actual
    assert torch.equal(loss, same_loss)
    assert abs(loss.item() / expected.item() - 1) < CLOSE[dtype], (dtype, variant, loss, expected)
    joined = [gradients[0] + other_gradients[0], *map(torch.cat, zip(gradients[1:], other_gradients[1:], strict=True))]
    for a, b in zip(joined, expected_gradients, strict=True):
        assert (a.double() - b).norm() < CLOSE[dtype] * b.norm(), (dtype, variant)
    assert statistics[0][0].shape == (3 + (variant.smoothing > 0), 5, 1)


def check_no_number() -> None:
    """The loss of a target beyond the vocabulary is NaN."""
    logits, targets = torch.zeros(3, V), torch.tensor([V, -1, IGNORE])
    losses = cross_entropy_triton.to_gradients(logits, targets, LogitOptions())
    assert losses[:2].isnan().all()
    assert losses[2] == 0
    assert torch.equal(logits[2], torch.zeros(V))


def check_hidden_tokens() -> None:
    """Tokens that a bias of −∞ hides have no gradient, also where they fill the first blocks of a row."""
    generator = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(3, V, generator=generator), torch.tensor([V - 1, 40, 36])
    logits[:, : 2 * cross_entropy_triton.BLOCK + 3] = -torch.inf
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses = cross_entropy_triton.to_gradients(logits, targets, LogitOptions())
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-6, atol=1e-6)


def check_adamw(sizes: tuple[int, ...], offsets: tuple[int, ...], can_skip: bool, device: str = "cpu") -> None:
    """A shard of a weight, and its moments in bfloat16, after two steps: moments are rounded alike, on a CPU to the
    bit."""
    shape, generator = (7, 6, 5), torch.Generator().manual_seed(3)
    start, *gradients = (torch.randn(sizes, generator=generator).to(device) for _ in range(3))
    results = []
    for update in (None, adamw_triton.update):
        weight = start.clone()
        optimizer = BF16StateAdamW([{"params": [weight], "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
        optimizer.set_shard_locations({weight: ShardLocation("a", shape, offsets)})
        for found_inf, gradient in zip((0.0, float(can_skip)), gradients, strict=True):
            weight.grad = gradient
            if can_skip:
                vars(optimizer)["found_inf"] = torch.tensor(found_inf, device=device)
            with mock.patch.object(optimizers, "_choose_kernel", return_value=update):
                optimizer.step()
        results.append((weight, optimizer.state[weight]))
    (expected, expected_state), (actual, state) = results
    assert not torch.equal(actual, start)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        share = (state[name] == expected_state[name]).double().mean()
        assert share >= (1 if device == "cpu" else 0.99), (sizes, name)


SHARDED = (
    (torch.float32, VARIANTS[0], 0),
    (torch.float32, VARIANTS[0], 1),
    (torch.float32, VARIANTS[-1], None),
    (torch.bfloat16, VARIANTS[0], None),
)
"""Cases of `check_shards`: dtype, variant, and the shard that is hidden."""
BLOCKS = ((7, 6, 5), (0, 0, 0)), ((3, 6, 5), (4, 0, 0)), ((7, 2, 5), (0, 3, 0)), ((3, 2, 4), (2, 1, 1))
"""Cases of `check_adamw`: sizes and offsets."""


if __name__ == "__main__":
    cross_entropy_triton.BLOCK = 16  # several blocks a row
    for dtype, variant in itertools.product(CLOSE, VARIANTS):
        check(dtype, variant)
    for dtype, variant, hidden_shard in SHARDED:
        check_shards(cross_entropy_triton, dtype, variant, hidden_shard)
        check_shards(None, dtype, variant, hidden_shard)
    check_no_number()
    check_hidden_tokens()
    adamw_triton.BLOCK = 64
    for sizes, offsets in BLOCKS:
        check_adamw(sizes, offsets, can_skip=sizes[0] == 3)
    print("all alike")
