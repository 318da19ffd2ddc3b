"""Experts on every layout: gradients of one device, and the same state of routers, over two steps.

State follows from the counts of a whole global batch, so the second step's choices and balance depend on the first's.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatfm import checkpoint
from megatfm.config import Config, ModelConfig, ParallelConfig
from megatfm.config.objective import CausalObjective, MaskedObjective, SpanCorruptionObjective
from megatfm.engines import base
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.block import auxiliary_losses
from megatfm.layers.initialisation import initialise
from megatfm.layers.moe.experts import Experts
from megatfm.layers.moe.moe import MoE
from megatfm.models import build
from megatfm.objectives.base import DECODER_ONLY, ENCODER_DECODER, ObjectiveWithAuxiliaryLosses
from megatfm.parallel import collectives, expert_parallel
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.mesh import DENSE_DATA_AXES, Mesh
from megatfm.verify.verify import verify
from tests.parity import test_layouts, test_pipelines, test_traffic
from tests.parity.test_families import SMALL, PassThroughObjective, batch_for
from tests.support.grids import SLOW, cells
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch

SPARSE = {**SMALL, "dropout": 0.2, "layer_types": ["plain", "sparse"], "layer_type.plain": {}}
ALL = {"aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2, "z_loss_coef": 0.1}
MOE = {"name": "moe", "d_ff": 24, "n_experts": 12, "top_k": 2}
BIASED = {**MOE, "bias": True, "activation": "clamped_swiglu"}
V3 = {
    "name": "deepseek_v3",
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "bias_update_rate": 0.05,
}
MODELS = {
    "top-k": ModelConfig.from_dotted(
        **SPARSE, **{"layer_type.sparse.ffn": {**MOE, "router": {"name": "top_k", **ALL}}}
    ),
    "by batch": ModelConfig.from_dotted(
        **SPARSE,
        **{
            "layer_type.sparse.ffn": {
                **MOE,
                "router": {"name": "top_k", "aux_loss_coef": 0.3, "z_loss_coef": 0.1},
            }
        },
    ),
    "deepseek-v3": ModelConfig.from_dotted(
        **SPARSE,
        **{
            "layer_type.sparse.ffn": {
                **BIASED,
                "n_shared_experts": 2,
                "router": {**V3, "seq_aux_loss_coef": 0.2},
            }
        },
        **{"attention.qk_norm": "all_heads"},
        n_mtp_heads=1,
    ),
    "switch": ModelConfig.from_dotted(
        **SPARSE,
        **{
            "layer_type.sparse.ffn": {
                **MOE,
                "top_k": 1,
                "capacity_factor": 0.8,
                "activation": "relu",
                "router": {"name": "switch", "jitter": 0.1, **ALL},
            }
        },
        family="encoder_decoder",
    ),
}
MODELS |= {
    "drawn": ModelConfig.from_dotted(
        **{**SMALL, "dropout": 0.2, "n_layers": 4, "layer_types": ["noisy", "second", "hash"]},
        **{
            f"layer_type.{kind}.ffn": {**MOE, "router": router}
            for kind, router in {
                "noisy": {"name": "noisy_top_k", "importance_loss_coef": 0.2, "load_loss_coef": 0.3},
                "second": {"name": "gshard", "aux_loss_coef": 0.3, "seq_aux_loss_coef": 0.2},
                "hash": {"name": "hash"},
            }.items()
        },
    ),
    "expert-choice": ModelConfig.from_dotted(
        **SPARSE,
        **{"layer_type.sparse.ffn": {**MOE, "router": {"name": "expert_choice", "z_loss_coef": 0.1}}},
        family="encoder",
    ),
}
TP2 = ParallelConfig(tp=2)
EXPERTS_OVER_RANKS = {
    2: {f"ep2, zero{zero}": ParallelConfig(dp_shard=2, ep=2, zero=zero) for zero in (0, 1, 2, 3)},
    4: {
        **{f"ep2 of 4, zero{zero}": ParallelConfig(dp_shard=4, ep=2, zero=zero) for zero in (0, 1, 2, 3)},
        **{f"ep4, zero{zero}": ParallelConfig(dp_shard=4, ep=4, zero=zero) for zero in (0, 1, 2, 3)},
        "ep2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2),
        "ep2 × replicas, zero0": ParallelConfig(dp_replicate=2, dp_shard=2, ep=2, zero=0),
        "ep2 × tp2": ParallelConfig(dp_shard=2, ep=2, tp=2),
        "ep2 × tp2 without sequence parallel": ParallelConfig(
            dp_shard=2, ep=2, tp=2, zero=1, sequence_parallel=False
        ),
        **{
            f"ep2 × pp2, {schedule}": ParallelConfig(dp_shard=2, ep=2, pp=2, pp_schedule=schedule)
            for schedule in ("1f1b", "zbv")
        },
        "ep2 × pp2, zero1": ParallelConfig(dp_shard=2, ep=2, pp=2, zero=1),
    },
    # Three experts on a rank, and two data ranks, which cut within each of them.
    8: {"ep2 of 4 × tp2": ParallelConfig(dp_shard=4, ep=2, tp=2)},
}
LAYOUTS = {
    1: {"one process": ParallelConfig(), "accumulated shards": ParallelConfig(grad_accumulation="sharded")},
    2: {
        "tp2": TP2,
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2),
        "pp2, zero bubble": ParallelConfig(pp=2, pp_schedule="zbv"),
        **{f"zero{zero}": ParallelConfig(dp_shard=2, zero=zero) for zero in range(4)},
        "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
    },
    4: {
        "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
        "pp2 × tp2": ParallelConfig(pp=2, tp=2),
    },
    8: {},
}


def layouts_of(ranks: int) -> dict[str, ParallelConfig]:
    return LAYOUTS[ranks] | EXPERTS_OVER_RANKS.get(ranks, {})


def initial_model(config: ModelConfig) -> nn.Module:
    model = build(config).double()
    initialise(model, 7)
    return model


def objective_for(config: ModelConfig, batch: dict[str, Tensor]) -> Any:
    return objective_of(config, list(PassThroughObjective([])(initial_model(config).eval(), batch)))


def objective_of(config: ModelConfig, terms: list[str]) -> Any:
    """Of a model's terms, with those of its blocks."""
    added = auxiliary_losses(config)
    objective = PassThroughObjective([term for term in terms if term not in added])
    objective.field_prefixes = ENCODER_DECODER if config.family == "encoder_decoder" else DECODER_ONLY
    return ObjectiveWithAuxiliaryLosses(objective, added)


