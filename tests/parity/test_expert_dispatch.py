"""Experts that have no token or all of them, and every byte that travels to experts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import Config, ParallelConfig
from megatfm.config.objective import CausalObjective, MaskedObjective, SpanCorruptionObjective
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.moe import experts
from megatfm.models import build
from megatfm.ops.moe import grouped_linear
from megatfm.parallel import collectives
from megatfm.verify.verify import verify
from tests.support import expert_parity
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    EP2,
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    EXTENDED_LAYOUTS,
    QUICK_LAYOUTS,
    TP2,
    WHOLE_ROW_LAYOUTS,
    moe_layers,
    objective_for,
    second_step,
    tensor_parallel_layout,
    weighted_loss,
)
from tests.support.layouts import EXTENDED, SLOW, list_traffic_mismatches, traffic_config
from tests.support.models import ADAMW, MUON
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    local_block,
    microbatches,
    model_gradient_errors,
    one_device,
)
from tests.support.workers import Workers

EXPERT_MATRICES = {f"decoder.layers.1.ffn.experts.{key}" for key in ("w_gate", "w_up", "w_down")}


def make_four_rank_configs(configs: dict[str, Any], ranks: int, tier: str) -> dict[str, Any]:
    """Configs of a case: of four ranks, those of a tier."""
    tiers = dict.fromkeys(QUICK_LAYOUTS, "quick") | dict.fromkeys(EXTENDED_LAYOUTS, "extended")
    return {name: config for name, config in configs.items() if ranks != 4 or tiers.get(name, "slow") == tier}


PARTS_OF_FOUR = [
    pytest.param(4, "quick", id="4"),
    pytest.param(4, "extended", id="4, extended", marks=EXTENDED),
    pytest.param(4, "slow", id="4, the others", marks=SLOW),
]


def check_tied_routing(name: str, layouts: dict[str, ParallelConfig]) -> None:
    """All scores tie: every token goes through the first experts, on one rank, and no other rank has a row."""
    config = EXPERT_MODELS[name]
    batch = family_batch(config)
    for layout, parallel in layouts.items():
        model, objective = one_device(config), objective_for(config, batch)
        engine = build_engine(config, parallel, ADAMW)
        weights = engine.weights()
        for path in moe_layers(model):
            torch.nn.init.zeros_(model.get_parameter(f"{path}.router.weight"))
            weights[f"{path}.router.weight"].tensor.zero_()
        engine.sync_weights()
        loss = weighted_loss(objective, model.train(), batch)
        loss.backward()
        actual = engine.forward_backward(microbatches(engine, batch), objective)
        assert actual.loss == pytest.approx(loss.item(), rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
        for path, module in moe_layers(model).items():
            idle, chosen = module.observed["load"] == 0, module.router.top_k
            assert idle.tolist() == [False] * chosen + [True] * (len(idle) - chosen), "ties go to the first"
            assert (module.observed["dropped"] > 0) == module.experts.has_capacity
            gradient = model.get_parameter(f"{path}.experts.w_up").grad
            assert gradient is not None
            assert gradient[~idle].abs().sum() > 0 == gradient[idle].abs().sum()


IDLE = {
    2: EXPERT_LAYOUTS[2] | EXPERT_TP_LAYOUTS[2],
    4: {layout: value for layout, value in EXPERT_LAYOUTS[4].items() if value.pp == 1},
}


@pytest.mark.parametrize(("ranks", "tier"), [(2, "quick"), *PARTS_OF_FOUR])
def test_one_rank_has_all_rows_and_others_none(workers: Workers, ranks: int, tier: str) -> None:
    workers.run(check_tied_routing, ranks, "top-k", make_four_rank_configs(IDLE[ranks], ranks, tier), timeout=180.0)


@pytest.mark.parametrize(("ranks", "layouts"), [
    (2, ["ep2, zero0", "ep2 of tp2"]),
    pytest.param(2, ["ep2, zero3", "tp2 by channels"], marks=SLOW),
    pytest.param(4, [*IDLE[4], *EXPERT_TP_LAYOUTS[4], *EXPERT_CONTEXT_LAYOUTS], marks=SLOW),
], ids=["2", "2, the others", "4"])  # fmt: skip
def test_one_rank_has_what_a_capacity_leaves(workers: Workers, ranks: int, layouts: list[str]) -> None:
    every = {**EXPERT_LAYOUTS[ranks], **EXPERT_TP_LAYOUTS[ranks], **(EXPERT_CONTEXT_LAYOUTS if ranks == 4 else {})}
    tried = {layout: every[layout] for layout in layouts if every[layout].pp == 1}
    workers.run(check_tied_routing, ranks, "switch", tried, timeout=300.0)


def leave_rows_undefined(rows_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """A grouped product as kernels of GPUs leave it: rows beyond the last group's are not written."""
    defined_MO = grouped_linear(rows_MI, weight_GOI, ends_G)[: int(ends_G[-1])]
    return torch.cat([defined_MO, defined_MO.new_full((len(rows_MI) - len(defined_MO), defined_MO.shape[1]), math.nan)])


