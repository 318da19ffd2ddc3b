"""Blocks with parts that no file of megatfm knows: on every layout the gradients of one device."""

import copy

import pytest
import torch
from torch import nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.plugins import plugin
from tests.support.batches import family_batch
from tests.support.grids import cells_by_ranks
from tests.support.layouts import PLAIN_LAYOUTS
from tests.support.models import SMALL_MODEL
from tests.support.parity import backward_on_one_device, build_engine, microbatches, model_gradient_errors
from tests.support.workers import Workers

for part in ("dilated", "chosen"):
    plugin(part)
WINDOWS = ModelConfig.from_dotted(
    {
        **SMALL_MODEL,
        "attention.n_kv_heads": 2,
        "attention.dropout": 0.1,
        "attention.pattern": {"name": "dilated", "width": 2, "step": 2},
        "layer_types": ["near", "far", "all"],
        "layer_type.near": {},
        "layer_type.far.attention.pattern": {"step": 3},
        "layer_type.far.position.name": "none",
        "layer_type.all.attention.pattern": "full",
        "n_layers": 3,
    }
)
MODELS = {
    "windows of a decoder": WINDOWS,
    "windows of an encoder": WINDOWS.with_changes({"family": "encoder", "lm_head.bias": True}),
}
CHOSEN = ModelConfig.from_dotted(
    {
        **SMALL_MODEL,
        "dropout": 0.2,
        "n_layers": 3,
        "layer_types": ["plain", "chosen"],
        "layer_type.plain": {},
        "layer_type.chosen.ffn": {"name": "chosen", "choices": 3, "rate": 0.01, "weight": 0.3},
        "n_mtp_heads": 1,
    }
)
PAIRED = CHOSEN.with_changes({"family": "encoder_decoder", "n_mtp_heads": 0})
ROUTED = {"routed tokens": CHOSEN, "routed tokens of an encoder-decoder": PAIRED}


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts; those that were compared."""
    config = {**MODELS, **ROUTED}[name]
    batch, model = family_batch(config), build(config).double().train()
    initialise(model, 7)
    objective, loss = backward_on_one_device(config, model, batch)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
        compare_state(engine, model)
    return list(layouts)


def compare_state(engine: NativeEngine, model: nn.Module) -> None:
    """What is updated once a step from counts over all ranks: the same bits as on one device."""
    engine.step(0.0, clip=0.0)
    held = dict(engine.model.named_modules())
    for path, module in model.named_modules():
        if hasattr(module, "observed") and held.get(path) is not None:
            alone = copy.deepcopy(module)
            with torch.no_grad():
                alone.update(alone.observed)
            assert alone.bias.any()
            assert torch.equal(held[path].bias, alone.bias), path
            assert not held[path].observed
            assert f"model.{path}.bias" in engine.state_dict()


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), cells_by_ranks([*MODELS, *ROUTED], PLAIN_LAYOUTS, rounds=2)
)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: PLAIN_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=180.0)[0] == layouts
