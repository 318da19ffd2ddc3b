"""A backward pass in two parts gives the gradients of one, each exactly once, and the first part doesn't wait."""

import pytest
import torch
from torch import Tensor, nn

from megatfm.engines.passes import backward_input

WIDTH = 6


class Parts(nn.Module):
    """What a stage may hold: layers on the way, one that is used twice, a bias that several steps share, and a loss
    that doesn't depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Embedding(3, WIDTH)
        self.aside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = self.bias(torch.arange(3)).tanh().sum(0)
        y = torch.tanh(self.first(x) + shared)
        y = self.twice(torch.tanh(self.twice(y)))
        y = y + self.second(memory * y) + shared
        return y, (memory * 2).sin(), self.aside(torch.ones(2, WIDTH, dtype=x.dtype)).sum()


@pytest.fixture
def parts() -> Parts:
    torch.manual_seed(0)
    return Parts().double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, memory = torch.randn(2, 2, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), memory.requires_grad_()


def gradients(parts: Parts) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in parts.named_parameters() if p.grad is not None}


def test_the_parts_of_a_backward_pass_make_up_the_whole(parts: Parts) -> None:
    x, memory = inputs()
    y, z, loss = parts(x, memory)
    into_y, into_z = torch.full_like(y, 0.5), torch.full_like(z, -0.25)
    torch.autograd.backward([y, z, loss], [into_y, into_z, None])
    assert x.grad is not None
    assert memory.grad is not None
    expected = gradients(parts), x.grad.clone(), memory.grad.clone()
    parts.zero_grad()

    x, memory = inputs()
    y, z, loss = parts(x, memory)
    later = backward_input([y, z, loss], [into_y, into_z, None], [x, memory])
    torch.testing.assert_close((x.grad, memory.grad), expected[1:], rtol=1e-13, atol=0)
    at_once = gradients(parts).keys()
    assert {"twice.weight", "bias.weight", "aside.0.weight"} <= at_once
    assert not {"first.weight", "second.weight", "second.bias"} & at_once, "these can wait"
    later()
    torch.testing.assert_close(gradients(parts), expected[0], rtol=1e-12, atol=1e-15)


def test_micro_batches_add_up(parts: Parts) -> None:
    x, memory = inputs()
    parts(x, memory)[0].sum().backward()
    once = gradients(parts)
    parts.zero_grad()
    laters = []
    for _ in range(3):
        x, memory = inputs()
        laters.append(backward_input([parts(x, memory)[0].sum()], [None], [x, memory]))
    for later in laters:
        later()
    torch.testing.assert_close(
        gradients(parts), {name: 3 * g for name, g in once.items()}, rtol=1e-12, atol=1e-15
    )


def test_a_stage_without_inputs_does_all_of_it_later(parts: Parts) -> None:
    loss = parts.aside(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    later = backward_input([loss], [None], [])
    assert gradients(parts) == {}
    later()
    assert gradients(parts).keys() == {f"aside.{i}.{key}" for i in (0, 2) for key in ("weight", "bias")}
