"""State that no gradient moves, and root mean squares by layer, under every kind of layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm import checkpoint
from megatfm.config import ModelConfig, ParallelConfig
from megatfm.config.objective import CausalObjective
from megatfm.engines.interface import CountingModule
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.state import ModuleState
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import Constant
from megatfm.layers.norm import NORMS
from megatfm.parallel.layout import ModelLayout, iter_blocks
from megatfm.parallel.mesh import build_mesh
from megatfm.train.resilience import compare_replicas
from megatfm.verify.expected import compute_expected_traffic
from megatfm.verify.rank_processes import RankResult
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import find_traffic_mismatches
from tests.support.batches import CAUSAL, family_case, global_batch
from tests.support.layouts import count_traffic, extend, traffic_config
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    local_block,
    microbatches,
    one_device,
    one_device_gradients,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.sharded_engines import load_checkpoint
from tests.support.workers import Workers


@NORMS.register("drifting")
class DriftingNorm(nn.Module):
    """RMSNorm, and a shift that grows with all tokens and all positive numbers that were ever trained on."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps, self.observed = eps, dict[str, Tensor]()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.register_buffer("drift", torch.empty(2))
        self.initial = {"weight": Constant(1.0), "drift": Constant(0.25)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            tokens = torch.tensor(x.shape[0] * x.shape[1])
            self.accumulate_counts({"tokens": tokens, "positive": (x.detach() > 0).sum()})
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) + self.drift.sum()

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        for name, count in counts.items():
            self.observed[name] = self.observed.get(name, 0) + count

    def update(self, observed: Mapping[str, Tensor]) -> None:
        self.drift += 1e-3 * torch.stack([observed["tokens"], observed["positive"] / 7])

    def reset_counts(self) -> None:
        self.observed = {}


DRIFTING = UNTIED_MODEL.with_changes({"norm.name": "drifting"})
DEEPER = DRIFTING.model_copy(update={"n_layers": 4})
SHARED = DEEPER.model_copy(update={"distinct_layers": 1})
LAYOUTS = {
    "one": (1, [ParallelConfig()]),
    "two": (2, [ParallelConfig(dp_shard=2, zero=1), ParallelConfig(dp_shard=2), ParallelConfig(tp=2)]),
    "two, further": (2, [ParallelConfig(dp_shard=2, zero=0), ParallelConfig(tp=2, sequence_parallel=False)]),
    "four": (4, [ParallelConfig(dp_replicate=2, dp_shard=2), ParallelConfig(dp_shard=2, tp=2)]),
}
"""Ranks and layouts."""
LR = 1e-2
STAGES = [ParallelConfig(pp=2), ParallelConfig(pp=2, pp_schedule="zbv")]


def reference_steps(config: ModelConfig) -> tuple[nn.Module, dict[str, Tensor]]:
    """One device after three steps, of which the second is skipped; its state by name."""
    model = one_device(config)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    remaining = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    options = {"betas": ADAMW.betas, "eps": ADAMW.eps, "weight_decay": ADAMW.weight_decay}
    optimizer = torch.optim.AdamW([{"params": decayed}, remaining], lr=LR, **options)  # type: ignore[arg-type]
    for step in range(3):
        one_device_gradients(model.train(), global_batch(seed=step))
        modules = [module for module in model.modules() if isinstance(module, CountingModule)]
        if step != 1:
            optimizer.step()
            with torch.no_grad():
                for module in modules:
                    module.update(module.observed)
        for module in modules:
            module.reset_counts()
    return model, {name: value for name, value in model.named_buffers() if name.endswith("drift")}


def take_steps(engine: NativeEngine) -> None:
    """Steps of which the last one is computed twice, as a replay does."""
    for step in range(3):
        batches = microbatches(engine, global_batch(seed=step))
        engine.forward_backward(batches, CAUSAL)
        if step == 2:
            engine.zero_grad()
            engine.forward_backward(batches, CAUSAL)
        engine.evaluate(batches, CAUSAL)
        engine.step(LR, clip=0.0, skip=step == 1)


def compare(config: ModelConfig, layouts: list[ParallelConfig], folder: Path) -> None:
    model, state = reference_steps(config)
    weights = dict(model.named_parameters())
    assert state
    assert all(float(value.min()) > 0.25 for value in state.values())
    for number, parallel in enumerate(layouts):
        engine = build_engine(config, parallel, ADAMW)
        take_steps(engine)
        sharded = engine.weights()
        drifts = {name: box.tensor for name, box in sharded.items() if name in state}
        assert drifts
        for name, drift in drifts.items():
            torch.testing.assert_close(drift, state[name], rtol=1e-12, atol=0.0, msg=f"{parallel}: {name}")
        for name, box in sharded.items():
            if name in weights:
                expected = local_block(engine, name, weights[name].detach())
                torch.testing.assert_close(box.tensor, expected, rtol=1e-7, atol=1e-9)
        stored = engine.state_dict()
        assert {f"model.{name}" for name in drifts} <= stored.keys()
        resumed = build_engine(config, parallel, ADAMW)
        load_checkpoint(resumed, checkpoint.save(folder / str(number), 3, stored, {}))
        for name, drift in drifts.items():
            assert torch.equal(resumed.weights()[name].tensor, drift)