def loss_of(objective: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    terms, counts = PassThroughObjective([])(model, batch), objective.target_counts(batch)
    return torch.stack([objective.loss_weights[term] * terms[term] / counts[term] for term in terms]).sum()


def one_device(config: ModelConfig, batch: dict[str, Tensor]) -> tuple[nn.Module, Any, list[float]]:
    """The model with the second step's gradients, the objective, and the loss of both steps."""
    model, losses = initial_model(config).train(), []
    objective = objective_for(config, batch)
    for _ in range(2):
        for module in mixtures(model).values():
            if module.observed:
                with torch.no_grad():
                    module.update(module.observed)
            module.reset_counts()
        model.zero_grad()
        loss = loss_of(objective, model, batch)
        loss.backward()
        losses.append(loss.item())
    return model, objective, losses


def mixtures(model: nn.Module) -> dict[str, MoE]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MoE)}


def second_step(name: str, parallel: ParallelConfig, objective: Any) -> tuple[NativeEngine, list[float]]:
    """An engine after its second forward and backward passes, and its losses."""
    config = MODELS[name]
    batch = batch_for(config)
    make = test_pipelines.make_engine if parallel.pp > 1 else test_layouts.make_engine
    engine = make(config, parallel, *(() if parallel.pp > 1 else (test_layouts.ADAMW,)))
    losses = []
    for step in range(2):
        if step:
            engine.step(0.0, clip=0.0)
            engine.zero_grad()
        losses.append(engine.forward_backward(test_layouts.microbatches(engine, batch), objective).loss)
    return engine, losses


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    model, objective, wanted = one_device(MODELS[name], batch_for(MODELS[name]))
    for layout, parallel in layouts.items():
        engine, losses = second_step(name, parallel, objective)
        assert losses == pytest.approx(wanted, rel=1e-12), layout
        assert test_pipelines.errors(engine, model) == {}, layout
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert engine.distinct.norm(engine.gradients()) == pytest.approx(float(norm), rel=1e-12), layout
        told = engine.layer_statistics()
        for path, module in mixtures(model).items():
            wanted_here = module.statistics(module.observed)
            for key, value in wanted_here.items():
                assert told[path.removesuffix(".ffn")][key] == pytest.approx(value), (layout, path, key)
            even = name == "expert-choice"
            assert (
                (wanted_here["load_max"] == 1) if even else (1 < wanted_here["load_max"] < MOE["n_experts"])
            )
            assert ("dropped" in wanted_here) == bool(module.experts.capacity)
            assert wanted_here.get("dropped", 1) > 0
        held = mixtures(engine.model)
        assert held or parallel.pp > 1
        for path, module in held.items():
            buffers = dict(mixtures(model)[path].named_buffers())
            for key, buffer in module.named_buffers():
                assert torch.equal(buffer, buffers[key]), (layout, path, key)
                assert even or not torch.equal(buffer, buffer[:1].expand_as(buffer)), "nothing to compare"
    return list(layouts)


