"""Each optimizer over fifteen steps in float64 against code that shares nothing with it: a library's or the paper's."""

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import ElementwiseOptimizer, TorchOptimizer
from megatfm.optim import matrix_optimizers
from megatfm.optim.matrix_optimizers import BatchedMuon, split_batches
from megatfm.optim.parameters import OPTIMIZERS, ParameterInfo, Role
from tests.support.sharded_engines import OPTIMIZER_SECTION, RATE, check_stack_moves_as_matrices
from tests.support.tensors import OperatorCounter

STEPS = 15
SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "tall": ((6, 4), "matrix"), "wide": ((3, 7), "matrix"), "table": ((9, 2), "embedding"), "gain": ((5,), "vector"),
    "stacked": ((2, 3), "vector"),
}  # fmt: skip
SCALES = {"wide": 0.5}
MATRIX = {"matrix": ParameterInfo((6, 4), "matrix", True, True)}
Weights = dict[str, Tensor]


def draw_weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, _) in SHAPES.items()}


def compute_gradients(weights: Weights, step: int) -> Weights:
    """Gradients depend on the weights, so that an error in one step shows in all that follow."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: 0.3 * weight + torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in weights.items()
    }


def compute_rate(step: int) -> float:
    """A warm-up of five steps."""
    return RATE * min(1.0, step / 5)


def make_parameters() -> dict[str, ParameterInfo]:
    return {
        name: ParameterInfo(shape, role, role != "vector", True, SCALES.get(name, 1.0))
        for name, (shape, role) in SHAPES.items()
    }


def make_groups(name: str, parameters: dict[str, ParameterInfo], **options: Any) -> list[OptimizerGroup]:
    """The registered optimizer's groups of parameters."""
    config = OPTIMIZER_SECTION.validate_python({"name": name, "lr": RATE, **options})
    return [group for group in OPTIMIZERS.get(name)(config, parameters) if group.names]


def run_optimizer(name: str, **options: Any) -> tuple[Weights, list[TorchOptimizer]]:
    """The weights after all steps of the registered optimizer, as an engine takes them."""
    weights = draw_weights()
    groups = make_groups(name, make_parameters(), **options)
    optimizers = [TorchOptimizer(group, {n: weights[n] for n in group.names}) for group in groups]
    for step in range(1, STEPS + 1):
        gradients = compute_gradients(weights, step)
        for optimizer in optimizers:
            optimizer.step(gradients, compute_rate(step))
    return weights, optimizers


def run_updates(update: Callable[[str, Tensor, Tensor, int, float], None]) -> Weights:
    """The weights after as many in-place updates (name, weight, gradient, step, rate) of each."""
    weights = draw_weights()
    for step in range(1, STEPS + 1):
        for name, gradient in compute_gradients(weights, step).items():
            update(name, weights[name], gradient, step, compute_rate(step) * SCALES.get(name, 1.0))
    return weights


def run_library(make: Callable[[str, Tensor], torch.optim.Optimizer]) -> Weights:
    """The weights after all steps of a library's optimizer, one for each weight."""
    optimizers: dict[str, torch.optim.Optimizer] = {}

    def update(name: str, weight: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        optimizer = optimizers.setdefault(name, make(name, weight))
        weight.grad = gradient
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    return run_updates(update)


def get_decay(name: str, weight_decay: float) -> float:
    return 0.0 if SHAPES[name][1] == "vector" else weight_decay


def assert_same(actual: Weights, expected: Weights, tolerance: float = 1e-12) -> None:
    first = draw_weights()
    for name, weight in expected.items():
        assert (weight - first[name]).norm() > 0.05 * first[name].norm(), f"{name} hardly moved"
        assert (actual[name] - weight).norm() <= tolerance * weight.norm(), name


class Adam:
    """Kingma & Ba 2015, algorithm 1: the direction, in float64."""

    def __init__(self, beta1: float, beta2: float, eps: float) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, name: str, gradient: Tensor, step: int) -> Tensor:
        m, v = self.moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        m = self.beta1 * m + (1 - self.beta1) * gradient
        v = self.beta2 * v + (1 - self.beta2) * gradient**2
        self.moments[name] = m, v
        return m / (1 - self.beta1**step) / ((v / (1 - self.beta2**step)) ** 0.5 + self.eps)


