"""Small models with experts, the layouts that share experts over ranks, and two steps of each against one device."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.moe.moe import MoE
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.models import SMALL_MODEL
from tests.support.parity import (
    build_engine,
    microbatches,
    model_gradient_errors,
    objective_with_auxiliary_losses,
    one_device,
    weighted_loss,
)

SPARSE = {**SMALL_MODEL, "dropout": 0.2, "layer_types": ["plain", "sparse"], "layer_type.plain": {}}
LOSS_COEFFICIENTS = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.1}
MOE_OPTIONS = {"name": "moe", "d_ff": 24, "n_experts": 12, "top_k": 2}
BIASED_MOE = {**MOE_OPTIONS, "bias": True, "activation": "clamped_swiglu"}
DEEPSEEK_V3_ROUTER = {
    "name": "deepseek_v3", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "bias_update_rate": 0.05,
}  # fmt: skip


def sparse_model(router: dict[str, Any], ffn: dict[str, Any] = MOE_OPTIONS, **options: Any) -> ModelConfig:
    """A model of a plain block and one with experts."""
    return ModelConfig.from_dotted(**SPARSE | {"layer_type.sparse.ffn": {**ffn, "router": router}} | options)


DRAWN_ROUTERS: dict[str, dict[str, Any]] = {
    "noisy": {"name": "noisy_top_k", "importance_loss_coef": 0.2, "load_loss_coef": 0.3},
    "second": {"name": "gshard", "aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2},
    "hash": {"name": "hash"},
}
EXPERT_MODELS = {
    "top-k": sparse_model({"name": "top_k", **LOSS_COEFFICIENTS}),
    "by batch": sparse_model({"name": "top_k", "aux_loss_coef": 0.3, "z_loss_coef": 0.1}),
    "deepseek-v3": sparse_model(
        {**DEEPSEEK_V3_ROUTER, "seq_aux_loss_coef": 0.2}, {**BIASED_MOE, "n_shared_experts": 2},
        **{"attention.qk_norm": "all_heads"}, n_mtp_heads=1,
    ),
    "switch": sparse_model(
        {"name": "switch", "jitter": 0.1, **LOSS_COEFFICIENTS},
        {**MOE_OPTIONS, "top_k": 1, "capacity_factor": 0.8, "activation": "relu"}, family="encoder_decoder",
    ),
    "drawn": ModelConfig.from_dotted(
        **SMALL_MODEL | {"dropout": 0.2, "n_layers": 4, "layer_types": [*DRAWN_ROUTERS]},
        **{f"layer_type.{kind}.ffn": {**MOE_OPTIONS, "router": router} for kind, router in DRAWN_ROUTERS.items()},
    ),
    "expert-choice": sparse_model({"name": "expert_choice", "z_loss_coef": 0.1}, family="encoder"),
}  # fmt: skip
TP2 = ParallelConfig(tp=2)
EP2 = ParallelConfig(dp_shard=2, ep=2)
EXPERT_LAYOUTS = {
    2: {f"ep2, zero{zero}": ParallelConfig(dp_shard=2, ep=2, zero=zero) for zero in (0, 1, 2, 3)},
    4: {
        **{f"ep2 of 4, zero{zero}": ParallelConfig(dp_shard=4, ep=2, zero=zero) for zero in (0, 1, 2, 3)},
        **{f"ep4, zero{zero}": ParallelConfig(dp_shard=4, ep=4, zero=zero) for zero in (0, 1, 2, 3)},
        "ep2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2),
        "ep2 × replicas, zero0": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2, zero=0),
        "ep2 × tp2": ParallelConfig(dp_shard=2, ep=2, tp=2),
        "ep2 × tp2 without sequence parallel": ParallelConfig(dp_shard=2, ep=2, tp=2, zero=1, sequence_parallel=False),
        **{
            f"ep2 × pp2, {schedule}": ParallelConfig(dp_shard=2, ep=2, pp=2, pp_schedule=schedule)
            for schedule in ("1f1b", "zbv")
        },
        "ep2 × pp2, zero1": ParallelConfig(dp_shard=2, ep=2, pp=2, zero=1),
    },
    # Three experts on a rank, and two data ranks, which cut within each of them.
    8: {
        "ep2 of 4 × tp2": ParallelConfig(dp_shard=4, ep=2, tp=2),
        "ep2 of 4 × replicas, zero1": ParallelConfig(dp_replicate=2, dp_shard=4, ep=2, zero=1),
    },
}
EXPERT_PIPELINE_LAYOUTS = {
    f"ep2 × pp2, {schedule}": ParallelConfig(dp_shard=2, ep=2, pp=2, pp_schedule=schedule)
    for schedule in ("gpipe", "interleaved", "interleaved-zero-bubble", "dualpipev")
}
EXPERT_CONTEXT_LAYOUTS = {
    **{f"ep2 × cp2, zero{zero}": ParallelConfig(dp_shard=2, ep=2, cp=2, zero=zero) for zero in (0, 1, 3)},
    **{f"ep4 of 2 × cp2, zero{zero}": ParallelConfig(dp_shard=2, ep=4, cp=2, zero=zero) for zero in (1, 3)},
    "ep4 of tp2 × cp2": ParallelConfig(dp_shard=1, ep=4, cp=2, tp=2, expert_tp="folded"),
    "ep2 × cp2 × tp2, by channels": ParallelConfig(dp_shard=1, ep=2, cp=2, tp=2, expert_tp="by_channel"),
}


def tensor_parallel_layout(zero: int, **more: Any) -> ParallelConfig:
    """Two tensor-parallel ranks beside two data-parallel ones, but for what is given."""
    return ParallelConfig(**{"dp_shard": 2, "tp": 2, "zero": zero, **more})


EXPERT_TP_LAYOUTS = {
    2: {
        "tp2 by channels": tensor_parallel_layout(0, dp_shard=1, expert_tp="by_channel"),
        "ep2 of tp2": tensor_parallel_layout(0, dp_shard=1, ep=2, expert_tp="folded"),
    },
    4: {
        **{
            f"ep2 × tp2 by channels, zero{z}": tensor_parallel_layout(z, ep=2, expert_tp="by_channel")
            for z in (0, 1, 2, 3)
        },
        "ep2 × tp2 by channels without sequence parallel": tensor_parallel_layout(
            3, ep=2, expert_tp="by_channel", sequence_parallel=False
        ),
        "tp2 by channels × zero3": tensor_parallel_layout(3, expert_tp="by_channel"),
        **{f"ep4 of 2 × tp2, zero{z}": tensor_parallel_layout(z, ep=4, expert_tp="folded") for z in (0, 1, 2, 3)},
        **{f"ep2 of 2 × tp2, zero{z}": tensor_parallel_layout(z, ep=2, expert_tp="folded") for z in (0, 1, 3)},
        "ep2 of tp4": tensor_parallel_layout(3, dp_shard=1, tp=4, ep=2, expert_tp="folded"),
        "ep4 of tp4": tensor_parallel_layout(3, dp_shard=1, tp=4, ep=4, expert_tp="folded"),
        "ep2 of tp2 × replicas": tensor_parallel_layout(3, dp_shard=1, dp_replicate=2, ep=2, expert_tp="folded"),
        **{
            f"ep2 of tp2 × pp2, {s}": tensor_parallel_layout(
                3, dp_shard=1, pp=2, ep=2, expert_tp="folded", pp_schedule=s
            )
            for s in ("1f1b", "zbv")
        },
        "tp2 by channels × pp2": tensor_parallel_layout(3, dp_shard=1, pp=2, expert_tp="by_channel"),
    },
}
WHOLE_ROW_LAYOUTS = ("ep2 × cp2, zero0", "ep4 of tp2 × cp2")
QUICK_LAYOUTS = {
    "ep2 of 4, zero3", "ep4, zero1", "ep2 × replicas", "ep2 × tp2 without sequence parallel", "ep2 × pp2, zbv",
    # Where tensor-parallel ranks take experts otherwise, and where rows are cut:
    "tp2 by channels × pp2", "ep2 of tp2 × replicas", "switch, folded", "muon, channels",
    "deepseek-v3, ep2 × cp2, zero0, none", "expert-choice, ep4 of tp2 × cp2, full",
}  # fmt: skip
"""Layouts and cases of `make test` on four ranks: each kind of axis, router and way to take experts once."""
EXTENDED_LAYOUTS = {
    "ep2 × tp2 by channels, zero0", "ep4 of 2 × tp2, zero1", "ep2 × cp2, zero0", "ep4 of tp2 × cp2",
    "ep2 of 4, zero0", "ep4, zero2", "ep2 × tp2", "ep2 × pp2, zero1", "switch", "tp2 by channels × zero3",
    "ep2 of 2 × tp2, zero3", "ep2 of tp4", "ep2 of tp2 × pp2, zbv", "ep2 × cp2 × tp2, by channels", "muon × cp",
    "switch, ep4 of tp2 × cp2, full",
}  # fmt: skip
"""Extended ones; all others are slow."""


STAGES: tuple[Any, ...] = (0, 1, 2, 3)
PLAIN_EXPERT_LAYOUTS = {
    1: {"one process": ParallelConfig(), "accumulated shards": ParallelConfig(grad_accumulation="sharded")},
    2: {
        "tp2": TP2, "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2), "pp2, zero bubble": ParallelConfig(pp=2, pp_schedule="zbv"),
        **{f"zero{zero}": ParallelConfig(dp_shard=2, zero=zero) for zero in STAGES},
        "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
    },
    4: {
        "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2), "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
        "pp2 × tp2": ParallelConfig(pp=2, tp=2),
    },
    8: {},
}  # fmt: skip


def expert_layouts_of(ranks: int) -> dict[str, ParallelConfig]:
    """All layouts of so many ranks that don't divide experts otherwise."""
    return PLAIN_EXPERT_LAYOUTS[ranks] | EXPERT_LAYOUTS.get(ranks, {})