DRAWN = ("drawn", "expert-choice")
"""Of which four ranks show all that fewer do."""
MODELS_ON = {
    ranks: [
        name
        for name in MODELS
        if name != "by batch"
        if (ranks == 4 if name in DRAWN else ranks < 8 or name == "top-k")
    ]
    for ranks in LAYOUTS
}
CASES = [(name, ranks) for ranks, names in MODELS_ON.items() for name in names]


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    [
        cell
        for ranks, names in MODELS_ON.items()
        for cell in cells(dict.fromkeys(names, layouts_of(ranks)), ranks, label=f" on {ranks}")
    ],
)
def test_gradients_and_state_equal_one_device(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: layouts_of(ranks)[layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=300.0)[0] == layouts


OTHER_SCHEDULES = {
    f"ep2 × pp2, {schedule}": ParallelConfig(dp_shard=2, ep=2, pp=2, pp_schedule=schedule)
    for schedule in ("gpipe", "interleaved", "interleaved-zero-bubble", "dualpipev")
}
CONTEXTS = {
    **{f"ep2 × cp2, zero{zero}": ParallelConfig(dp_shard=2, ep=2, cp=2, zero=zero) for zero in (0, 1, 3)},
    **{f"ep4 of 2 × cp2, zero{zero}": ParallelConfig(dp_shard=2, ep=4, cp=2, zero=zero) for zero in (1, 3)},
    "ep4 of tp2 × cp2": ParallelConfig(dp_shard=1, ep=4, cp=2, tp=2, expert_tp="folded"),
    "ep2 × cp2 × tp2, by channels": ParallelConfig(dp_shard=1, ep=2, cp=2, tp=2, expert_tp="by_channel"),
}


def with_tp(zero: int, **more: Any) -> ParallelConfig:
    return ParallelConfig(**{"dp_shard": 2, "tp": 2, "zero": zero, **more})


TP_OTHERWISE = {
    2: {
        "tp2 by channels": with_tp(0, dp_shard=1, expert_tp="by_channel"),
        "ep2 of tp2": with_tp(0, dp_shard=1, ep=2, expert_tp="folded"),
    },
    4: {
        **{f"ep2 × tp2 by channels, zero{z}": with_tp(z, ep=2, expert_tp="by_channel") for z in (0, 1, 2, 3)},
        "ep2 × tp2 by channels without sequence parallel": with_tp(
            3, ep=2, expert_tp="by_channel", sequence_parallel=False
        ),
        "tp2 by channels × zero3": with_tp(3, expert_tp="by_channel"),
        **{f"ep4 of 2 × tp2, zero{z}": with_tp(z, ep=4, expert_tp="folded") for z in (0, 1, 2, 3)},
        **{f"ep2 of 2 × tp2, zero{z}": with_tp(z, ep=2, expert_tp="folded") for z in (0, 1, 3)},
        "ep2 of tp4": with_tp(3, dp_shard=1, tp=4, ep=2, expert_tp="folded"),
        "ep4 of tp4": with_tp(3, dp_shard=1, tp=4, ep=4, expert_tp="folded"),
        "ep2 of tp2 × replicas": with_tp(3, dp_shard=1, dp_replicate=2, ep=2, expert_tp="folded"),
        **{
            f"ep2 of tp2 × pp2, {s}": with_tp(3, dp_shard=1, pp=2, ep=2, expert_tp="folded", pp_schedule=s)
            for s in ("1f1b", "zbv")
        },
        "tp2 by channels × pp2": with_tp(3, dp_shard=1, pp=2, expert_tp="by_channel"),
    },
}


IN_ANY_ORDER = ("top-k", "switch", "expert-choice", "deepseek-v3")
ON_PARTS = ("top-k", "switch", "deepseek-v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "top-k" else SLOW) for name in IN_ANY_ORDER]
)
def test_stages_go_in_any_order(workers: Workers, name: str) -> None:
    assert workers.run(compare, 4, name, OTHER_SCHEDULES, timeout=300.0)[0] == list(OTHER_SCHEDULES)


OTHER_WAYS = [("top-k", 2), ("deepseek-v3", 4), ("switch", 4)]
AGAIN = {
    *(f"ep2 × tp2 by channels, zero{zero}" for zero in (1, 3)),
    *(f"ep4 of 2 × tp2, zero{zero}" for zero in (0, 2)),
    *(f"ep2 of 2 × tp2, zero{zero}" for zero in (1, 3)),
    "ep2 of tp4",
    "ep2 of tp2 × pp2, 1f1b",
    "ep2 × cp2, zero1",
    "ep4 of 2 × cp2, zero3",
}
"""Slow: what differs in them the others show, too."""
ON_FOUR = [name for name, ranks in OTHER_WAYS if ranks == 4]
SOONER = [layout for layout in TP_OTHERWISE[4] if layout not in AGAIN]
LATER = [layout for layout in TP_OTHERWISE[4] if layout in AGAIN]


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    [
        *cells({"top-k": TP_OTHERWISE[2]}, 2),
        *cells(dict.fromkeys(ON_FOUR, SOONER), 4),
        *(pytest.param(name, LATER, 4, marks=SLOW, id=f"{name}, again") for name in ON_FOUR),
    ],
)
def test_tensor_parallel_ranks_take_experts_in_other_ways(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: TP_OTHERWISE[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=300.0)[0] == layouts


OF_WHOLE_ROWS = ("ep2 × cp2, zero0", "ep4 of tp2 × cp2")


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("by batch", [layout for layout in CONTEXTS if layout not in AGAIN]),
        ("switch", [*OF_WHOLE_ROWS]),
        pytest.param("by batch", [layout for layout in CONTEXTS if layout in AGAIN], marks=SLOW),
        pytest.param("switch", [layout for layout in CONTEXTS if layout not in OF_WHOLE_ROWS], marks=SLOW),
        *(pytest.param(name, [*CONTEXTS], marks=SLOW) for name in ON_PARTS if name != "switch"),
        ("expert-choice", [*OF_WHOLE_ROWS]),
        pytest.param(
            "expert-choice", [layout for layout in CONTEXTS if layout not in OF_WHOLE_ROWS], marks=SLOW
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} layouts",
)
def test_rows_are_cut_beside_experts(workers: Workers, name: str, layouts: list[str]) -> None:
    """Also where a capacity, and the balance of each row, follow from all tokens of rows."""
    tried = {layout: CONTEXTS[layout] for layout in layouts}
    assert workers.run(compare, 4, name, tried, timeout=300.0)[0] == layouts


