"""ZeRO over the ranks of `dp_shard` × `cp`: gradients, bytes on the wire, bytes of state on each rank, checkpoints."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import MuonConfig, OptimizerSection, ParallelConfig
from megatfm.config.objective import CausalObjective
from megatfm.models import build
from tests.support.context_parity import CONTEXT_MODELS, compare_context_layouts, context_case, context_microbatches
from tests.support.layouts import EXTENDED, list_traffic_mismatches, traffic_config
from tests.support.models import ADAMW
from tests.support.parity import build_engine
from tests.support.sharded_engines import load_checkpoint
from tests.support.workers import Workers

LAYOUTS = {
    2: {f"zero{zero} × cp2": ParallelConfig(dp_shard=1, cp=2, zero=zero) for zero in (1, 2, 3)},
    3: {f"zero{zero} × cp3": ParallelConfig(dp_shard=1, cp=3, zero=zero) for zero in (1, 2, 3)},
    4: {
        "zero0 2 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=0),
        "zero1 2 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=1),
        "zero2 2 × cp2, shards": ParallelConfig(dp_shard=2, cp=2, zero=2, grad_accumulation="sharded"),
        "zero3 2 × cp2": ParallelConfig(dp_shard=2, cp=2),
        "zero1 × cp2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=1, cp=2, zero=1),
        "zero3 × cp2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=1, cp=2),
        "zero1 × cp2 × tp2": ParallelConfig(dp_shard=1, cp=2, tp=2, zero=1),
        "zero3 × cp2 × tp2": ParallelConfig(dp_shard=1, cp=2, tp=2),
        "zero2 × cp2 × pp2": ParallelConfig(dp_shard=1, cp=2, pp=2, zero=2),
    },
    5: {f"zero{zero} × cp5": ParallelConfig(dp_shard=1, cp=5, zero=zero) for zero in (1, 2, 3)},
    8: {
        "zero1 2 × cp2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, zero=1),
        "zero3 2 × cp2 × replicas": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2),
    },
}
MUON = MuonConfig(lr=1e-2)
EXPERTS = {
    f"zero{zero} 2 × cp2 × ep{ep}": ParallelConfig(dp_shard=2, cp=2, zero=zero, ep=ep)
    for zero in (1, 3)
    for ep in (1, 2, 4)
}
GATHERED = {
    layout: LAYOUTS[4][layout]
    for layout in (
        "zero1 2 × cp2", "zero3 2 × cp2", "zero3 × cp2 × replicas", "zero1 × cp2 × tp2", "zero2 × cp2 × pp2",
    )
}  # fmt: skip
"""Layouts in which matrices are gathered, over ranks of each axis."""
RANKS = [2, 3, 4, *(pytest.param(ranks, marks=EXTENDED) for ranks in (5, 8))]


@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_equal_one_device(workers: Workers, ranks: int) -> None:
    layouts = LAYOUTS[ranks]
    assert workers.run(compare_context_layouts, ranks, "llama", layouts, timeout=180.0)[0] == [*layouts]


@pytest.mark.parametrize(("name", "ranks", "layouts", "optimizer"), [
    pytest.param("llama", 2, LAYOUTS[2], ADAMW, id="adamw on 2"),
    pytest.param("llama", 4, {k: v for k, v in LAYOUTS[4].items() if k not in GATHERED}, ADAMW, id="adamw on 4"),
    pytest.param("llama", 4, GATHERED, ADAMW, id="adamw on 4, layouts of Muon", marks=EXTENDED),
    pytest.param("llama", 4, GATHERED, MUON, id="muon on 4"),
    pytest.param("llama", 8, LAYOUTS[8], MUON, id="muon on 8", marks=EXTENDED),
    pytest.param("experts", 4, EXPERTS, MUON, id="experts and muon on 4", marks=EXTENDED),
])  # fmt: skip
def test_counted_traffic_is_expected(
    workers: Workers, name: str, ranks: int, layouts: Mapping[str, ParallelConfig], optimizer: OptimizerSection
) -> None:
    configs = {
        layout: traffic_config(CONTEXT_MODELS[name], CausalObjective(), parallel, optimizer=optimizer)
        for layout, parallel in layouts.items()
    }
    assert list_traffic_mismatches(workers, ranks, configs) == {}


def count_elements(layouts: Mapping[str, ParallelConfig]) -> dict[str, tuple[int, int, int]]:
    """Elements of stored weights, reduced gradients and AdamW's moments on this rank after a step."""
    config, batch, _, objective, _ = context_case("llama")
    counted = {}
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel, ADAMW)
        engine.forward_backward(context_microbatches(engine, batch), objective)
        gradients = sum(gradient.numel() for gradient in engine.gradients().values())
        engine.step(1e-2, clip=1.0)
        state = [value for optimizer in engine.optimizers for values in optimizer.state().values()
                 for value in values.values() if value.dim()]  # fmt: skip
        weights = sum(block.numel() for block in engine.local.values())
        counted[layout] = weights, gradients, sum(value.numel() for value in state)
    return counted


