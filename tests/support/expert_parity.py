"""Two steps of a model with experts: on one device, and on every layout."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.layers.moe.moe import MoE
from megatfm.models import build
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.expert_models import EXPERT_MODELS, MOE_OPTIONS
from tests.support.parity import (
    build_engine,
    microbatches,
    model_gradient_errors,
    objective_with_auxiliary_losses,
    weighted_loss,
)


def initial_model(config: ModelConfig) -> nn.Module:
    """The whole model in float64, with its initial weights."""
    model = build(config).double()
    initialise(model, 7)
    return model


def objective_for(config: ModelConfig, batch: dict[str, Tensor]) -> Any:
    """An objective with all terms that a model has on this batch."""
    return objective_with_auxiliary_losses(config, list(PassThroughObjective([])(initial_model(config).eval(), batch)))


def two_steps_on_one_device(config: ModelConfig, batch: dict[str, Tensor]) -> tuple[nn.Module, Any, list[float]]:
    """The model with the second step's gradients, the objective, and the loss of both steps."""
    model, losses = initial_model(config).train(), []
    objective = objective_for(config, batch)
    for _ in range(2):
        for module in moe_layers(model).values():
            if module.observed:
                with torch.no_grad():
                    module.update(module.observed)
            module.reset_counts()
        model.zero_grad()
        loss = weighted_loss(objective, model, batch)
        loss.backward()
        losses.append(loss.item())
    return model, objective, losses


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Mixtures of experts by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, MoE)}


def second_step(config: ModelConfig, parallel: ParallelConfig, objective: Any) -> tuple[NativeEngine, list[float]]:
    """An engine after its second forward and backward passes, and its losses."""
    batch = family_batch(config)
    engine = build_engine(config, parallel)
    losses = []
    for step in range(2):
        if step:
            engine.step(0.0, clip=0.0)
            engine.zero_grad()
        losses.append(engine.forward_backward(microbatches(engine, batch), objective).loss)
    return engine, losses


def compare_expert_layouts(
    name: str, layouts: dict[str, ParallelConfig], models: Mapping[str, ModelConfig] = EXPERT_MODELS
) -> list[str]:
    """Loss, gradients, their norm, statistics and the state of routers; returns the layouts that were compared."""
    config = models[name]
    model, objective, expected_losses = two_steps_on_one_device(config, family_batch(config))
    for layout, parallel in layouts.items():
        engine, losses = second_step(config, parallel, objective)
        assert losses == pytest.approx(expected_losses, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert engine.global_norm.compute(engine.gradients()) == pytest.approx(float(norm), rel=1e-12), layout
        compare_router_state(engine, model, layout, even=name == "expert-choice")
        assert moe_layers(engine.model) or parallel.pp > 1
    return list(layouts)


def compare_router_state(engine: NativeEngine, model: nn.Module, layout: str, *, even: bool) -> None:
    """Statistics of each layer, and buffers to the bit. even: every expert has as many tokens as any other."""
    statistics, reference_layers = engine.layer_statistics(), moe_layers(model)
    for path, module in reference_layers.items():
        expected = module.statistics(module.observed)
        for key, value in expected.items():
            assert statistics[path.removesuffix(".ffn")][key] == pytest.approx(value), (layout, path, key)
        most = expected["load_max"]
        assert most == 1 if even else 1 < most < MOE_OPTIONS["n_experts"]
        assert ("dropped" in expected) == bool(module.experts.capacity_factor)
        assert expected.get("dropped", 1) > 0
    for path, module in moe_layers(engine.model).items():
        buffers = dict(reference_layers[path].named_buffers())
        for key, buffer in module.named_buffers():
            assert torch.equal(buffer, buffers[key]), (layout, path, key)
            assert even or not torch.equal(buffer, buffer[:1].expand_as(buffer)), "nothing to compare"
