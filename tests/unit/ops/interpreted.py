"""`python -m tests.unit.ops.interpreted`, with TRITON_INTERPRET=1: our Triton kernels on a CPU, against the references.

A process of its own, since Triton decides when it is imported whether it interprets.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from megatfm.ops import cross_entropy as module
from megatfm.ops import cross_entropy_triton
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy, cross_entropy_reference

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

    def in_place(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        strides.append(logits.stride())
        return cross_entropy_triton.to_gradients(logits, *args, **options)

    module._choose_kernel = lambda logits: in_place
    trained, targets = inputs(dtype)
    exact = [x.detach().double().requires_grad_() for x in trained]
    actual = cross_entropy(trained[0], trained[1], targets, trained[2], variant, chunk=5)
    expected = cross_entropy_reference(exact[0], exact[1], targets, exact[2], variant)
    assert abs(actual.item() / expected.item() - 1) < CLOSE[dtype], (dtype, variant, actual, expected)
    observed = torch.autograd.grad(actual * 0.5, trained)
    for a, b in zip(observed, torch.autograd.grad(expected * 0.5, exact), strict=True):
        assert (a.double() - b).norm() < CLOSE[dtype] * b.norm(), (dtype, variant)
    assert strides == [(module.ROW_ALIGNMENT, 1)] * 3


def check_no_number() -> None:
    """The loss of a target beyond the vocabulary is NaN."""
    logits, targets = torch.zeros(3, V), torch.tensor([V, -1, IGNORE])
    losses = cross_entropy_triton.to_gradients(logits, targets, ignore=IGNORE, softcap=None, smoothing=0.0)
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
    losses = cross_entropy_triton.to_gradients(logits, targets, ignore=IGNORE, softcap=None, smoothing=0.0)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    cross_entropy_triton.BLOCK = 16  # several blocks a row
    for dtype, variant in itertools.product(CLOSE, VARIANTS):
        check(dtype, variant)
    check_no_number()
    check_hidden_tokens()
    print("all alike")
