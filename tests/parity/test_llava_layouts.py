"""Vision-language models under every kind of layout: loss and each gradient as on one device, in float64."""

import pytest

from tests.support.llava_models import CASES, LAYOUTS, LLAVA_MODELS, llava_reference
from tests.support.models import ADAMW
from tests.support.parity import build_engine, model_gradient_errors, uneven_microbatches
from tests.support.workers import Workers

RECOMPUTED = ("tp", "zbv", "zero 2", "cp by Ulysses")


def compare(name: str, layouts: list[str], ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients of a model by layout."""
    batch, model, objective, loss = llava_reference(name)
    wrong = {}
    for layout in layouts:
        recomputed = "full" if layout in RECOMPUTED else "none"
        engine = build_engine(LLAVA_MODELS[name], LAYOUTS[ranks][layout], ADAMW, recomputed=recomputed)
        stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        wrong[layout] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for wrong in workers.run(compare, ranks, name, layouts, ranks, timeout=240.0):
        assert wrong == {layout: {} for layout in layouts}