@pytest.mark.parametrize("name", extend(LAYOUTS, kept=["one", "two"]))
def test_every_layout_counts_what_one_device_counts(workers: Workers, tmp_path: Path, name: str) -> None:
    ranks, layouts = LAYOUTS[name]
    workers.run(compare, ranks, DRIFTING, layouts, tmp_path)


@pytest.mark.parametrize("config", extend([DEEPER, SHARED], kept=[SHARED]), ids=["own", "shared"])
def test_stages_that_share_a_module_count_together(workers: Workers, tmp_path: Path, config: ModelConfig) -> None:
    workers.run(compare, 2, config, STAGES, tmp_path)


def flipped(parallel: ParallelConfig) -> str:
    engine = build_engine(DRIFTING, parallel, ADAMW)
    compare_replicas(engine, step=1, every=1)
    if dist.get_rank() == 1:
        engine.weights()["decoder.norm.drift"].tensor[0] += 1e-9
    try:
        compare_replicas(engine, step=2, every=1)
    except MegatfmError as error:
        return str(error)
    return "nothing was found"


def test_state_that_differs_between_ranks_is_found_where_weights_are_cut(workers: Workers) -> None:
    """Every data rank holds the same state under any ZeRO stage."""
    for result in workers.run(flipped, 3, ParallelConfig(dp_shard=3)):
        assert "rank 1 on " in result
        assert "model.decoder.norm.drift" in result


COUNTED = {
    2: {"zero0": traffic_config(DRIFTING, CausalObjective(), ParallelConfig(dp_shard=2, zero=0), plugins=[__name__]),
        "tp2": traffic_config(DRIFTING, CausalObjective(), ParallelConfig(tp=2, dp_shard=1), plugins=[__name__]),
        "pp2, shared": traffic_config(SHARED, CausalObjective(), ParallelConfig(pp=2, dp_shard=1),
                                      plugins=[__name__])},
    4: {"hsdp": traffic_config(DRIFTING, CausalObjective(), ParallelConfig(dp_replicate=2, dp_shard=2),
                               plugins=[__name__])},
}  # fmt: skip


def answers(ranks: int) -> list[RankResult]:
    return count_traffic(list(COUNTED[ranks].values()))


@pytest.mark.parametrize("ranks", COUNTED)
def test_traffic_of_module_state_is_what_verify_expects(workers: Workers, ranks: int) -> None:
    by_rank = workers.run(answers, ranks, ranks)
    for i, (layout, config) in enumerate(COUNTED[ranks].items()):
        expected = compute_expected_traffic(config, draw_batch(config))
        assert find_traffic_mismatches([answers[i] for answers in by_rank], expected) == [], layout


def stored_names() -> list[str]:
    return list(build_engine(UNTIED_MODEL.with_changes({"position.name": "alibi"}), ParallelConfig()).state_dict())


def test_a_plain_model_has_none(workers: Workers) -> None:
    (names,) = workers.run(stored_names, 1)
    assert names
    assert not any("slopes" in name for name in names)


class UnusedModule(nn.Module):
    """A counting module that no pass reached: it has observed nothing."""

    observed: Mapping[str, Tensor] = {}

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None: ...
    def reset_counts(self) -> None: ...

    def update(self, observed: Mapping[str, Tensor]) -> None:
        raise AssertionError(observed)


class UsedModule(UnusedModule):
    def __init__(self) -> None:
        super().__init__()
        self.observed = {"load": torch.ones(2)}

    def update(self, observed: Mapping[str, Tensor]) -> None:
        assert observed["load"].tolist() == [2.0, 2.0]

    def statistics(self, observed: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"load": observed["load"].tolist()}


def modules_that_no_pass_reached() -> dict[str, Any]:
    mesh = build_mesh(ParallelConfig(dp_shard=2), 2, "cpu")
    actual = {}
    for name, parts in (("idle", [UnusedModule()]), ("both", [UnusedModule(), UsedModule(), UnusedModule()])):
        state = ModuleState(nn.Sequential(*parts), ModelLayout({}, ""), mesh)
        state.update()
        actual[name] = state.statistics()
    return actual


def test_modules_that_no_pass_reached_are_left_out(workers: Workers) -> None:
    assert workers.run(modules_that_no_pass_reached, 2)[0] == {"idle": {}, "both": {"1": {"load": [2.0, 2.0]}}}


