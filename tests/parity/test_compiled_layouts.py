"""Compiled blocks over ranks, of text, of two towers and of vision-language models: the gradients of one device.

Most run without a backend that makes machine code, which takes minutes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.batches import PassThroughObjective, family_case
from tests.support.image_text_models import (
    LLAVA_MODELS,
    TOWER_MODELS,
    TowerObjective,
    llava_batch,
    tower_microbatches,
    tower_reference,
)
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

Microbatches = list[dict[str, Tensor]]
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2 without sequence parallelism": ParallelConfig(tp=2, sequence_parallel=False),
    "zero3": ParallelConfig(dp_shard=2),
    "zero1": ParallelConfig(dp_shard=2, zero=1),
    "pp2": ParallelConfig(pp=2),
}
ONE_BLOCK, SHALLOW = "llama of one block", "llava of one block each"
BLOCKS = {"llama": 2, "towers": 5, "llava": 5, ONE_BLOCK: 1, SHALLOW: 2}
"""Model → number of its blocks, of both towers where there are two, all of which are compiled."""


def case(name: str) -> tuple[ModelConfig, nn.Module, Any, float, Callable[[NativeEngine], Microbatches]]:
    """A config, the model of one device with its gradients, objective, loss, and an engine's micro-batches."""
    if name == "towers":
        model, batch, loss = tower_reference("dropout")

        def split(engine: NativeEngine) -> Microbatches:
            n = 4 if engine.pipeline else 3
            return tower_microbatches(batch, engine.mesh.data_rank, engine.mesh.data_ranks, n)

        return TOWER_MODELS["dropout"], model, TowerObjective(), loss, split
    if name in ("llama", ONE_BLOCK):
        config, batch = family_case("llama", False)
        config = config.with_changes({"n_layers": BLOCKS[name]})
    else:
        config, batch = LLAVA_MODELS["dropout"], llava_batch("dropout")
    if name == SHALLOW:
        config = config.with_changes({"n_layers": 1, "vision_tower.n_layers": 1})
    model, objective, loss = one_device_reference(config, batch, PassThroughObjective)
    return config, model, objective, loss, lambda engine: uneven_microbatches(engine, batch)


def compare(name: str, layouts: Sequence[str], backend: str) -> dict[str, int]:
    """Compare loss and gradients with one device's; return the number of blocks that were compiled by layout."""
    config, model, objective, loss, split = case(name)
    n_blocks = {}
    for layout in layouts:
        with compile_blocks_by(backend) as compilation:
            engine = build_engine(config, LAYOUTS[layout], ADAMW, compile_blocks=True)
            stats = engine.forward_backward(split(engine), objective)
            assert stats.loss == pytest.approx(loss, rel=1e-12), layout
            assert model_gradient_errors(engine, model) == {}, layout
        assert all(block._compiled_call_impl is not None for block, _ in compilation.blocks)
        n_blocks[layout] = len(compilation.blocks)
    return n_blocks


def check(workers: Workers, name: str, layouts: Sequence[str], backend: str) -> None:
    by_rank = workers.run(compare, 1 if layouts == ["one"] else 2, name, layouts, backend, timeout=800.0)
    for layout in layouts:
        n_blocks = [rank[layout] for rank in by_rank]
        assert (sum(n_blocks) if layout == "pp2" else n_blocks[0]) == BLOCKS[name], layout


FIRST = {"llama": ["tp2", "zero3"], "towers": ["tp2"], "llava": ["zero3", "pp2"]}
"""Layouts that are compared as dynamo traces blocks, in `make test` and in its extension; all others are slow."""
OTHERS = {name: [layout for layout in LAYOUTS if layout not in ("one", *layouts)] for name, layouts in FIRST.items()}


@pytest.mark.parametrize(("name", "layouts"), [
    pytest.param(ONE_BLOCK, ["tp2"], marks=pytest.mark.extended),  # under tp2, test_async_tp.py compiles a block, too
    (SHALLOW, ["zero3"]),
    pytest.param("llama", ["zero3"], marks=pytest.mark.extended),
    pytest.param("towers", FIRST["towers"], marks=pytest.mark.extended),
    pytest.param("llava", FIRST["llava"], marks=pytest.mark.extended),
])  # fmt: skip
def test_compiled_blocks_equal_one_device(workers: Workers, name: str, layouts: list[str]) -> None:
    check(workers, name, layouts, "eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FIRST)
def test_compiled_blocks_equal_one_device_under_other_layouts(workers: Workers, name: str) -> None:
    check(workers, name, OTHERS[name], "eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FIRST)
def test_graphs_of_autograd_equal_one_device(workers: Workers, name: str) -> None:
    check(workers, name, ["one"], "aot_eager")
    check(workers, name, FIRST[name], "aot_eager")
