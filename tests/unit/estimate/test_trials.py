"""Trials of a calibration: small steps whose operators are measured, seconds in turns, and what is fitted to them."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatfm.config import Config, load_config
from megatfm.describe import describe
from megatfm.errors import MegatfmError
from megatfm.estimate import clock, trials
from megatfm.estimate.clock import Clock, OperatorTimer, fit_seconds, measure_in_turns
from megatfm.estimate.devices import Device, load_cluster
from megatfm.estimate.estimator import Estimate, open_estimator
from megatfm.estimate.operators import Operator
from megatfm.estimate.roofline import name_matmuls
from megatfm.estimate.trials import (
    OperatorCall,
    Trial,
    TrialTimes,
    fit_overheads,
    fit_to_steps,
    measure_trials,
    record_calls,
    tabulate_attention,
    tabulate_matmuls,
    tabulate_operators,
    time_step_and_operators,
)

ON_CPU = ("train.device=cpu", "train.precision=fp32")


def collect(function: Callable[[], object]) -> list[Operator]:
    """The operators of different calls."""
    return [call.operator for call in dict.fromkeys(record_calls(function))]


def test_a_linear_layer_has_a_matmul_of_each_layout() -> None:
    """y = x Wᵀ; the gradients are G W and Gᵀ x."""
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    operators = collect(lambda: (x @ weight.T).backward(torch.ones(6, 3)))
    shapes = {name_matmuls(op): op.dims for op in operators if op.kind == "matmul"}
    # The weight's gradient is computed as that of Wᵀ: xᵀ G.
    assert shapes == {"fp32": (1, 6, 3, 4), "fp32 nn": (1, 6, 4, 3), "fp32 tn": (1, 4, 3, 6)} or shapes == {
        "fp32": (1, 6, 3, 4),
        "fp32 nn": (1, 6, 4, 3),
        "fp32 tn": (1, 3, 4, 6),
    }


def test_batched_matmuls_have_tables_of_their_own() -> None:
    q, k = torch.randn(5, 6, 4), torch.randn(5, 7, 4)
    (operator,) = (op for op in collect(lambda: q @ k.mT) if op.kind == "matmul")
    assert name_matmuls(operator) == "fp32 batched nt"
    heads = torch.randn(6, 5, 4).transpose(0, 1)  # another head's row lies between two rows of a head
    (operator_of_heads,) = (op for op in collect(lambda: torch.bmm(heads, k.mT)) if op.kind == "matmul")
    assert name_matmuls(operator_of_heads) == "fp32 batched nt strided"
    assert tabulate_matmuls(TrialTimes([(operator, 10.0)])) == {"fp32 batched nt": [[6, 7, 4, 2.0]]}


def test_products_measured_alone_take_as_long_as_those_of_steps_near_them() -> None:
    """Alone at 4e9 FLOP/s; within steps at 8e9 in the one corner of the grid, and at 16e9 in the other one."""
    alone = [[m, n, k, 2 * m * n * k / 4e9] for m, n, k in itertools.product((32, 128, 512), repeat=3)]
    within = [[n, n, n, 2 * n**3 / rate] for n, rate in ((32, 8e9), (512, 16e9))]
    shares = {
        tuple(row[:3]): row[3] / seconds[3] for row, seconds in zip(fit_to_steps(alone, within), alone, strict=True)
    }
    assert shares[128, 128, 128] == pytest.approx((1 / 2 * 1 / 4) ** 0.5)  # as far from both
    assert shares[32, 128, 512] == pytest.approx((1 / 2 * 1 / 4) ** 0.5)
    far = 0.25 / (3 * 4**2 + 0.25)  # weight of the other corner, four doublings of three sizes away
    assert shares[32, 32, 32] == pytest.approx(1 / 2 * (1 / 2) ** (far / (1 + far)))
    assert shares[512, 512, 512] == pytest.approx(1 / 4 * 2 ** (far / (1 + far)))
    assert [row[3] for row in fit_to_steps(alone, within[:1])] == pytest.approx([row[3] / 2 for row in alone])
    assert fit_to_steps(alone, []) == alone


@pytest.mark.parametrize(
    ("function", "variant"),
    [
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "gelu(tanh)"),
        (lambda x: x.T.contiguous(), "clone(strided)"),
        (lambda x: x.long() * 3, "mul(int64)"),
        (lambda x: x.bfloat16() * (x > 0), "mul(bfloat16, bool)"),
        (lambda x: x.bfloat16() * torch.tensor(2.0), "mul(bfloat16)"),
        (lambda x: x.sum(0), "sum([0])"),
        (lambda x: x.sum(1), "sum([1])"),
        (lambda x: x * x, "mul"),
    ],
)
def test_operators_have_variants(function: Callable[[Tensor], object], variant: str) -> None:
    x = torch.randn(6, 4)
    assert variant in tabulate_operators(TrialTimes([(op, 1.0) for op in collect(lambda: function(x))]))


def test_equal_calls_are_measured_together_and_other_sizes_apart() -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 5)
    operators = collect(lambda: (x * x, x * 2.0, x * 3.0, y * y, x * x))
    assert sorted(op.moved_bytes for op in operators) == [2 * 96, 2 * 96, 2 * 120]
    assert [op.moved_bytes for op in collect(lambda: (torch.ones(3), torch.ones(5), torch.ones(3)))] == [12, 20]


def test_steps_of_other_operators_are_not_compared() -> None:
    runs = itertools.count()

    def step() -> None:
        for _ in range(1 + next(runs)):
            torch.ones(2).add_(1)

    with pytest.raises(MegatfmError, match=r"^--calibrate: two equal steps ran 2 and 8 operators, so they can't be "):
        time_step_and_operators(Clock(torch.device("cpu")), step, len(record_calls(step)))


def test_sums_over_other_dimensions_are_measured_apart() -> None:
    x = torch.randn(6, 4)
    tables = tabulate_operators(TrialTimes([(op, 1.0) for op in collect(lambda: (x.sum(0), x.sum(1), x.sum(0)))]))
    assert tables == {"sum([0])": [[4 * (24 + 4), 1.0]], "sum([1])": [[4 * (24 + 6), 1.0]]}


def test_a_product_added_in_place_is_a_matmul() -> None:
    """G += gᵀ x: a head's gradient is added up so, over chunks of the logits."""
    total, gradient, x = torch.zeros(3, 4), torch.randn(6, 3), torch.randn(6, 4)
    (operator,) = (op for op in collect(lambda: total.addmm_(gradient.T, x)) if op.kind == "matmul")
    assert (name_matmuls(operator), operator.dims) == ("fp32 tn", (1, 3, 4, 6))
    assert operator.flops == 2 * 3 * 4 * 6