def resume(folder: Path, name: str, parallel: ParallelConfig, between: ParallelConfig) -> list[str]:
    """Two steps, a checkpoint (which another layout opens and saves), a third step: the bits of three steps."""
    config = MODELS[name]
    batch = batch_for(config)
    objective = objective_for(config, batch)

    def train(engine: NativeEngine) -> None:
        engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
        engine.step(1e-2, clip=0.3)

    engine = test_layouts.make_engine(config, parallel, test_layouts.ADAMW)
    for _ in range(2):
        train(engine)
    kept = engine
    for step, layout in enumerate((between, parallel), 1):
        path = checkpoint.save(folder, step, kept.state_dict(), {}, keep=3)
        kept = test_layouts.make_engine(config, layout, test_layouts.ADAMW)
        room = kept.empty_state_dict(checkpoint.names(path))
        checkpoint.load(path, room)
        kept.load_state_dict(room)
    train(engine)
    train(kept)
    after = kept.weights()
    assert after.keys() == engine.weights().keys()
    for key, box in engine.weights().items():
        assert torch.equal(box.tensor, after[key].tensor), key
    found = checkpoint.names(folder / "step-00000001")
    return [key for key in found if key.endswith((".shares", ".router.bias"))]


RESUMED = {
    "tp2": (TP2, ParallelConfig(dp_shard=2, zero=1)),
    "zero3": (ParallelConfig(dp_shard=2), TP2),
    "ep2": (ParallelConfig(dp_shard=2, ep=2), ParallelConfig(dp_shard=2, zero=1)),
    "ep2 between": (ParallelConfig(dp_shard=2, zero=0), ParallelConfig(dp_shard=2, ep=2, zero=1)),
    "ep2 of tp2, channels between": (TP_OTHERWISE[2]["ep2 of tp2"], TP_OTHERWISE[2]["tp2 by channels"]),
}


STATE = {"top-k": "shares", "deepseek-v3": "router.bias"}


@pytest.mark.parametrize(("name", "layouts"), cells(dict.fromkeys(STATE, RESUMED)))
def test_a_resumed_run_has_the_same_bits(
    workers: Workers, tmp_path: Path, name: str, layouts: list[str]
) -> None:
    """Through a checkpoint that another layout has opened and saved as it was."""
    for i, layout in enumerate(layouts):
        stored = workers.run(resume, 2, tmp_path / str(i), name, *RESUMED[layout], timeout=180.0)[0]
        assert stored == [f"model.decoder.layers.1.ffn.{STATE[name]}"]