@pytest.mark.parametrize(("ranks", "zero", "data"), [(2, 1, 1), (3, 3, 1), (4, 1, 2), (4, 2, 2), (4, 3, 2)])
def test_a_rank_holds_one_of_data_and_context_ranks_shards(workers: Workers, ranks: int, zero: int, data: int) -> None:
    """Rank r of n has rows r·⌈rows / n⌉ and those that follow of each tensor: ranks of `cp` are neighbours."""
    layout = ParallelConfig.model_validate({"dp_shard": data, "cp": ranks // data, "zero": zero})
    by_rank = workers.run(count_elements, ranks, {"x": layout})
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in build(CONTEXT_MODELS["llama"]).parameters()]
    for rank, counted in enumerate(by_rank):
        shard = 0
        for rows, *row in shapes:
            per_rank = -(-rows // ranks)
            shard += len(range(rows)[rank * per_rank :][:per_rank]) * prod(row)
        assert counted["x"] == (shard, shard, 2 * shard), rank


def go_on(parallel: ParallelConfig, folder: Path, source: Path | None) -> None:
    """Save a step's state, or load it from `source` and save it again."""
    config, batch, _, objective, _ = context_case("llama")
    engine = build_engine(config, parallel, ADAMW)
    if source is None:
        engine.forward_backward(context_microbatches(engine, batch), objective)
        engine.step(1e-2, clip=1.0)
    else:
        load_checkpoint(engine, source)
    checkpoint.save(folder, 1, engine.state_dict(), {})


def read_all(folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    """All tensors of checkpoints, on one rank."""
    config, *_ = context_case("llama")
    contents = []
    for folder in folders:
        engine = build_engine(config, ParallelConfig(), ADAMW)
        load_checkpoint(engine, folder)
        contents.append({
            name: checkpoint.ShardedTensor.from_tensor(value).tensor.clone()
            for name, value in engine.state_dict().items()
        })  # fmt: skip
    return contents


def test_a_checkpoint_comes_back_from_layouts_with_and_without_contexts(workers: Workers, tmp_path: Path) -> None:
    way = [
        ParallelConfig(dp_shard=2, cp=2, zero=1),
        ParallelConfig(dp_shard=1, cp=3),
        ParallelConfig(dp_shard=2, zero=2),
        ParallelConfig(dp_replicate=2, dp_shard=1, cp=2),
        ParallelConfig(dp_shard=1, cp=2, zero=0),
        ParallelConfig(dp_shard=1, cp=2, tp=2, zero=2),
    ]
    folders: list[Path] = []
    source = None
    for number, parallel in enumerate(way):
        ranks = parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp
        workers.run(go_on, ranks, parallel, tmp_path / str(number), source)
        source = checkpoint.find_latest(tmp_path / str(number))
        assert source is not None
        folders.append(source)
    first, *others = workers.run(read_all, 1, folders)[0]
    assert sum("exp_avg" in name for name in first) > 0
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(value, first[name]) for name, value in other.items())
