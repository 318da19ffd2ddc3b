"""Attention patterns on every layout: the gradients of one device, which looks at a mask of all pairs.

The layouts visit blocks of four tokens, which the rows' length of twelve and their documents' don't always divide.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse, kernels
from megatfm.ops.attention.reference import attention_reference
from tests.support.batches import family_batch
from tests.support.grids import cells_by_ranks
from tests.support.layouts import PLAIN_LAYOUTS
from tests.support.parity import backward_on_one_device, build_engine, microbatches, model_gradient_errors
from tests.support.pattern_models import PATTERN_MODELS
from tests.support.workers import Workers


def by_blocks(*args: object) -> torch.Tensor:
    VISITED.append(True)
    return block_sparse.block_sparse_attention(*args)  # type: ignore[arg-type]


VISITED: list[bool] = []
BLOCKS = kernels.Kernel("blocks", by_blocks, kernels._supports_block_sparse, kernels._supports_any)
WRITTEN = kernels.Kernel("products", attention_reference, kernels._supports_any, kernels._supports_any)


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts; those that were compared."""
    config = ModelConfig.from_dotted(PATTERN_MODELS[name])
    batch, model = family_batch(config), build(config).double().train()
    initialise(model, 7)
    with mock.patch.object(kernels, "KERNELS", (WRITTEN,)):
        objective, loss = backward_on_one_device(config, model, batch)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(kernels, "KERNELS", (BLOCKS,)))
            patches.enter_context(mock.patch.object(block_sparse, "SIZE", 4))
            patches.enter_context(mock.patch.object(block_sparse, "MAX_SCORES", 200))
            VISITED.clear()
            stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert VISITED or config.attention.name == "linformer"
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), cells_by_ranks(PATTERN_MODELS, PLAIN_LAYOUTS))
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: PLAIN_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=180.0)[0] == layouts


def test_every_pattern_is_here() -> None:
    """Beside full attention, and windows of images: test_image_layouts."""
    local = {
        section["attention.pattern"]["name"]
        for section in ({**model, **model.get("layer_type.near", {})} for model in PATTERN_MODELS.values())
        if "attention.pattern" in section
    }
    shipped = {name for name in PATTERNS.names() if PATTERNS.get(name).__module__.startswith("megatfm.")}
    assert shipped - {"full", "windows_2d"} == local