def count_one_rank_s_choices(patch: Patch) -> None:
    """The shares that the next step is balanced by are those of one rank alone."""
    patch.setattr(Mesh, "all_reduce_", lambda self, tensor, axes: None, raising=True)


def balance_parts_as_if_they_were_rows(patch: Patch) -> None:
    """A rank's part of the tokens has the shape of rows, but is the first of them."""
    patch.setattr(TensorParallelGroup, "row_sums", lambda self, x_BTX: x_BTX.sum(1))


def give_each_rank_the_first_experts(patch: Patch) -> None:
    genuine = Experts.forward

    def forward(self: Experts, *inputs: Tensor) -> Any:
        self.first = 0
        return genuine(self, *inputs)

    patch.setattr(Experts, "forward", forward)


def forget_the_weights_other_shares(patch: Patch) -> None:
    """The gradient of what experts are weighted by is that of the own experts alone."""
    genuine = TensorParallelGroup.gather_input

    def enter(self: TensorParallelGroup, x: Tensor) -> Tensor:
        return self.gather_replicated(x) if x.shape[-1] == MOE["top_k"] else genuine(self, x)

    patch.setattr(TensorParallelGroup, "gather_input", enter)


def take_experts_for_everybody_s(patch: Patch) -> None:
    """Gradients of experts are summed over ranks that hold others."""
    patch.setattr(expert_parallel, "EXPERT_DATA_AXES", DENSE_DATA_AXES)


def average_over_the_ranks_of_experts(patch: Patch) -> None:
    real = FSDPModule.set_gradient_divide_factor

    def divide(self: FSDPModule, factor: float) -> None:
        real(self, 2.0 if isinstance(self, Experts) else factor)

    patch.setattr(FSDPModule, "set_gradient_divide_factor", divide)


