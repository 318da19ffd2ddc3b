"""How many operations a step asks of the device: a budget that may only fall. On a CPU, too, each is a kernel."""

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import ModelConfig, ParallelConfig
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

GPT2 = UNTIED_MODEL.with_changes(
    {
        "attention": {"n_heads": 4, "bias": True},
        "ffn": {"d_ff": 80, "activation": "gelu_tanh", "bias": True},
        "norm": {"name": "layer_norm"},
        "position": {"name": "learned", "max_positions": 16},
        "embedding.tied": True,
    }
)
FREE = (
    "empty",
    "empty_like",
    "detach",
    "new_empty",
    "lift_fresh",
    "alias",
    "_unsafe_view",
    "promote_types",
    "clone",
)
"""What moves no number; and clones, most of which lay tensors anew that a CPU's allocator has put where it liked."""
MICRO_BATCHES = 4


class Launches(TorchDispatchMode):
    """Counts operators that compute or copy; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._schema.name.partition("::")[2]
        if not func.is_view and packet not in FREE:
            self.found[packet] += 1
        return func(*args, **(kwargs or {}))


def launches(
    model: ModelConfig, parallel: ParallelConfig, precision: str, early: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Of the second step: forward and backward; clipping and the optimizer's step. early: decided on the device."""
    engine = build_engine(model, parallel, ADAMW, precision=precision)
    if early:
        engine.skipping_optimizers = list(engine.optimizers)
    for seed in range(2):
        batch = microbatches(engine, global_batch(seed=seed))
        with Launches() as passes:
            stats = engine.forward_backward(batch, CAUSAL)
        with Launches() as step:
            engine.step(1e-2, clip=1e-3)
        assert stats.loss > 0
    return passes.found, step.found


BUDGETS = {
    ("gpt2", "fp32"): (54, 20),
    ("gpt2", "bf16"): (81, 20),
    ("llama", "fp32"): (116, 20),
    ("llama", "bf16"): (150, 20),
}
"""Of each block and micro-batch, forward and backward; of clipping and AdamW, however many blocks there are. Where a
change makes them fewer, lower them here. `torch.compile` fuses most of a block's."""


@pytest.mark.parametrize(("model", "precision"), BUDGETS)
def test_a_step_asks_for_no_more_than_its_budget(workers: Workers, model: str, precision: str) -> None:
    config = {"gpt2": GPT2, "llama": UNTIED_MODEL}[model]
    (two,), (four,) = (
        workers.run(launches, 1, config.with_changes({"n_layers": n}), ParallelConfig(), precision)
        for n in (2, 4)
    )
    block, step = BUDGETS[model, precision]
    assert (four[0].total() - two[0].total()) / (2 * MICRO_BATCHES) <= block, four[0] - two[0]
    assert two[1].total() <= step, two[1]
    assert four[1].total() <= step, four[1]


EARLY = 35


@pytest.mark.parametrize("layers", [2, 4])
def test_a_step_that_the_device_decides_on_asks_for_little_more(workers: Workers, layers: int) -> None:
    """Whether the loss is finite, the factor of the gradients, and step counts that are set back."""
    config = UNTIED_MODEL.with_changes({"n_layers": layers})
    ((_, step),) = workers.run(launches, 1, config, ParallelConfig(), "bf16", True)
    assert step.total() <= EARLY, step
