"""Moments in bfloat16 with stochastic rounding, and the moving average of weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OptimizerSection,
    ScheduleFreeConfig,
    SoapConfig,
)
from megatfm.engines.interface import ShardLocation
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.errors import UsageError
from megatfm.ops.keyed_random import BF16_STEPS, hash_elements, stochastic_round
from megatfm.optim import optimizers
from megatfm.optim.optimizers import BF16StateAdamW
from megatfm.optim.parameters import build_optimizer_groups

BETAS = (0.9, 0.999)


@pytest.mark.parametrize("value", [1.0, 1.003, -0.3, 1e-30, 1e-41, 0.0, 3.0e38])
def test_stochastic_rounding_is_unbiased_and_between_neighbours(value: float) -> None:
    exact = torch.tensor(value)
    rounded = stochastic_round(exact.expand(BF16_STEPS).contiguous(), torch.arange(BF16_STEPS))
    assert rounded.double().mean().item() == exact.double().item()
    neighbours = rounded.unique()
    assert len(neighbours) == (1 if exact.bfloat16().float() == exact else 2)
    assert int(neighbours[-1:].view(torch.int16) - neighbours[:1].view(torch.int16)) in (0, 1, -1)


def test_hashes_of_a_shard_are_a_slice_of_the_full_tensor_s() -> None:
    shape, cpu = (7, 5, 3), torch.device("cpu")
    full = hash_elements(11, shape, (0, 0, 0), shape, cpu)
    assert torch.equal(hash_elements(11, shape, (2, 1, 0), (4, 3, 3), cpu), full[2:6, 1:4])
    assert full.unique().numel() == full.numel()
    assert not torch.isin(hash_elements(12, shape, (0, 0, 0), shape, cpu), full).any()


def run_steps(
    weight: Tensor, gradients: list[Tensor], location: ShardLocation | None, **options: Any
) -> BF16StateAdamW:
    optimizer = BF16StateAdamW([{"params": [weight], **options}], lr=1e-2, betas=BETAS, eps=1e-8)
    if location:
        optimizer.set_shard_locations({weight: location})
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return optimizer


def test_updates_with_bf16_moments_equal_torch_adamw() -> None:
    """To the bit in the first step, whose moments begin at 0; later as far as bfloat16 goes."""
    start, random = torch.randn(40, 30), torch.Generator().manual_seed(0)
    gradients = [torch.randn(40, 30, generator=random) for _ in range(5)]
    for n in (1, 5):
        actual, expected = start.clone(), start.clone()
        optimizer = run_steps(actual, gradients[:n], None, weight_decay=0.1)
        torch_optimizer = torch.optim.AdamW([expected], lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1, fused=True)
        largest: dict[str, Tensor] = {}
        for gradient in gradients[:n]:
            expected.grad = gradient.clone()
            torch_optimizer.step()
            for key in ("exp_avg", "exp_avg_sq"):
                moment = torch_optimizer.state[expected][key].abs()
                largest[key] = torch.maximum(largest.get(key, moment), moment)
        # An update is the rate times m/√v, and a moment is off by 2⁻⁷ of itself for each step that it has gone through.
        assert (actual - expected).abs().max() <= 1e-2 * 2**-7 * n * (n - 1)
        for key in ("exp_avg", "exp_avg_sq"):
            moment, torch_moment = optimizer.state[actual][key], torch_optimizer.state[expected][key]
            assert moment.dtype == torch.bfloat16
            # Each rounding moves a moment by at most one bfloat16 step of its value at that time.
            assert ((moment - torch_moment).abs() <= 1.1 * n * 2**-7 * largest[key]).all()


def test_running_means_follow_updates_below_half_a_bf16_step() -> None:
    weight = torch.zeros(4096)
    optimizer = run_steps(weight, [torch.ones(4096)], None)
    square = optimizer.state[weight]["exp_avg_sq"]
    square.fill_(1.0)
    for _ in range(300):
        weight.grad = torch.full((4096,), 1.2)
        optimizer.step()
    assert (0.999 * square.new_ones(()) + 0.001 * 1.44).bfloat16() == 1  # to the nearest, it would stay
    expected = 1.44 - 0.44 * 0.999**300
    assert square.float().mean().item() == pytest.approx(expected, abs=0.01)


def test_chunks_and_shards_are_updated_as_the_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradients = torch.randn(9, 8), [torch.randn(9, 8) for _ in range(3)]
    full = start.clone()
    optimizer_state = run_steps(full, gradients, ShardLocation("a", (9, 8), (0, 0))).state[full]
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 20)
    block = start[3:, 2:7].clone()
    block_state = run_steps(block, [g[3:, 2:7] for g in gradients], ShardLocation("a", (9, 8), (3, 2))).state[block]
    assert torch.equal(block, full[3:, 2:7])
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(block_state[key], optimizer_state[key][3:, 2:7])
    renamed = start.clone()
    run_steps(renamed, gradients, ShardLocation("b", (9, 8), (0, 0)))
    assert not torch.equal(renamed, full), "rounding depends on the parameter's name"


def test_a_scalar_is_updated_as_a_vector_of_one() -> None:
    scalar, vector = torch.tensor(0.5), torch.tensor([0.5])
    for gradient in (0.3, -0.1):
        run_steps(scalar, [torch.tensor(gradient)], None, weight_decay=0.1)
        run_steps(vector, [torch.tensor([gradient])], None, weight_decay=0.1)
    assert torch.equal(scalar[None], vector)
    assert scalar != 0.5


# ----------------------------------------------------------------------------------- moving average of weights


DECAY = 0.8


class LinearModel(nn.Module):
    """A matrix and a bias, and a block of the same."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5).double()
        self.layers = nn.ModuleList([nn.Linear(5, 4).double()])


