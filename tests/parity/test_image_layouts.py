"""Models of images under every kind of layout: loss and each gradient as on one device, in float64."""

import pytest

from tests.support.image_models import CASES, IMAGE_MODELS, LAYOUTS, ImageObjective, image_model_batch
from tests.support.image_models import is_compared as is_compared
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    microbatches,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers


def compare(name: str, layouts: list[str], ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients of a model by layout."""
    config, batch = IMAGE_MODELS[name], image_model_batch(name)
    model, objective, loss = one_device_reference(config, batch, ImageObjective)
    wrong = {}
    for layout in layouts:
        parallel = LAYOUTS[ranks][layout]
        recomputed = "full" if layout in ("cp3", "tp3", "pp3", "zero3 on 3") else "none"
        engine = build_engine(config, parallel, ADAMW, recomputed=recomputed)
        cut = uneven_microbatches if parallel.pp > 1 else microbatches
        stats = engine.forward_backward(cut(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        wrong[layout] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for wrong in workers.run(compare, ranks, name, layouts, ranks, timeout=240.0):
        assert wrong == {layout: {} for layout in layouts}