FOUR_RANK_MODELS = ("drawn", "expert-choice")
"""Cases in which four ranks show all that fewer do."""
EXPERT_MODELS_BY_RANKS = {
    ranks: [
        name
        for name in EXPERT_MODELS
        if name != "by batch"
        if (ranks == 4 if name in FOUR_RANK_MODELS else ranks < 8 or name == "top-k")
    ]
    for ranks in PLAIN_EXPERT_LAYOUTS
}
EXPERT_CASES = [(name, ranks) for ranks, names in EXPERT_MODELS_BY_RANKS.items() for name in names]
SCHEDULED_MODELS = ("top-k", "switch", "expert-choice", "deepseek-v3")
CONTEXT_EXPERT_MODELS = ("top-k", "switch", "deepseek-v3")
EXPERT_TP_MODELS = [("top-k", 2), ("deepseek-v3", 4), ("switch", 4)]


def objective_for(config: ModelConfig, batch: dict[str, Tensor]) -> Any:
    """An objective with all terms that a model has on this batch."""
    return objective_with_auxiliary_losses(config, list(PassThroughObjective([])(one_device(config).eval(), batch)))


def two_steps_on_one_device(config: ModelConfig, batch: dict[str, Tensor]) -> tuple[nn.Module, Any, list[float]]:
    """The model with the second step's gradients, the objective, and the loss of both steps."""
    model, losses = one_device(config).train(), []
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
        expected: dict[str, Any] = module.statistics(module.observed)
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
