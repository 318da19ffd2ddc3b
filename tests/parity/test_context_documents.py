"""Rows that are cut where documents lie within parts and across them; attention patterns on every layout."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import Objective
from megatfm.ops.attention import block_sparse, kernels
from megatfm.ops.attention.reference import attention_reference
from megatfm.parallel import context_attention
from tests.support.batches import family_batch
from tests.support.layouts import EXTENDED, PLAIN_LAYOUTS, SLOW, make_cases_by_ranks
from tests.support.models import ADAMW, TINY_LATENT, TINY_MODEL
from tests.support.parity import backward_on_one_device, build_engine, microbatches, model_gradient_errors
from tests.support.pattern_models import PATTERN_MODELS
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
