"""Every layout gives the gradients of one device, in float64, within ‖g−r‖ ≤ 1e-9·max(‖r‖, 1e-6·‖all gradients‖)."""

import pytest
import torch

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.models import build
from tests.support.batches import CAUSAL, global_batch
from tests.support.grids import cells
from tests.support.layouts import DATA_AND_TENSOR_LAYOUTS, RANKS_OF_LAYOUT
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    gradient_errors,
    local_block,
    microbatches,
    one_device,
    one_device_gradients,
)


def compare_gradients(config: ModelConfig, parallel: ParallelConfig) -> int:
    engine, reference = build_engine(config, parallel, ADAMW), one_device(config)
    for name, parameter in reference.named_parameters():
        assert torch.equal(local_block(engine, name, parameter.detach()), engine.local[name]), (
            f"initial {name} differs"
        )
    batch = global_batch(seed=3)
    loss, expected = one_device_gradients(reference, batch)
    stats = engine.forward_backward(microbatches(engine, batch), CAUSAL)
    assert stats.target_counts == {"causal": int((batch["targets"] != -100).sum())}
    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert gradient_errors(engine, expected) == {}
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert engine.step(0.0, clip=0.0) == pytest.approx(float(norm), rel=1e-12)
    evaluated = engine.evaluate(microbatches(engine, batch), CAUSAL)
    assert evaluated.loss == pytest.approx(loss, rel=1e-12)
    return len(expected)


@pytest.mark.parametrize(
    ("name", "layouts"),
    cells(dict.fromkeys(("untied", "tied"), DATA_AND_TENSOR_LAYOUTS), always=["tp2", "zero3 2 × tp2"]),
)
def test_gradients_equal_one_device(workers, name, layouts):
    config = {"untied": UNTIED_MODEL, "tied": TIED_MODEL}[name]
    for layout in layouts:
        ranks = RANKS_OF_LAYOUT[layout]
        compared = workers.run(compare_gradients, ranks, config, DATA_AND_TENSOR_LAYOUTS[layout])
        assert compared == [len(list(build(config).parameters()))] * ranks