AVERAGED = (AdamWConfig, LionConfig, MuonConfig, SoapConfig, AdafactorConfig, LambConfig)


@pytest.mark.parametrize("config", [section(lr=0.1, ema_decay=DECAY) for section in AVERAGED])
def test_weight_averages_equal_their_formula(config: OptimizerSection) -> None:
    """From the weights after the first step on; a skipped step moves nothing; the weights are the optimizer's own."""
    model = LinearModel()
    without = copy.deepcopy(model)
    groups = [build_optimizer_groups(c, model)[0] for c in (config.model_copy(update={"ema_decay": None}), config)]
    names = groups[0].names  # matrices of blocks, or all
    plain, averaged = (
        ElementwiseOptimizer(group, {name: m.get_parameter(name) for name in names})
        for group, m in zip(groups, (without, model), strict=True)
    )
    assert averaged.averaged() == {}
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        shapes = {name: model.get_parameter(name).shape for name in names}
        gradients = {name: torch.randn(shapes[name], generator=generator, dtype=torch.float64) for name in names}
        for optimizer in (plain, averaged):
            optimizer.step({name: gradient.clone() for name, gradient in gradients.items()}, 0.1)
        for name in names:
            weight = model.get_parameter(name)
            assert torch.equal(weight, without.get_parameter(name))
            before = expected.get(name, weight.detach())
            expected[name] = DECAY * before + (1 - DECAY) * weight.detach()
    torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)
    if averaged.can_skip:
        averaged.step({name: torch.full_like(e, torch.inf) for name, e in expected.items()}, 0.1, torch.ones(()))
        torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("config", "reason"), [
    (MuonConfig(lr=0.1, ema_decay=DECAY, moments_dtype="bf16"), "moments_dtype"),
    (ScheduleFreeConfig(lr=0.1, ema_decay=DECAY), "averages weights itself"),
    (AdamWConfig(lr=0.1, ema_decay=DECAY, moments_dtype="bf16"), "moments_dtype"),
])  # fmt: skip
def test_weight_averages_are_refused_where_they_cannot_be_kept(config: OptimizerSection, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        build_optimizer_groups(config, LinearModel())