def test_attention_counts_the_visible_pairs() -> None:
    rows, heads, length, width = 2, 3, 16, 8
    q, k, v = (torch.randn(rows, heads, length, width, requires_grad=True) for _ in range(3))

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    tables = tabulate_attention(TrialTimes([(op, 1.0) for op in collect(attend)]))
    pairs = sum(range(1, length + 1))
    products = 2 * rows * heads * pairs * width  # of one matmul
    assert tables == {"forward": [[2 * products, 1.0]], "backward": [[5 * products, 1.0]]}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_gpus_counts_the_visible_pairs(kernel: str, is_causal: bool) -> None:
    """Two kernels have a flag before `is_causal`, which is set wherever gradients are needed."""
    query, key = (torch.empty(2, 3, 16, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    flags = (0.0, is_causal) if kernel == "flash" else (None, True, 0.0, is_causal)
    (operator,) = collect(lambda: forward(query, key, key, *flags))
    pairs = 16 * 17 / 2 if is_causal else 16 * 16
    assert (operator.kind, operator.flops) == ("attention", 2 * 2 * 2 * 3 * pairs * 8)


SMALL = (
    "model.n_layers=1", "model.d_model=32", "model.attention.n_heads=2", "model.ffn.d_ff=64", "model.vocab_size=128",
    "data.sequence_length=16", "train.micro_batch=2", "train.global_batch=2", "train.compile=false", *ON_CPU,
)  # fmt: skip


@pytest.mark.usefixtures("equal_seconds")
@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("gpt2-124m", ()),
        ("mixtral-8x7b", ("model.attention.n_kv_heads=1", "model.ffn.n_experts=4")),
        pytest.param("t5-base", ("model.n_encoder_layers=1", "data.target_length=16"), marks=pytest.mark.extended),
    ],
)
def test_each_operator_of_an_estimate_is_measured(
    preset: str, overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate's operators are recorded without memory, a trial's where they run: both have the same names."""
    recorded: list[list[OperatorCall]] = []

    def record(function: Callable[[], object]) -> list[OperatorCall]:
        recorded.append(record_calls(function))
        return recorded[-1]

    monkeypatch.setattr(trials, "record_calls", record)
    config = load_config(preset, [*SMALL, *overrides])
    times, _ = measure_trials([config], Clock(torch.device("cpu")))
    measured = set(tabulate_matmuls(times)) | set(tabulate_operators(times)) | set(tabulate_attention(times))
    with open_estimator(config, load_cluster("cpu", 1)) as opened:
        parts = opened.profile(opened.base).parts
    operators = [op for part in parts for op in (*part.forward, *part.backward)]
    needed = Counter[str]()
    for op in operators:
        if op.kind != "attention" and op.name != "_grouped_mm":
            needed[name_matmuls(op) if op.kind == "matmul" else op.variant] += op.moved_bytes
    missing = {name: n_bytes for name, n_bytes in needed.items() if name not in measured}
    assert sum(missing.values()) < 0.02 * needed.total(), missing
    assert [trial.config for trial in times.trials] == [config]
    passes, update = recorded
    assert len(passes) > len(operators) / 2
    assert times.trials[0].update == len(update) > 0, "a second for each operator"


def test_a_part_makes_no_gradients_of_its_outputs() -> None:
    with open_estimator(load_config("gpt2-124m", SMALL), load_cluster("cpu", 1)) as opened:
        backward = [op.name for part in opened.profile(opened.base).parts for op in part.backward]
    assert not [name for name in backward if name.startswith("ones")]


@pytest.mark.usefixtures("equal_seconds")
def test_steps_that_are_held_out_give_no_operators() -> None:
    config = load_config("gpt2-124m", SMALL)
    wide = load_config("gpt2-124m", [*SMALL, "model.d_model=48"])
    times, others = measure_trials([config], Clock(torch.device("cpu")), [wide], [lambda: [7.0]])
    assert others == [1.0]
    sizes = {size for operator, _ in times.operators for size in operator.dims or ()}
    assert 32 in sizes
    assert 48 not in sizes
    assert [trial.config for trial in times.held_out] == [wide]


def estimate(config: Config, device: Device) -> Estimate:
    with open_estimator(config, replace(load_cluster("cpu", 1), device=device)) as opened:
        return opened.estimate(opened.base)


def len_operators(config: Config, device: Device) -> int:
    with open_estimator(config, replace(load_cluster("cpu", 1), device=device)) as opened:
        return sum(len(part.forward) + len(part.backward) for part in opened.profile(opened.base).parts)


def test_overheads_are_those_of_the_steps() -> None:
    """Steps are made of known overheads: the fit finds them."""
    host, per_tensor, per_byte, per_gradient = 3e-5, 2e-5, 4e-11, 9e-11
    device = load_cluster("cpu", 1).device
    slow = replace(device, host_seconds=host, update_seconds=(per_tensor, per_byte))
    measured = []
    for words in ((), ("model.n_layers=3",), ("model.d_model=256", "model.ffn.d_ff=1024")):
        config = load_config("gpt2-124m", [*SMALL, *words])
        time = estimate(config, slow).time
        numel = describe(config).parameters
        step = time.step - time.checkpoint - time.data + per_gradient * 4 * numel
        measured.append(Trial(config, step, time.optimizer))
    overheads = fit_overheads(TrialTimes(trials=measured), device)
    assert overheads.host_seconds == pytest.approx(host, rel=1e-6)
    assert overheads.gradient_seconds == pytest.approx(per_gradient, rel=1e-6)
    again = replace(device, host_seconds=host, update_seconds=(per_tensor, per_byte), gradient_seconds=per_gradient)
    for trial in measured:
        time = estimate(trial.config, again).time
        assert time.step - time.checkpoint - time.data == pytest.approx(trial.step, rel=1e-6)
    # A GPU's host works beside it: no step is shorter than the host's time.
    gpu = replace(device, kind="cuda", operators={}, moves=[], compiles=False)
    n_operators = [len_operators(trial.config, gpu) for trial in measured]
    most = min(trial.step / n for trial, n in zip(measured, n_operators, strict=True))
    assert fit_overheads(TrialTimes(trials=measured), gpu).host_seconds == pytest.approx(most, rel=1e-3)
    assert overheads.update_seconds == pytest.approx((per_tensor, per_byte), rel=1e-6)


class Machine:
    """A clock that calls move forward, each by its seconds times the slowness of the moment."""

    def __init__(self, slowness: Callable[[float], float]) -> None:
        self.now, self.order, self._slowness = 0.0, list[int](), slowness

    def make_measurement(self, number: int, seconds: Sequence[float]) -> Callable[[], list[float]]:
        def measure() -> list[float]:
            self.order.append(number)
            slowness = self._slowness(self.now)
            self.now += slowness * sum(seconds)
            return [slowness * t for t in seconds]

        return measure


SECONDS = ([0.2], [0.02, 1e-5, 0.07], [3e-4], [0.1], [0.05, 0.004])


def measure_on(slowness: Callable[[float], float], rounds: int = 15) -> tuple[Machine, list[list[float]]]:
    machine = Machine(slowness)
    measurements = [machine.make_measurement(number, seconds) for number, seconds in enumerate(SECONDS)]
    return machine, measure_in_turns(measurements, rounds, lambda: machine.now)


def test_neighbours_that_come_and_go_change_no_ratio() -> None:
    """Every other 2 seconds all takes 1.6 times as long: a median alone would be that of the one or the other."""
    _, measured = measure_on(lambda now: 1.0 if now % 4 > 2 else 1.6)
    ratios = np.concatenate(measured) / np.concatenate(SECONDS)
    assert ratios.max() / ratios.min() == pytest.approx(1.0, abs=0.03)


def test_on_a_steady_machine_the_seconds_are_exact() -> None:
    _, measured = measure_on(lambda now: 1.0)
    for part, true in zip(measured, SECONDS, strict=True):
        assert part == pytest.approx(true)


def test_each_round_has_each_measurement_in_another_order() -> None:
    machine, _ = measure_on(lambda now: 1.0, rounds=4)
    rounds = [tuple(machine.order[start : start + 5]) for start in range(0, 20, 5)]
    assert [sorted(order) for order in rounds] == [[0, 1, 2, 3, 4]] * 4
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(("round_seconds", "rounds"), [(2.0, 24), (20.0, 13), (30.0, 9), (500.0, 8)])
def test_slow_machines_measure_fewer_rounds(round_seconds: float, rounds: int) -> None:
    """No round begins after 240 seconds, but eight do in any case."""
    machine = Machine(lambda now: round_seconds)
    measure_in_turns([machine.make_measurement(0, [0.7]), machine.make_measurement(1, [0.3])], 24, lambda: machine.now)
    assert len(machine.order) == 2 * rounds


def test_single_disturbed_measurements_do_not_count() -> None:
    true = np.array([0.3, 0.01, 0.02, 0.2])
    measured = np.tile(true, (7, 1))
    measured[2, 1] *= 50
    measured[5, 3] *= 9
    spells = np.arange(7)[:, None].repeat(4, axis=1)
    assert fit_seconds(measured, spells) == pytest.approx(true)


def test_long_parts_tell_a_spell_from_noise() -> None:
    """Many short parts, slower by chance in one spell, do not make that spell slow."""
    true = np.array([1.0, *[1e-4] * 9])
    measured = np.tile(true, (5, 1))
    measured[3, 1:] *= 1.5
    measured[:, 0] *= [1.0, 1.1, 0.9, 1.0, 1.2]
    measured[:, 1:] *= np.array([1.0, 1.1, 0.9, 1.0, 1.2])[:, None]
    spells = np.arange(5)[:, None].repeat(10, axis=1)
    assert fit_seconds(measured, spells) == pytest.approx(true)


def test_operators_that_launch_kernels_are_timed_where_they_run() -> None:
    """A product and an addition; views and memory that nothing writes are none."""
    x, weight = torch.randn(4, 6), torch.randn(6, 6, requires_grad=True)
    timer = OperatorTimer(Clock(torch.device("cpu")))
    with timer:
        y = (x @ weight).view(24).detach()
        y += 1
        torch.empty(3)
    assert len(timer.seconds) == 2
    assert all(0 < seconds < 1 for seconds in timer.seconds)


def test_reading_the_time_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def read_seconds(_: Clock) -> float:
        nonlocal now
        now += 0.25
        return now

    monkeypatch.setattr(clock.Clock, "read_seconds", read_seconds)
    stopwatch = Clock(torch.device("cpu"))

    def work() -> None:
        nonlocal now
        now += 2.0

    assert stopwatch.time_call(work) == pytest.approx(2.0)
    assert stopwatch.time_call(work, repeats=3) == pytest.approx(2.0)


def test_short_functions_are_repeated_unless_they_are_measured_cold() -> None:
    calls, stopwatch = [], Clock(torch.device("cpu"))
    warm = stopwatch.make_measurement(lambda: calls.append(1), min_seconds=1e-3)
    calls.clear()
    assert len(warm()) == 1
    assert len(calls) > 10
    cold = stopwatch.make_cold_measurement(lambda: calls.append(1))
    calls.clear()
    cold()
    assert len(calls) == 1
