"""Trials of a calibration: small steps whose operators are measured, and what is fitted to them."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatfm.config import Config, load_config
from megatfm.describe import describe
from megatfm.errors import MegatfmError
from megatfm.estimate import trials
from megatfm.estimate.clock import Clock
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