def adamw(betas: tuple[float, float], eps: float, weight_decay: float) -> Callable[..., None]:
    """Loshchilov & Hutter 2019, algorithm 2."""
    adam = Adam(*betas, eps)

    def update(name: str, weight: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        weight -= lr * (adam(name, gradient, step) + get_decay(name, weight_decay) * weight)

    return update


def test_adamw_equals_torch() -> None:
    expected = run_updates(adamw((0.8, 0.9), 1e-6, 0.3))
    assert_same(run_optimizer("adamw", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)[0], expected)


def test_muon_equals_its_paper() -> None:
    """Jordan et al. 2024 with its quintic iteration in bfloat16, and AdamW for what isn't a matrix."""
    momentum: Weights = {}
    update_by_adamw = adamw((0.9, 0.95), 1e-8, 0.2)

    def update(name: str, weight: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        if SHAPES[name][1] != "matrix":
            update_by_adamw(name, weight, gradient, step, lr)
            return
        lr = lr * 0.02 / RATE
        buffer = momentum.setdefault(name, torch.zeros_like(gradient))
        buffer.lerp_(gradient, 0.05)
        x = gradient.lerp(buffer, 0.95).bfloat16()
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = (x.T if tall else x).double()
        weight *= 1 - lr * 0.2
        weight -= lr * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * x

    # A rounding of bfloat16 here or there, of updates that sum up to a tenth of the weights.
    assert_same(run_optimizer("muon", weight_decay=0.2)[0], run_updates(update), tolerance=2e-3)


def test_adafactor_equals_its_reference() -> None:
    optimization = importlib.import_module("transformers.optimization")

    def make(name: str, weight: Tensor) -> torch.optim.Optimizer:
        return optimization.Adafactor(
            [weight], lr=RATE, eps=(1e-30, 0.02), clip_threshold=1.2, decay_rate=-0.7, relative_step=False,
        )  # fmt: skip

    options = {"beta2_decay": 0.7, "eps2": 0.02, "clip_threshold": 1.2}
    assert_same(run_optimizer("adafactor", **options)[0], run_library(make))


def test_adafactor_decays_weights_by_the_learning_rate() -> None:
    """transformers multiplies it by each tensor's scale, too; torch does not."""
    for name, (shape, role) in SHAPES.items():
        moved = []
        for weight_decay in (0.0, 0.5):
            info = ParameterInfo(shape, role, role != "vector", True)
            (group,) = make_groups("adafactor", {name: info}, weight_decay=weight_decay)
            weights = {name: draw_weights()[name]}
            TorchOptimizer(group, weights).step(compute_gradients(weights, 1), RATE)
            moved.append(weights[name])
        torch.testing.assert_close(moved[0] - moved[1], RATE * get_decay(name, 0.5) * draw_weights()[name])


def test_adafactor_is_independent_of_the_scale_of_gradients() -> None:
    """A large model's clipped gradients are tiny; torch's own floor would make float32's updates larger."""
    (group,) = make_groups("adafactor", MATRIX, clip_threshold=1e6)
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    moved = []
    for scale in (1.0, 1e-6):
        weight = torch.ones(6, 4)
        TorchOptimizer(group, {"matrix": weight}).step({"matrix": scale * gradient}, RATE)
        moved.append(weight - 1)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-6)


def test_lamb_equals_its_reference() -> None:
    """You et al. 2020, algorithm 2, φ the identity; what doesn't decay is left to Adam."""
    adam = Adam(0.9, 0.99, 1e-6)

    def update(name: str, weight: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        direction = adam(name, gradient, step) + get_decay(name, 0.2) * weight
        ratio = weight.norm() / direction.norm() if SHAPES[name][1] != "vector" else 1.0
        weight -= lr * ratio * direction

    assert_same(run_optimizer("lamb", betas=(0.9, 0.99), weight_decay=0.2)[0], run_updates(update))


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_lamb_has_trust_ratio_one_for_a_norm_of_zero(zero: str) -> None:
    (group,) = make_groups("lamb", MATRIX, weight_decay=0.0)
    weight = torch.zeros(6, 4) if zero == "weight" else torch.ones(6, 4)
    before = weight.clone()
    TorchOptimizer(group, {"matrix": weight}).step({"matrix": torch.full((6, 4), float(zero != "gradient"))}, 0.1)
    assert torch.allclose(before - weight, torch.full((6, 4), 0.0 if zero == "gradient" else 0.1), rtol=1e-5)


def test_lion_equals_its_reference(library: ModuleType) -> None:
    def make(name: str, weight: Tensor) -> torch.optim.Optimizer:
        decay = get_decay(name, 0.4)
        return library.lion.Lion([weight], lr=RATE, betas=(0.8, 0.95), weight_decay=decay, foreach=False)

    assert_same(run_optimizer("lion", betas=(0.8, 0.95), weight_decay=0.4)[0], run_library(make))


@pytest.mark.parametrize("max_dim", [100, 5, 2], ids=["both sides", "one side", "no side"])
@pytest.mark.parametrize("every", [1, 4])
def test_soap_equals_its_reference(library: ModuleType, every: int, max_dim: int) -> None:
    update_by_adamw = adamw((0.9, 0.95), 1e-8, 0.2)
    options = {"betas": (0.9, 0.95), "precondition_frequency": every, "weight_decay": 0.2}
    references: dict[str, Any] = {}

    def update(name: str, weight: Tensor, gradient: Tensor, step: int, lr: float) -> None:
        if SHAPES[name][1] != "matrix":
            update_by_adamw(name, weight, gradient, step, lr)
            return
        soap = references.setdefault(name, library.soap.SOAP([weight], max_precondition_dim=max_dim, **options))
        soap.param_groups[0]["lr"], weight.grad = lr, gradient
        soap.step()

    actual = run_optimizer("soap", max_precond_dim=max_dim, **options)[0]
    assert_same(actual, run_updates(update), tolerance=1e-9)


def test_schedule_free_equals_its_reference() -> None:
    """Defazio et al. 2024, section 3.1, with x, y and z apart; the average weighs steps by their squared rate."""
    x, y, z = draw_weights(), draw_weights(), draw_weights()
    squares = {name: torch.zeros_like(weight) for name, weight in x.items()}
    sum_of_weights = 0.0
    for step in range(1, STEPS + 1):
        weight = compute_rate(step) ** 2
        sum_of_weights += weight
        for name, gradient in compute_gradients(y, step).items():
            lr = compute_rate(step) * SCALES.get(name, 1.0)
            squares[name] = 0.99 * squares[name] + 0.01 * gradient**2
            direction = gradient / ((squares[name] / (1 - 0.99**step)) ** 0.5 + 1e-8)
            z[name] = z[name] - lr * (direction + get_decay(name, 0.2) * y[name])
            x[name] = x[name] + weight / sum_of_weights * (z[name] - x[name])
            y[name] = 0.1 * z[name] + 0.9 * x[name]
    actual, (trained,) = run_optimizer("schedule_free_adamw", betas=(0.9, 0.99), weight_decay=0.2)
    assert_same(actual, y)
    (group,) = make_groups("schedule_free_adamw", make_parameters())
    optimizer = ElementwiseOptimizer(group, actual)
    optimizer._torch = trained
    assert_same(optimizer.averaged(), x)
    assert all((x[name] - y[name]).norm() > 1e-3 for name in x), "they would not be told apart"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """pytorch-optimizer, whose SOAP rounds its bases to float32: here it doesn't."""
    library = importlib.import_module("pytorch_optimizer.optimizer")
    in_double = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    monkeypatch.setattr(importlib.import_module("pytorch_optimizer.optimizer.soap"), "torch", in_double)
    return library


@pytest.mark.parametrize("name", ["muon", "soap", "lamb", "adafactor"])
def test_a_stack_is_updated_as_its_matrices(name: str) -> None:
    check_stack_moves_as_matrices(name)


def test_batched_muon_equals_torch_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are those of a GPU: torch's steps, a batch at a time, in as many operators for any number of matrices."""
    monkeypatch.setattr(matrix_optimizers, "split_batches", lambda moves, _: split_batches(moves, 3 * 24))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = [(6, 4)] * 3 + [(4, 6), (2, 6, 4), (4, 6), (6, 4)]
    weights = [draw(*shape).requires_grad_() for shape in shapes]
    expected = [[matrix.clone() for matrix in weight.detach().view(-1, *weight.shape[-2:])] for weight in weights]
    options = {"lr": 0.02, "momentum": 0.9}
    optimizer = BatchedMuon(
        [{"params": weights[:4], "weight_decay": 0.2}, {"params": weights[4:], "weight_decay": 0.1, "lr": 0.01}],
        **options,
    )
    first, second = ([matrix for matrices in part for matrix in matrices] for part in (expected[:4], expected[4:]))
    groups = [{"params": first, "weight_decay": 0.2}, {"params": second, "weight_decay": 0.1, "lr": 0.01}]
    reference = torch.optim.Muon(groups, **options)
    for _ in range(6):
        for weight, matrices in zip(weights, expected, strict=True):
            weight.grad = draw(*weight.shape)
            for matrix, gradient in zip(matrices, weight.grad.view(-1, *weight.shape[-2:]), strict=True):
                matrix.grad = gradient.clone()
        optimizer.step()
        reference.step()
        for weight, matrices in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.view(-1, *weight.shape[-2:]), torch.stack(matrices), rtol=0, atol=4e-4)


def test_batched_muon_runs_as_many_operators_for_more_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = matrix_optimizers.MAX_BATCH_ELEMENTS
    monkeypatch.setattr(matrix_optimizers, "split_batches", lambda moves, _: split_batches(moves, limit))

    def count_operators(n: int) -> int:
        weights = [torch.ones(6, 4, requires_grad=True) for _ in range(n)]
        optimizer = BatchedMuon(weights, lr=0.1, momentum=0.9)
        for weight in weights:
            weight.grad = torch.ones(6, 4)
        optimizer.step()
        with OperatorCounter() as mode:
            optimizer.step()
        return mode.count

    assert 0 < count_operators(12) == count_operators(3) < 40


def test_muon_is_batched_on_gpus() -> None:
    (group,) = make_groups("muon", MATRIX)
    for device, kind in (("cpu", torch.optim.Muon), ("meta", BatchedMuon)):  # meta in the place of a GPU
        assert type(group.build([{"params": [torch.zeros(6, 4, device=device)]}])) is kind


def test_batches_of_updates_have_a_largest_size() -> None:
    moves = [(torch.zeros(2, 3), torch.zeros(2, 3), float(i)) for i in range(5)]
    assert [[by for _, _, by in batch] for batch in split_batches(moves, 12)] == [[0, 1], [2, 3], [4]]
    assert [len(batch) for batch in split_batches(moves, 1)] == [1] * 5


def test_newton_schulz_in_full_precision_equals_its_polynomial() -> None:
    """Each singular value goes five times through ax + bx³ + cx⁵; in bfloat16 a last bit is as large as 1e-2."""
    a, b, c = 3.4445, -4.7750, 2.0315  # of the authors
    generator = torch.Generator().manual_seed(5)
    for shape in ((6, 4), (4, 6), (5, 5)):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, s, vt = torch.linalg.svd(x / x.norm(), full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        orthogonal = matrix_optimizers.newton_schulz(x[None], in_bf16=False)
        torch.testing.assert_close(orthogonal[0], u * s @ vt, rtol=0, atol=1e-12)
        near = x * (1 + 1e-9 * torch.randn(shape, generator=generator, dtype=torch.float64))
        results = [matrix_optimizers.newton_schulz(near.float()[None], in_bf16=in_bf16) for in_bf16 in (False, True)]
        change_in_param_dtype, change_in_bf16 = (float((result - orthogonal).abs().max()) for result in results)
        assert change_in_param_dtype < 1e-4 < 1e-3 < change_in_bf16


def test_the_dtype_of_newton_schulz_is_configurable() -> None:
    (group,) = make_groups("muon", MATRIX, newton_schulz_dtype="param", matrix_lr=0.03)
    optimizer = group.build([{"params": [torch.zeros(6, 4, dtype=torch.float64, requires_grad=True)]}])
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer.step()
    direction = matrix_optimizers.newton_schulz(weight.grad[None], in_bf16=False)[0]
    torch.testing.assert_close(weight.detach(), -0.03 * 1.5**0.5 * direction, rtol=1e-9, atol=0)
