"""Rows cut within documents and between them, attention patterns on every layout, and ZeRO over ranks of cp."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatfm import checkpoint
from megatfm.config import ModelConfig, MuonConfig, OptimizerSection, ParallelConfig
from megatfm.config.objective import CausalObjective
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import Objective
from megatfm.ops.attention import block_sparse, kernels
from megatfm.ops.attention.reference import attention_reference
from megatfm.parallel import context_attention
from tests.support.batches import family_batch
from tests.support.context_parity import CONTEXT_MODELS, compare_context_layouts, context_case, context_microbatches
from tests.support.layouts import (
    EXTENDED,
    PLAIN_LAYOUTS,
    SLOW,
    list_traffic_mismatches,
    make_cases_by_ranks,
    traffic_config,
)
from tests.support.models import ADAMW, PATTERN_MODELS, TINY_LATENT, TINY_MODEL
from tests.support.parity import backward_on_one_device, build_engine, microbatches, model_gradient_errors
from tests.support.sharded_engines import load_checkpoint
from tests.support.workers import Workers

BLOCK = 4
RUN = 10
"""Tokens of a run of a row: two and a half blocks."""
BERT = {**TINY_MODEL, "family": "encoder", "embedding.n_segments": 0}
ROW = "as wide as the row"
MODELS: dict[str, dict[str, Any]] = {
    "causal": {**TINY_MODEL, "attention.n_kv_heads": 1, "attention.dropout": 0.1, "attention.sinks": True},
    "both sides": BERT,
    "neighbours": {**TINY_MODEL, "attention.pattern": {"name": "window", "width": 7}},
    ROW: {**TINY_MODEL, "attention.pattern": {"name": "window", "width": 4096}},
    "latent": {**TINY_MODEL, "attention": TINY_LATENT},
    "strided": {**TINY_MODEL, "attention.pattern": {"name": "strided", "stride": 3}},
    "alibi": {**TINY_MODEL, "position.name": "alibi"},
}
KINDS = ("within", "between", "across", "one", "padding")


def get_local_and_full_documents(kind: str, length: int) -> Tensor:
    """int64 [length]. within: no document crosses a run's end; between: each crosses one; across: several."""
    places = torch.arange(length)
    short = places // (RUN // 2)
    return {
        "within": short,
        "between": (places + RUN // 2) // RUN,
        "across": (places >= length * 3 // 5).long(),
        "one": torch.zeros_like(places),
        "padding": short.where(places < length // 2, -1),
    }[kind]


def batch_of(kinds: Sequence[str], length: int) -> dict[str, Tensor]:
    """A row of each kind."""
    random = torch.Generator().manual_seed(length)
    documents = torch.stack([get_local_and_full_documents(kind, length) for kind in kinds])
    tokens, targets = (torch.randint(31, documents.shape, generator=random) for _ in range(2))
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = torch.arange(length)
    return {
        "tokens": tokens, "targets": targets.where(documents >= 0, -100), "documents": documents,
        "positions": places - (places * begins).cummax(1).values, "keys": torch.arange(len(documents)) * 7919 + 3,
    }  # fmt: skip


def one_device(name: str, batch: dict[str, Tensor]) -> tuple[ModelConfig, nn.Module, Objective, float]:
    config = ModelConfig.from_dotted(**MODELS[name])
    model = build(config).double().train()
    initialise(model, 7)
    return config, model, *backward_on_one_device(config, model, batch)


def compare(names: Sequence[str], requested: Sequence[str], ranks: int) -> dict[tuple[str, str], set[str]]:
    """Loss and every gradient with rows in parts, each kind of documents in a micro-batch of its own; how attention got
    at what other ranks have, by model and by what was asked."""
    took: dict[tuple[str, str], set[str]] = defaultdict(set)
    batch = batch_of(KINDS, 2 * ranks * RUN + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "SIZE", BLOCK)
        for name in names:
            config, model, objective, loss = one_device(name, batch)
            for way in requested:
                local = took[name, way]
                patch.setattr(context_attention, "_log_once", lambda _, choice, __, local=local: local.add(choice))
                engine = build_engine(config, ParallelConfig(cp=ranks, cp_method=way, zero=0), ADAMW)
                rows = [{field: values[[row]] for field, values in batch.items()} for row in range(len(KINDS))]
                stats = engine.forward_backward(rows, objective)
                assert stats.loss == pytest.approx(loss, rel=1e-12), (name, way)
                assert model_gradient_errors(engine, model) == {}, (name, way)
    return dict(took)


CASES = [
    pytest.param(2, ["causal", "both sides", "latent"], ["ring", "ulysses"], id="2"),
    pytest.param(3, ["both sides", ROW], ["ring"], id="3"),
    pytest.param(4, ["both sides", "neighbours"], ["ring"], id="4"),
    pytest.param(5, ["causal"], ["ring"], id="5", marks=EXTENDED),
    pytest.param(2, [ROW, "strided", "alibi"], ["ring", "ulysses"], id="2, others", marks=SLOW),
    *(pytest.param(ranks, [*MODELS], ["ring"], id=f"{ranks}, all", marks=SLOW) for ranks in (3, 4, 5)),
]


@pytest.mark.parametrize(("ranks", "names", "requested"), CASES)
def test_documents_at_any_row_cut(workers: Workers, ranks: int, names: list[str], requested: list[str]) -> None:
    """And as documents have it, keys are fetched, or go round."""
    took = workers.run(compare, ranks, names, requested, ranks, timeout=180.0)
    assert all(item == took[0] for item in took), "all ranks decide alike"
    for (name, way), ways in took[0].items():
        if name == "neighbours":
            assert ways == {context_attention.FETCH}
        elif way == "ulysses":
            assert ways == {context_attention.ULYSSES}
        else:
            assert ways == {context_attention.FETCH, context_attention.RING}, name


# ----------------------------------------------------------------------------------------- attention patterns


def by_blocks(*args: object) -> torch.Tensor:
    VISITED.append(True)
    return block_sparse.block_sparse_attention(*args)  # type: ignore[arg-type]


VISITED: list[bool] = []
BLOCKS = kernels.Kernel("blocks", by_blocks, kernels._supports_block_sparse, lambda _: True)
WRITTEN = kernels.Kernel("products", attention_reference, lambda _: True, lambda _: True)


def compare_pattern(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
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


@pytest.mark.parametrize(("name", "layouts", "ranks"), make_cases_by_ranks(PATTERN_MODELS, PLAIN_LAYOUTS))
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: PLAIN_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_pattern, ranks, name, tried, timeout=180.0)[0] == layouts


def test_every_pattern_is_here() -> None:
    """Beside full attention, and windows of images: test_image_layouts."""
    local = {
        section["attention.pattern"]["name"]
        for section in ({**model, **model.get("layer_type.near", {})} for model in PATTERN_MODELS.values())
        if "attention.pattern" in section
    }
    shipped = {name for name in PATTERNS.names() if PATTERNS.get(name).__module__.startswith("megatfm.")}
    assert shipped - {"full", "windows_2d"} == local


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
def test_gradients_under_zero_equal_one_device(workers: Workers, ranks: int) -> None:
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