class CountingWithoutUpdate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.observed: dict[str, Tensor] = {}

    def accumulate_counts(self, counts: Mapping[str, Tensor]) -> None:
        self.observed = dict(counts)


def refuse_a_module_that_counts_for_nothing() -> str:
    mesh = build_mesh(ParallelConfig(), 1, "cpu")
    with pytest.raises(UsageError) as refused:
        ModuleState(nn.Sequential(CountingWithoutUpdate()), ModelLayout({}, ""), mesh)
    return str(refused.value)


def test_a_module_that_counts_but_lacks_methods_is_refused(workers: Workers) -> None:
    """Its state would never change, without a word."""
    assert workers.run(refuse_a_module_that_counts_for_nothing, 1) == [
        "0: CountingWithoutUpdate keeps counts, but lacks update, reset_counts"
    ]


# ---------------------------------------------------------------------------------------- statistics by layer


STATISTICS_LAYOUTS = [
    ParallelConfig(dp_shard=2, zero=0),
    ParallelConfig(dp_shard=2),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, sequence_parallel=False),
]
STATISTICS_STAGES = {2: STAGES, 4: [ParallelConfig(pp=2, tp=2), ParallelConfig(pp=2, dp_shard=2)]}


def one_device_statistics(config: ModelConfig) -> dict[str, dict[str, float]]:
    """By plain tensors: every parameter and gradient of a layer in one vector."""
    model, batch = one_device(config), global_batch(seed=3)
    outputs = {}
    for path, module in model.named_modules():
        if module in set(iter_blocks(model)):
            module.register_forward_hook(lambda _, __, y, path=path: outputs.update({path: y.detach()}))
    _, gradients = one_device_gradients(model, batch)
    actual: dict[str, dict[str, float]] = {}
    layers = ["decoder.embedding", "decoder.layers.0", "decoder.layers.1", "decoder.norm", "head"]
    for layer in layers:
        names = [name for name, _ in model.named_parameters() if name.startswith(f"{layer}.")]
        if not names:  # a tied head
            continue
        weights = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
        gradient = torch.cat([gradients[name].flatten() for name in names])
        actual[layer] = {"weight": float(weights.square().mean() ** 0.5)}
        actual[layer]["gradient"] = float(gradient.square().mean() ** 0.5)
        if layer in outputs:
            actual[layer]["activation"] = float(outputs[layer].square().mean() ** 0.5)
    return actual


def compare_statistics(config: ModelConfig, layouts: list[ParallelConfig]) -> None:
    expected_statistics = one_device_statistics(config)
    for parallel in layouts:
        engine = build_engine(config, parallel, ADAMW)
        for watches in (True, False):
            engine.forward_backward(microbatches(engine, global_batch(seed=3)), CAUSAL, record_activations=watches)
            statistics = engine.layer_statistics()
            engine.zero_grad()
            assert statistics.keys() == expected_statistics.keys()
            for layer, kinds in statistics.items():
                assert set(kinds) == set(expected_statistics[layer]) - (set() if watches else {"activation"})
                for kind, value in kinds.items():
                    assert value == pytest.approx(expected_statistics[layer][kind], rel=1e-9), (parallel, layer, kind)


def test_norms_are_those_of_one_device(workers: Workers) -> None:
    workers.run(compare_statistics, 2, UNTIED_MODEL, STATISTICS_LAYOUTS)


@pytest.mark.parametrize("ranks", STATISTICS_STAGES)
def test_norms_over_pipeline_stages_are_those_of_one_device(workers: Workers, ranks: int) -> None:
    """Every rank knows all layers by their global names; a tied table, which two stages hold, counts once."""
    workers.run(compare_statistics, ranks, TIED_MODEL, STATISTICS_STAGES[ranks])


def compare_content() -> None:
    """XLNet's blocks give two streams; what the second one is padded with depends on the micro-batch."""
    config, batch = family_case("xlnet", False)
    model, objective, _ = one_device_reference(config, batch)
    outputs: dict[str, Tensor] = {}
    inside = set(iter_blocks(model))
    for path, module in model.named_modules():
        if module in inside:
            module.register_forward_hook(lambda _, __, streams, path=path: outputs.update({path: streams[0]}))
    with torch.no_grad():
        objective(model, batch)
    engine = build_engine(config, ParallelConfig(dp_shard=2), ADAMW)
    engine.forward_backward(uneven_microbatches(engine, batch), objective, record_activations=True)
    statistics = engine.layer_statistics()
    *earlier, last = outputs
    assert earlier
    for path in earlier:
        assert statistics[path]["activation"] == pytest.approx(float(outputs[path].square().mean() ** 0.5), rel=1e-9)
    assert outputs[last] is None
    assert "activation" not in statistics[last]


def test_the_content_stream_counts(workers: Workers) -> None:
    workers.run(compare_content, 2)
