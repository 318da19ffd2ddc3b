"""Learning rates, moments in bfloat16, and the moving average of weights."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from megatfm.config import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerSection,
    ParallelConfig,
    PluginSchedule,
    ScheduleConfig,
    ScheduleFreeConfig,
)
from megatfm.engines.interface import ShardLocation
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.errors import UsageError
from megatfm.ops.keyed_random import BF16_STEPS, hash_elements, stochastic_round
from megatfm.optim import optimizers
from megatfm.optim.lr_schedules import compute_schedule_factor
from megatfm.optim.optimizers import BF16StateAdamW
from megatfm.optim.parameters import build_optimizer_groups
from tests.support.image_models import IMAGE_MODELS, ImageObjective, image_model_batch
from tests.support.parity import build_engine, microbatches, one_device_reference
from tests.support.workers import Workers

SECTION: TypeAdapter[Any] = TypeAdapter(ScheduleConfig)


def factors(steps: int, **config: object) -> list[float]:
    schedule = SECTION.validate_python(config)
    return [compute_schedule_factor(schedule, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedule_starts_and_ends_at_its_rates(name: str, warmup: int) -> None:
    rates = factors(20, name=name, warmup_steps=warmup, min_lr_factor=0.1)
    if warmup:
        assert rates[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    assert rates[warmup] == 1.0, "the first step after warm-up"
    assert rates[-1] == pytest.approx(0.1)
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_a_warm_up_as_long_as_the_run_and_runs_of_a_step(name: str) -> None:
    assert factors(4, name=name, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(1, name=name, warmup_steps=1) == [1.0]
    if name != "inverse_sqrt":
        assert factors(1, name=name) == [1.0]
        assert factors(2, name=name, warmup_steps=1) == [1.0, 1.0]


def test_a_constant_rate() -> None:
    assert factors(5, name="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def with_torch(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_equal_those_of_torch() -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1.0)

    steps, warmup, final = 30, 6, 0.2
    sgd = optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its own parts in a deprecated way
        rise = LambdaLR(sgd, lambda step: (step + 1) / warmup)
        fall = CosineAnnealingLR(sgd, T_max=steps - warmup - 1, eta_min=final)
        cosine = with_torch(sgd, SequentialLR(sgd, [rise, fall], [warmup]), steps)
    assert factors(steps, name="cosine", warmup_steps=warmup, min_lr_factor=final) == pytest.approx(cosine)
    sgd = optimizer()
    linear = with_torch(sgd, LinearLR(sgd, 1.0, final, total_iters=steps - 1), steps)
    assert factors(steps, name="linear", min_lr_factor=final) == pytest.approx(linear)


def test_the_cosine_and_the_line_in_closed_form() -> None:
    cosine, line = (factors(5, name=name, min_lr_factor=0.1) for name in ("cosine", "linear"))
    assert cosine == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)])
    assert line == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])


def test_the_inverse_root_is_the_transformer_s_own() -> None:
    """d^-½ · min(s^-½, s · w^-1.5), with lr = (d·w)^-½ for d = 512."""
    warmup, width = 40, 512
    lr = (width * warmup) ** -0.5
    expected = [width**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, 201)]
    rates = [lr * rate for rate in factors(200, name="inverse_sqrt", warmup_steps=warmup)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
@pytest.mark.parametrize("final", [0.0, 0.25])
def test_warm_up_stable_decay_in_closed_form(shape: str, final: float) -> None:
    rates = factors(50, name="wsd", warmup_steps=5, decay_ratio=0.2, decay_type=shape, min_lr_factor=final)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:40] == [1.0] * 35
    parts = [(i + 1) / 10 for i in range(10)]
    fall = [1 - t if shape == "linear" else 1 - t**0.5 for t in parts]
    assert rates[40:] == pytest.approx([final + (1 - final) * f for f in fall], abs=1e-12)


def test_a_longer_wsd_run_shares_the_stable_part() -> None:
    short, long = (factors(steps, name="wsd", warmup_steps=5) for steps in (50, 100))
    assert short[:40] == long[:40]
    assert long[79] == 1.0 > long[80]


def test_an_unknown_schedule_does_not_wait_for_the_end_of_warm_up() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule 'cosin' \(did you mean 'cosine'\?\)"):
        compute_schedule_factor(PluginSchedule(name="cosin", warmup_steps=5), 1, 10)


# ---------------------------------------------------------------------------------------- moments in bfloat16


BETAS = (0.9, 0.999)


@pytest.mark.parametrize("value", [1.0, 1.003, -0.3, 1e-30, 1e-41, 0.0, 3.0e38])
def test_over_all_chances_the_mean_is_the_value(value: float) -> None:
    exact = torch.tensor(value)
    rounded = stochastic_round(exact.expand(BF16_STEPS).contiguous(), torch.arange(BF16_STEPS))
    assert rounded.double().mean().item() == exact.double().item()
    ends = rounded.unique()
    assert len(ends) == (1 if exact.bfloat16().float() == exact else 2)
    assert int(ends[-1:].view(torch.int16) - ends[:1].view(torch.int16)) in (0, 1, -1)  # neighbours


def test_a_block_s_hashes_are_those_of_its_place_in_the_whole() -> None:
    shape, cpu = (7, 5, 3), torch.device("cpu")
    full = hash_elements(11, shape, (0, 0, 0), shape, cpu)
    assert torch.equal(hash_elements(11, shape, (2, 1, 0), (4, 3, 3), cpu), full[2:6, 1:4])
    assert full.unique().numel() == full.numel()
    assert not torch.isin(hash_elements(12, shape, (0, 0, 0), shape, cpu), full).any()


def stepped(weight: Tensor, gradients: list[Tensor], place: ShardLocation | None, **options: Any) -> BF16StateAdamW:
    optimizer = BF16StateAdamW([{"params": [weight], **options}], lr=1e-2, betas=BETAS, eps=1e-8)
    if place:
        optimizer.set_shard_locations({weight: place})
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return optimizer


def test_the_arithmetic_is_that_of_torch_s_adamw() -> None:
    """To the bit in the first step, whose moments begin at 0; later as far as bfloat16 goes."""
    start, random = torch.randn(40, 30), torch.Generator().manual_seed(0)
    gradients = [torch.randn(40, 30, generator=random) for _ in range(5)]
    for n in (1, 5):
        actual, expected = start.clone(), start.clone()
        optimizer = stepped(actual, gradients[:n], None, weight_decay=0.1)
        torch_s = torch.optim.AdamW([expected], lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1, fused=True)
        largest: dict[str, Tensor] = {}
        for gradient in gradients[:n]:
            expected.grad = gradient.clone()
            torch_s.step()
            for key in ("exp_avg", "exp_avg_sq"):
                now = torch_s.state[expected][key].abs()
                largest[key] = torch.maximum(largest.get(key, now), now)
        # An update is the rate times m/√v, and a moment is off by 2⁻⁷ of itself for each step that it has gone through.
        assert (actual - expected).abs().max() <= 1e-2 * 2**-7 * n * (n - 1)
        for key in ("exp_avg", "exp_avg_sq"):
            moment, torch_moment = optimizer.state[actual][key], torch_s.state[expected][key]
            assert moment.dtype == torch.bfloat16
            # A step of bfloat16 at each rounding, of what was there then.
            assert ((moment - torch_moment).abs() <= 1.1 * n * 2**-7 * largest[key]).all()


def test_a_long_mean_moves_though_each_step_is_less_than_half_of_bfloat16_s() -> None:
    weight = torch.zeros(4096)
    optimizer = stepped(weight, [torch.ones(4096)], None)
    square = optimizer.state[weight]["exp_avg_sq"]
    square.fill_(1.0)
    for _ in range(300):
        weight.grad = torch.full((4096,), 1.2)
        optimizer.step()
    assert (0.999 * square.new_ones(()) + 0.001 * 1.44).bfloat16() == 1  # to the nearest, it would stay
    expected = 1.44 - 0.44 * 0.999**300
    assert square.float().mean().item() == pytest.approx(expected, abs=0.01)


def test_pieces_and_blocks_are_moved_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradients = torch.randn(9, 8), [torch.randn(9, 8) for _ in range(3)]
    full = start.clone()
    optimizer_state = stepped(full, gradients, ShardLocation("a", (9, 8), (0, 0))).state[full]
    monkeypatch.setattr(optimizers, "CHUNK_ELEMENTS", 20)
    block = start[3:, 2:7].clone()
    state_of_block = stepped(block, [g[3:, 2:7] for g in gradients], ShardLocation("a", (9, 8), (3, 2))).state[block]
    assert torch.equal(block, full[3:, 2:7])
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state_of_block[key], optimizer_state[key][3:, 2:7])
    other = start.clone()
    stepped(other, gradients, ShardLocation("b", (9, 8), (0, 0)))
    assert not torch.equal(other, full), "every parameter has chances of its own"


# ----------------------------------------------------------------------------------------- average of weights


DECAY = 0.8


class Plain(nn.Module):
    """A matrix and a bias."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5).double()


