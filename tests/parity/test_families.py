"""Every model family under tensor and sharded data parallelism: the gradients of one device, with dropout on.

Dropout is keyed by row, so that it is part of what must agree. The batch goes through the engine in micro-batches and
through the plain model all at once.
"""

import pytest
import torch
import torch.distributed as dist

from tests.support.batches import family_case
from tests.support.grids import cells
from tests.support.layouts import FAMILY_LAYOUTS
from tests.support.models import ADAMW, FAMILY_NAMES
from tests.support.parity import (
    build_engine,
    gradient_errors,
    local_block,
    microbatches,
    one_device_reference,
)
from tests.support.workers import Workers


def compare(name: str, layouts: list[str]) -> list[str]:
    """The gradients of these layouts; those that were compared."""
    config, batch = family_case(name, deep=False)
    reference, objective, loss = one_device_reference(config, batch)
    expected = {n: p.grad for n, p in reference.named_parameters()}
    compared = []
    for layout in layouts:
        engine = build_engine(config, FAMILY_LAYOUTS[dist.get_world_size()][layout], ADAMW)
        for n, parameter in reference.named_parameters():
            initial = local_block(engine, n, parameter.detach())
            assert torch.equal(initial, engine.local[n]), f"{layout}: initial {n} differs"
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert gradient_errors(engine, expected) == {}, layout
        compared.append(layout)
    return compared


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    [
        *cells(dict.fromkeys(FAMILY_NAMES, FAMILY_LAYOUTS[2]), 2, always=["tp2"], label=" on 2"),
        *cells(dict.fromkeys(FAMILY_NAMES, FAMILY_LAYOUTS[4]), 4, label=" on 4"),
    ],
)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    (compared, *_) = workers.run(compare, ranks, name, layouts)
    assert compared == layouts