def leave_rows_in_the_order_of_experts(patch: Patch) -> None:
    genuine = expert_parallel.expert_order

    def unsorted(counts_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        order_R, _ = genuine(counts_PE, rows)
        return order_R, torch.arange(rows)

    patch.setattr(expert_parallel, "expert_order", unsorted)


def bring_gradients_back_in_another_order(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradient = collectives.all_to_all_no_grad(gradient, ctx.received, ctx.sent, ctx.group)
        return gradient.flip(0), None, None, None

    patch.setattr(collectives._ExchangeRows, "backward", staticmethod(backward))


EP2 = ParallelConfig(dp_shard=2, ep=2)
MATRICES = {f"decoder.layers.1.ffn.experts.{key}" for key in ("w_gate", "w_up", "w_down")}
ROUTER, BELOW = "decoder.layers.1.ffn.router.weight", "decoder.layers.0.ffn.w_up.weight"
FAULTS: dict[Callable[[Patch], None], tuple[ParallelConfig, str]] = {
    count_one_rank_s_choices: (ParallelConfig(dp_shard=2, zero=3), ROUTER),
    balance_parts_as_if_they_were_rows: (TP2, ROUTER),
    give_each_rank_the_first_experts: (TP2, ROUTER),
    forget_the_weights_other_shares: (TP2, ROUTER),
    leave_rows_in_the_order_of_experts: (EP2, ROUTER),
    bring_gradients_back_in_another_order: (EP2, BELOW),
}
"""With a layout that shows it, and a weight whose gradient is wrong."""
OF_EXPERTS_ALONE: dict[Callable[[Patch], None], ParallelConfig] = {
    take_experts_for_everybody_s: ParallelConfig(dp_shard=2, ep=2, zero=0),
    average_over_the_ranks_of_experts: EP2,
}


def wrong(fault: str | None, parallel: ParallelConfig, name: str = "top-k") -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        if fault == count_one_rank_s_choices.__name__:
            patch.setattr(base.ModuleState, "update", of_one_rank(base.ModuleState.update))
        elif fault:
            globals()[fault](patch)
        model, objective, _ = one_device(MODELS[name], batch_for(MODELS[name]))
        engine, _ = second_step(name, parallel, objective)
        return set(test_pipelines.errors(engine, model))


def of_one_rank(update: Any) -> Any:
    def alone(self: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            count_one_rank_s_choices(patch)
            update(self)

    return alone


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    layout, wanted = FAULTS[fault]
    found = set[str]().union(*workers.run(wrong, 2, fault.__name__, layout, timeout=120.0))
    assert wanted in found


@pytest.mark.parametrize("fault", OF_EXPERTS_ALONE, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_experts_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    found = workers.run(wrong, 2, fault.__name__, OF_EXPERTS_ALONE[fault], timeout=120.0)
    assert set[str]().union(*found) == MATRICES


def send_gradients_as_many_as_tokens(patch: Patch) -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return collectives.all_to_all_no_grad(gradient, ctx.sent, ctx.received, ctx.group), None, None, None

    patch.setattr(collectives._ExchangeRows, "backward", staticmethod(backward))


def test_swapped_numbers_of_rows_are_loud(workers: Workers) -> None:
    with pytest.raises(Exception, match="Split sizes doesn't match total dim 0 size"):
        workers.run(wrong, 2, send_gradients_as_many_as_tokens.__name__, EP2, timeout=120.0)


def add_the_last_bias_everywhere(patch: Patch) -> None:
    patch.setattr(
        Experts, "down_bias_scale", property(lambda self: 1.0, lambda self, share: None), raising=False
    )


def limit_each_part_of_a_row(patch: Patch) -> None:
    """A capacity is filled by a rank's own tokens alone."""
    patch.setattr(TensorParallelGroup, "gather_replicated", lambda self, x: torch.cat([x, x], 1))


OF_OTHER_WAYS: dict[Callable[[Patch], None], tuple[str, str, str]] = {
    add_the_last_bias_everywhere: ("deepseek-v3", "tp2 by channels", "experts.b_down"),
    limit_each_part_of_a_row: ("switch", "ep2 of tp2", "experts.w_up"),
}


@pytest.mark.parametrize("fault", OF_OTHER_WAYS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_other_ways_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    name, layout, wanted = OF_OTHER_WAYS[fault]
    found = workers.run(wrong, 2, fault.__name__, TP_OTHERWISE[2][layout], name, timeout=120.0)
    assert any(one.endswith(wanted) for one in set[str]().union(*found))


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    for layout in (TP2, EP2):
        assert workers.run(wrong, 2, None, layout, timeout=120.0) == [set(), set()]


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        pytest.param({"tp": 2, "sequence_parallel": False}, marks=SLOW),
        {"dp_shard": -1, "ep": 2},
    ],
)
def test_verify_finds_the_same_computation_and_every_byte(layout: dict[str, Any]) -> None:
    values = {
        "name": "experts",
        "model": MODELS["deepseek-v3"].model_dump(exclude_none=True),
        "data": {"train": "x", "tokenizer": "x", "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 2, "recompute": "full"},
        "parallel": {"dp_shard": 1, **layout},
    }
    found = verify(Config.model_validate(values))
    assert not found.wrong
    assert not found.traffic_mismatches
    assert not found.axes_without_closed_form


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "decoder": CausalObjective,
    "encoder": MaskedObjective,
    "encoder_decoder": SpanCorruptionObjective,
}


def traffic_of(name: str, parallel: ParallelConfig, **options: Any) -> Config:
    config = MODELS[name]
    return test_traffic.config_of(config, OBJECTIVES[config.family](), parallel, **options)


COUNTED = {
    "ep2 of 4, zero0",
    "ep2 of 4, zero3",
    "ep4, zero1",
    "ep4, zero2",
    "ep2 × replicas",
    "ep2 × tp2",
    "ep2 × tp2 without sequence parallel",
    "ep2 × pp2, zbv",
    "ep2 × pp2, zero1",
    "switch",
    # Where tensor-parallel ranks take experts otherwise, and where rows are cut:
    "ep2 × tp2 by channels, zero0",
    "tp2 by channels × zero3",
    "tp2 by channels × pp2",
    "ep4 of 2 × tp2, zero1",
    "ep2 of 2 × tp2, zero3",
    "ep2 of tp4",
    "ep2 of tp2 × replicas",
    "ep2 of tp2 × pp2, zbv",
    "ep2 × cp2, zero0",
    "ep2 × cp2 × tp2, by channels",
    "ep4 of tp2 × cp2",
    "switch, folded",
    "muon, channels",
    "muon × cp",
    "switch, ep4 of tp2 × cp2, full",
    "deepseek-v3, ep2 × cp2, zero0, none",
    "expert-choice, ep4 of tp2 × cp2, full",
}
"""Of four ranks: the others are slow."""


def of_these(configs: dict[str, Any], ranks: int, others: bool) -> dict[str, Any]:
    return {name: one for name, one in configs.items() if ranks != 4 or (name in COUNTED) != others}


PARTS_OF_FOUR = [pytest.param(4, False, id="4"), pytest.param(4, True, id="4, the others", marks=SLOW)]


@pytest.mark.parametrize(
    ("ranks", "others"), [(2, False), *PARTS_OF_FOUR, pytest.param(8, False, id="8", marks=SLOW)]
)
def test_tokens_travel_as_the_routers_say(workers: Workers, ranks: int, others: bool) -> None:
    """Bytes on each rank, by a count of what the plain model's routers choose."""
    layouts = EXPERTS_OVER_RANKS[ranks]
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in layouts.items()}
    muon = layouts["ep2, zero3"] if ranks == 2 else next(iter(layouts.values()))
    configs["muon"] = traffic_of("top-k", muon, optimizer=test_layouts.MUON)
    if ranks < 8:
        configs |= {name: traffic_of(name, list(layouts.values())[-1]) for name in ("deepseek-v3", "switch")}
    if ranks == 2:
        selective = {"recompute": "selective"}
        configs |= {
            f"selective, zero{z}": traffic_of("top-k", layouts[f"ep2, zero{z}"], **selective) for z in (2, 3)
        }
        # Of what tensor-parallel ranks sum in norms over all heads, which selective recomputation keeps.
        configs["selective, tp2"] = traffic_of("deepseek-v3", with_tp(0, dp_shard=1), **selective)
    assert test_traffic.missed(workers, ranks, of_these(configs, ranks, others)) == {}


@pytest.mark.parametrize(("ranks", "others"), [(2, False), *PARTS_OF_FOUR])
def test_tokens_travel_between_tensor_parallel_ranks_as_the_routers_say(
    workers: Workers, ranks: int, others: bool
) -> None:
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in TP_OTHERWISE[ranks].items()}
    if ranks == 4:
        configs |= {layout: traffic_of("by batch", parallel) for layout, parallel in CONTEXTS.items()}
        limited = {"folded": "ep4 of 2 × tp2, zero3", "channels": "ep2 × tp2 by channels, zero1"}
        for way, layout in limited.items():
            configs[f"switch, {way}"] = traffic_of("switch", TP_OTHERWISE[4][layout], recompute="full")
            configs[f"muon, {way}"] = traffic_of(
                "deepseek-v3", TP_OTHERWISE[4][layout], optimizer=test_layouts.MUON
            )
        configs |= {
            f"{name}, {layout}, {how}": traffic_of(name, CONTEXTS[layout], recompute=how)
            for name in ("switch", "deepseek-v3", "expert-choice")
            for layout in OF_WHOLE_ROWS
            for how in ("none", "full")
        }
        configs["muon × cp"] = traffic_of(
            "by batch", CONTEXTS["ep4 of 2 × cp2, zero1"], optimizer=test_layouts.MUON
        )
    assert test_traffic.missed(workers, ranks, of_these(configs, ranks, others)) == {}


def one_choice_for_all(name: str, layouts: dict[str, ParallelConfig]) -> None:
    """All scores tie: every token goes through the first experts, on one rank, and no other rank has a row."""
    config = MODELS[name]
    batch = batch_for(config)
    for layout, parallel in layouts.items():
        model, objective = initial_model(config), objective_for(config, batch)
        engine = test_layouts.make_engine(config, parallel, test_layouts.ADAMW)
        own = engine.weights()
        for path in mixtures(model):
            torch.nn.init.zeros_(model.get_parameter(f"{path}.router.weight"))
            own[f"{path}.router.weight"].tensor.zero_()
        engine.weights_changed()
        loss = loss_of(objective, model.train(), batch)
        loss.backward()
        found = engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
        assert found.loss == pytest.approx(loss.item(), rel=1e-12), layout
        assert test_pipelines.errors(engine, model) == {}, layout
        for path, module in mixtures(model).items():
            idle, chosen = module.observed["load"] == 0, module.router.top_k
            assert idle.tolist() == [False] * chosen + [True] * (len(idle) - chosen), "ties go to the first"
            assert (module.observed["dropped"] > 0) == module.experts.has_capacity
            gradient = model.get_parameter(f"{path}.experts.w_up").grad
            assert gradient is not None
            assert gradient[~idle].abs().sum() > 0 == gradient[idle].abs().sum()


IDLE = {
    2: EXPERTS_OVER_RANKS[2] | TP_OTHERWISE[2],
    4: {layout: each for layout, each in EXPERTS_OVER_RANKS[4].items() if each.pp == 1},
}


@pytest.mark.parametrize(("ranks", "others"), [(2, False), *PARTS_OF_FOUR])
def test_one_rank_has_all_rows_and_others_none(workers: Workers, ranks: int, others: bool) -> None:
    workers.run(one_choice_for_all, ranks, "top-k", of_these(IDLE[ranks], ranks, others), timeout=180.0)


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["ep2, zero0", "ep2 of tp2"]),
        pytest.param(2, ["ep2, zero3", "tp2 by channels"], marks=SLOW),
        pytest.param(4, [*IDLE[4], *TP_OTHERWISE[4], *CONTEXTS], marks=SLOW),
    ],
    ids=["2", "2, the others", "4"],
)
def test_one_rank_has_what_a_capacity_leaves(workers: Workers, ranks: int, layouts: list[str]) -> None:
    every = {**EXPERTS_OVER_RANKS[ranks], **TP_OTHERWISE[ranks], **(CONTEXTS if ranks == 4 else {})}
    tried = {layout: every[layout] for layout in layouts if every[layout].pp == 1}
    workers.run(one_choice_for_all, ranks, "switch", tried, timeout=300.0)