@pytest.mark.parametrize("config", [AdamWConfig(lr=0.1, ema_decay=DECAY), LionConfig(lr=0.1, ema_decay=DECAY)])
def test_the_average_is_its_formula(config: OptimizerSection) -> None:
    """From the weights after the first step on; a skipped step moves nothing; the weights are the optimizer's own."""
    model = Plain()
    without = copy.deepcopy(model)
    plain, averaged = (
        ElementwiseOptimizer(build_optimizer_groups(c, m)[0], dict(m.named_parameters()))
        for c, m in ((config.model_copy(update={"ema_decay": None}), without), (config, model))
    )
    assert averaged.averaged() == {}
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in model.named_parameters()
        }
        for optimizer in (plain, averaged):
            optimizer.step({name: gradient.clone() for name, gradient in gradients.items()}, 0.1)
        for name, weight in model.named_parameters():
            assert torch.equal(weight, without.get_parameter(name))
            before = expected.get(name, weight.detach())
            expected[name] = DECAY * before + (1 - DECAY) * weight.detach()
    torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)
    if averaged.can_skip:
        averaged.step({name: torch.full_like(e, torch.inf) for name, e in expected.items()}, 0.1, torch.ones(()))
        torch.testing.assert_close(averaged.averaged(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MuonConfig(lr=0.1, ema_decay=DECAY), "needs full tensors"),
        (ScheduleFreeConfig(lr=0.1, ema_decay=DECAY), "averages weights itself"),
        (AdamWConfig(lr=0.1, ema_decay=DECAY, moments_dtype="bf16"), "moments_dtype"),
    ],
)
def test_optimizers_that_it_does_not_go_with(config: OptimizerSection, reason: str) -> None:
    model = Plain()
    model.layers = nn.ModuleList([Plain().linear])
    with pytest.raises(UsageError, match=reason):
        build_optimizer_groups(config, model)