def compare_as_on_a_gpu(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """One device cuts rows of dropped choices off; here the host does not know their number."""
    with pytest.MonkeyPatch.context() as patch:

        def run_on_a_gpu(*case: Any) -> tuple[NativeEngine, list[float]]:
            with pytest.MonkeyPatch.context() as device:
                device.setattr(experts, "is_host_readable", lambda _: False)
                device.setattr(experts, "grouped_linear", leave_rows_undefined)
                return second_step(*case)

        patch.setattr(expert_parity, "second_step", run_on_a_gpu)
        return expert_parity.compare_expert_layouts(name, layouts)


@pytest.mark.parametrize("name", ["top-k", "switch"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_dropped_choices_are_nothing_on_a_gpu(workers: Workers, name: str, ranks: int) -> None:
    layouts = {"ep": ParallelConfig(dp_shard=ranks, ep=ranks), "replicas": ParallelConfig(dp_shard=ranks, zero=0)}
    assert workers.run(compare_as_on_a_gpu, ranks, name, layouts, timeout=120.0) == [[*layouts]] * ranks


def moved(parallel: ParallelConfig) -> None:
    """Two steps of Muon move a rank's blocks as they move those of whole experts on each rank."""
    config = EXPERT_MODELS["top-k"]
    batch = family_batch(config)
    objective = objective_for(config, batch)
    engines = [build_engine(config, layout, MUON) for layout in (parallel, ParallelConfig(dp_shard=2, zero=0))]
    for engine in engines:
        for _ in range(2):
            engine.forward_backward(microbatches(engine, batch), objective)
            engine.step(1e-2, clip=0.3)
    cut, full = engines
    for name in EXPERT_MATRICES:
        expected = local_block(cut, name, full.local[name])
        torch.testing.assert_close(cut.local[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", [EP2, *EXPERT_TP_LAYOUTS[2].values()], ids=["ep2", *EXPERT_TP_LAYOUTS[2]])
def test_muon_updates_experts_on_any_rank(workers: Workers, layout: ParallelConfig) -> None:
    workers.run(moved, 2, layout, timeout=120.0)


def compiled(name: str, layouts: dict[str, ParallelConfig], backend: str, recomputed: str) -> None:
    """Blocks are compiled around their experts, without a backend that makes machine code."""
    config = EXPERT_MODELS[name]
    batch = family_batch(config)
    model, objective = one_device(config).train(), objective_for(config, batch)
    loss = weighted_loss(objective, model, batch)
    loss.backward()
    for layout, parallel in layouts.items():
        with compile_blocks_by(backend) as compilation:
            engine = build_engine(config, parallel, ADAMW, compile_blocks=True, recomputed=recomputed)
            actual = engine.forward_backward(microbatches(engine, batch), objective)
            assert actual.loss == pytest.approx(loss.item(), rel=1e-12), layout
            assert model_gradient_errors(engine, model) == {}, layout
        # A dense block is one graph; one with experts two before them, and two after.
        assert len(compilation.graphs) >= (1 + 4) * config.n_layers // 2, layout
        is_full = [options["fullgraph"] for _, options in compilation.blocks]
        assert is_full[: config.n_layers] == [True, False] * (config.n_layers // 2), "dense ones in one piece"


COMPILED = {"ep2": EP2, "zero3": ParallelConfig(dp_shard=2), "tp2": TP2}


@pytest.mark.parametrize(
    ("name", "layouts", "backend", "recomputed"),
    [
        ("top-k", ["ep2"], "eager", "none"),
        ("top-k", ["ep2"], "eager", "full"),
        pytest.param("top-k", ["ep2"], "aot_eager", "selective", marks=EXTENDED),
        *(pytest.param("top-k", [*COMPILED], "aot_eager", how, marks=SLOW) for how in ("none", "full", "selective")),
        *(pytest.param("deepseek-v3", ["ep2"], "aot_eager", how, marks=SLOW) for how in ("full", "selective")),
    ],
)
def test_blocks_are_compiled_around_their_experts(
    workers: Workers, name: str, layouts: list[str], backend: str, recomputed: str
) -> None:
    tried = {layout: COMPILED[layout] for layout in layouts}
    workers.run(compiled, 2, name, tried, backend, recomputed, timeout=500.0)


def order_of_events() -> list[str]:
    """Sends that other work overlaps, and that work: the shared experts' forward and backward passes."""
    config, events = EXPERT_MODELS["deepseek-v3"], list[str]()
    batch = family_batch(config)
    objective = objective_for(config, batch)
    engine = build_engine(config, ParallelConfig(dp_shard=2, ep=2, zero=0), ADAMW)

    def noted(word: str, genuine: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            events.append(word)
            return genuine(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for word in ("start", "wait"):
            patch.setattr(collectives._AsyncAllToAll, word, noted(word, getattr(collectives._AsyncAllToAll, word)))
        for module in moe_layers(engine.model).values():
            assert module.shared is not None
            module.shared.register_forward_hook(lambda *_: events.append("shared"))
            for weight in module.shared.parameters():
                weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        engine.forward_backward(microbatches(engine, batch)[:1], objective)
    return events


def test_shared_experts_are_computed_while_rows_travel(workers: Workers) -> None:
    """In the backward pass, while gradients of rows travel, so are those of the weights of shared experts."""
    actual = list(moe_layers(build(EXPERT_MODELS["deepseek-v3"])).values())
    assert actual[0].shared is not None
    weights = len(list(actual[0].shared.parameters()))
    forward, backward = ["start", "shared", "wait"], ["start", *["gradient"] * weights, "wait"]
    events = workers.run(order_of_events, 2, timeout=120.0)[0]
    assert events == forward * len(actual) + backward * len(actual)


# ---------------------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, pytest.param({"tp": 2, "sequence_parallel": False}, marks=SLOW), {"dp_shard": -1, "ep": 2}],
)  # fmt: skip
def test_verify_finds_the_same_computation_and_every_byte(layout: dict[str, Any]) -> None:
    values = {
        "name": "experts",
        "model": EXPERT_MODELS["deepseek-v3"].model_dump(exclude_none=True),
        "data": {"train": "x", "tokenizer": "x", "sequence_length": 32},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 2, "recompute": "full"},
        "parallel": {"dp_shard": 1, **layout},
    }
    actual = verify(Config.model_validate(values))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "decoder": CausalObjective,
    "encoder": MaskedObjective,
    "encoder_decoder": SpanCorruptionObjective,
}


def traffic_of(name: str, parallel: ParallelConfig, **options: Any) -> Config:
    config = EXPERT_MODELS[name]
    return traffic_config(config, OBJECTIVES[config.family](), parallel, **options)


@pytest.mark.parametrize(("ranks", "tier"), [(2, "quick"), *PARTS_OF_FOUR, pytest.param(8, "slow", id="8", marks=SLOW)])
def test_tokens_travel_as_the_routers_say(workers: Workers, ranks: int, tier: str) -> None:
    """Bytes on each rank, by a count of what the plain model's routers choose."""
    layouts = EXPERT_LAYOUTS[ranks]
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in layouts.items()}
    muon = layouts["ep2, zero3"] if ranks == 2 else next(iter(layouts.values()))
    configs["muon"] = traffic_of("top-k", muon, optimizer=MUON)
    if ranks < 8:
        configs |= {name: traffic_of(name, list(layouts.values())[-1]) for name in ("deepseek-v3", "switch")}
    if ranks == 2:
        selective = {"recompute": "selective"}
        configs |= {f"selective, zero{z}": traffic_of("top-k", layouts[f"ep2, zero{z}"], **selective) for z in (2, 3)}
        # Of what tensor-parallel ranks sum in norms over all heads, which selective recomputation keeps.
        configs["selective, tp2"] = traffic_of("deepseek-v3", tensor_parallel_layout(0, dp_shard=1), **selective)
    assert list_traffic_mismatches(workers, ranks, make_four_rank_configs(configs, ranks, tier)) == {}


@pytest.mark.parametrize(("ranks", "tier"), [(2, "quick"), *PARTS_OF_FOUR])
def test_tokens_travel_between_tensor_parallel_ranks_as_the_routers_say(
    workers: Workers, ranks: int, tier: str
) -> None:
    configs = {layout: traffic_of("top-k", parallel) for layout, parallel in EXPERT_TP_LAYOUTS[ranks].items()}
    if ranks == 4:
        configs |= {layout: traffic_of("by batch", parallel) for layout, parallel in EXPERT_CONTEXT_LAYOUTS.items()}
        limited = {"folded": "ep4 of 2 × tp2, zero3", "channels": "ep2 × tp2 by channels, zero1"}
        for way, layout in limited.items():
            configs[f"switch, {way}"] = traffic_of("switch", EXPERT_TP_LAYOUTS[4][layout], recompute="full")
            configs[f"muon, {way}"] = traffic_of("deepseek-v3", EXPERT_TP_LAYOUTS[4][layout], optimizer=MUON)
        configs |= {
            f"{name}, {layout}, {how}": traffic_of(name, EXPERT_CONTEXT_LAYOUTS[layout], recompute=how)
            for name in ("switch", "deepseek-v3", "expert-choice")
            for layout in WHOLE_ROW_LAYOUTS
            for how in ("none", "full")
        }
        configs["muon × cp"] = traffic_of("by batch", EXPERT_CONTEXT_LAYOUTS["ep4 of 2 × cp2, zero1"], optimizer=MUON)
    assert list_traffic_mismatches(workers, ranks, make_four_rank_configs(configs, ranks, tier)) == {}