def moved(parallel: ParallelConfig) -> None:
    """Two steps of Muon move a rank's blocks as they move those of whole experts on each rank."""
    config = MODELS["top-k"]
    batch = batch_for(config)
    objective = objective_for(config, batch)
    engines = [
        test_layouts.make_engine(config, layout, test_layouts.MUON)
        for layout in (parallel, ParallelConfig(dp_shard=2, zero=0))
    ]
    for engine in engines:
        for _ in range(2):
            engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
            engine.step(1e-2, clip=0.3)
    cut, whole = engines
    for name in MATRICES:
        wanted = test_layouts.block(cut, name, whole.local[name])
        torch.testing.assert_close(cut.local[name], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", [EP2, *TP_OTHERWISE[2].values()], ids=["ep2", *TP_OTHERWISE[2]])
def test_muon_moves_experts_wherever_they_are(workers: Workers, layout: ParallelConfig) -> None:
    workers.run(moved, 2, layout, timeout=120.0)


def compiled(name: str, layouts: dict[str, ParallelConfig], backend: str) -> int:
    """Blocks are compiled around their experts, without a backend that makes machine code."""
    blocks = []

    def compile_block(block: nn.Module, *, fullgraph: bool, dynamic: bool) -> None:
        blocks.append(fullgraph)
        block._compiled_call_impl = torch.compile(
            block._call_impl, fullgraph=fullgraph, dynamic=dynamic, backend=backend
        )

    config = MODELS[name]
    batch = batch_for(config)
    model, objective = initial_model(config).train(), objective_for(config, batch)
    loss = loss_of(objective, model, batch)
    loss.backward()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
        patch.setattr(nn.Module, "compile", compile_block)
        for layout, parallel in layouts.items():
            engine = test_layouts.make_engine(config, parallel, test_layouts.ADAMW, compile_blocks=True)
            found = engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
            assert found.loss == pytest.approx(loss.item(), rel=1e-12), layout
            assert test_pipelines.errors(engine, model) == {}, layout
            torch._dynamo.reset()
    assert blocks == [True, False] * (config.n_layers // 2) * len(layouts), "dense ones in one piece"
    return len(blocks)


COMPILED = {"ep2": EP2, "zero3": ParallelConfig(dp_shard=2), "tp2": TP2}


@pytest.mark.parametrize(
    ("layouts", "backend"),
    [(["ep2"], "eager"), pytest.param([*COMPILED], "aot_eager", marks=SLOW)],
    ids=["as dynamo has it", "through autograd's graphs"],
)
def test_blocks_are_compiled_around_their_experts(workers: Workers, layouts: list[str], backend: str) -> None:
    tried = {layout: COMPILED[layout] for layout in layouts}
    assert workers.run(compiled, 2, "top-k", tried, backend, timeout=280.0)[0] == 2 * len(layouts)


def order_of_events() -> list[str]:
    """Of what is sent with dropped-in work, and of that work: the shared experts' forward and backward passes."""
    config, events = MODELS["deepseek-v3"], list[str]()
    batch = batch_for(config)
    objective = objective_for(config, batch)
    engine = test_layouts.make_engine(config, ParallelConfig(dp_shard=2, ep=2, zero=0), test_layouts.ADAMW)

    def noted(word: str, genuine: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            events.append(word)
            return genuine(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for word in ("start", "wait"):
            patch.setattr(
                collectives._AsyncAllToAll, word, noted(word, getattr(collectives._AsyncAllToAll, word))
            )
        for module in mixtures(engine.model).values():
            assert module.shared is not None
            module.shared.register_forward_hook(lambda *_: events.append("shared"))
            for weight in module.shared.parameters():
                weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        engine.forward_backward(test_layouts.microbatches(engine, batch)[:1], objective)
    return events


def test_shared_experts_are_computed_while_rows_travel(workers: Workers) -> None:
    """In the backward pass, while gradients of rows travel, so are those of the weights of shared experts."""
    found = list(mixtures(build(MODELS["deepseek-v3"])).values())
    assert found[0].shared is not None
    weights = len(list(found[0].shared.parameters()))
    forward, backward = ["start", "shared", "wait"], ["start", *["gradient"] * weights, "wait"]
    events = workers.run(order_of_events, 2, timeout=120.0)[0]
    assert events == forward * len(found) + backward * len(found)