def averages(parallel: ParallelConfig) -> tuple[set[str], float]:
    """Names of the saved weights of this rank, and their largest difference from one device's after three steps."""
    config, batch = IMAGE_MODELS["class"], image_model_batch("class")
    optimizer = AdamWConfig(lr=1e-2, max_grad_norm=0.0, ema_decay=DECAY)
    model, objective, _ = one_device_reference(config, batch, ImageObjective)
    plain = torch.optim.AdamW([
        {"params": [p], "weight_decay": group["weight_decay"]}
        for name, p in model.named_parameters()
        for group in [build_optimizer_groups(optimizer, model)[0].options[name]]
    ], lr=1e-2, betas=(0.9, 0.95))  # fmt: skip
    engine, expected = build_engine(config, parallel, optimizer), dict[str, torch.Tensor]()
    for _ in range(3):
        engine.forward_backward(microbatches(engine, batch), objective)
        engine.step(1e-2, 0.0)
        model.zero_grad()
        terms = objective(model, batch)
        (terms["classifier"] / objective.target_counts(batch)["classifier"]).backward()
        plain.step()
        for name, weight in model.named_parameters():
            before = expected.get(name, weight.detach().clone())
            expected[name] = DECAY * before + (1 - DECAY) * weight.detach()
    saved = {n.removeprefix("model."): b for n, b in engine.state_dict().items() if n.startswith("model.")}
    worst = 0.0
    for name, box in saved.items():
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.tensor.shape, strict=True))
        worst = max(worst, float((box.tensor - expected[name][at]).abs().max()) if box.tensor.numel() else 0.0)
    return set(saved), worst


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(dp_shard=2), ParallelConfig(tp=2), ParallelConfig(dp_shard=2, zero=1)],
    ids=str,
)
def test_layouts_save_one_device_s_average(workers: Workers, parallel: ParallelConfig) -> None:
    for names, worst in workers.run(averages, 2, parallel):
        assert len(names) > 20
        assert worst < 1e-7  # Adam divides by the size of gradients that are nearly zero: key biases
