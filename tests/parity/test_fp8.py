"""Products in 8 bits, in float64 otherwise: the same computation wherever a batch is divided, and near that in full."""

import pytest
import torch

from megatfm.config import ParallelConfig
from megatfm.errors import UsageError
from megatfm.layers.linear import Linear
from megatfm.models import build
from megatfm.models.fp8 import multiply_in_fp8, products_in_fp8
from tests.parity import test_pipelines as pipelines
from tests.parity.test_layouts import (
    ADAMW,
    CAUSAL,
    MODEL,
    global_batch,
    gradient_errors,
    make_engine,
    microbatches,
    one_device,
    one_device_gradients,
)
from tests.workers import Workers

FOUR = MODEL.changed({"n_layers": 4})
BIASES = FOUR.changed({"attention.bias": True, "ffn.bias": True})
INNER = {
    f"decoder.layers.{n}.{name}"
    for n in (1, 2)
    for name in ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "ffn.w_gate", "ffn.w_up", "ffn.w_down")
}


def all_layouts(layouts: list[ParallelConfig]) -> dict[str, float]:
    """By layout and parameter, the errors over 1e-9 against one device that multiplies so."""
    batch, found = global_batch(seed=5), {}
    model = one_device(BIASES)
    multiply_in_fp8(model, rowwise=True)
    one = {path: matrix.product for path, matrix in products_in_fp8(model).items()}
    _, expected = one_device_gradients(model, batch)
    for parallel in layouts:
        make = pipelines.make_engine if parallel.pp > 1 else make_engine
        engine = make(BIASES, parallel, ADAMW, recomputed="full")
        for name, module in engine.model.named_modules():
            if isinstance(module, Linear) and name in one:
                module.product = one[name]
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
        mine = {name: expected[name] for name in engine.gradients()}
        found |= {f"{parallel} {name}": error for name, error in gradient_errors(engine, mine).items()}
    return found


def test_by_rows_every_division_of_a_batch_is_one_computation(workers: Workers) -> None:
    layouts = [ParallelConfig(dp_shard=2, zero=zero) for zero in (0, 1, 3)]
    for errors in workers.run(all_layouts, 2, [*layouts, ParallelConfig(pp=2, dp_shard=1)]):
        assert not errors


def distances(precision: str, rowwise: bool | None) -> dict[str, float]:
    """‖g − r‖ / ‖r‖ of each parameter's gradient from one in float64 and in full."""
    batch = global_batch(seed=5)
    _, exact = one_device_gradients(one_device(FOUR), batch)
    engine = make_engine(FOUR, ParallelConfig(), ADAMW, precision=precision)
    if rowwise is not None:
        multiply_in_fp8(engine.model, rowwise=rowwise)
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    return {n: float((g.double() - exact[n]).norm() / exact[n].norm()) for n, g in engine.gradients().items()}


@pytest.mark.parametrize("rowwise", [True, False])
def test_gradients_are_near_those_in_full(workers: Workers, rowwise: bool) -> None:
    (bf16,) = workers.run(distances, 1, "bf16", None)
    (fp8,) = workers.run(distances, 1, "bf16", rowwise)
    (alone,) = workers.run(distances, 1, "fp64", rowwise)
    assert min(alone.values()) > 1e-3, "some gradient knows nothing of 8 bits"
    # No more than the worst rounding of the two factors of a single product.
    assert max(alone.values()) < (1 + (2**-4 if rowwise else 2**-3)) * (1 + 2**-4) - 1
    for name, error in fp8.items():
        assert error < 1.5 * (alone[name] + bf16[name]), name


def test_which_products() -> None:
    with torch.device("meta"):
        model = build(FOUR)
        short = build(MODEL)
        odd = build(FOUR.changed({"ffn.d_ff": 72}))
    assert products_in_fp8(model).keys() == INNER
    assert products_in_fp8(odd).keys() == {name for name in INNER if "ffn" not in name}
    with pytest.raises(UsageError, match="this model has none: set train"):
        multiply_in_fp8(short, rowwise=True)
