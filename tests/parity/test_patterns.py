"""Attention patterns on every layout: the gradients of one device, which looks at a mask of all pairs.

The layouts visit blocks of four tokens, which the rows' length of twelve and their documents' don't always divide.
"""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse, kernels
from megatfm.ops.attention.reference import attention_reference
from tests.parity import test_experts, test_layouts, test_pipelines
from tests.parity.test_families import DROPPED, SMALL, PassThroughObjective, batch_for
from tests.support.grids import cells
from tests.support.workers import Workers

DECODER = {**SMALL, **DROPPED, "attention.n_kv_heads": 2}
ENCODER = {**SMALL, **DROPPED, "family": "encoder", "lm_head.bias": True}
LINFORMER = {
    **ENCODER,
    "attention.name": "linformer",
    "attention.max_length": 12,
    "attention.projected_length": 3,
    "position.name": "learned",
    "position.max_positions": 12,
}
COMPRESSED = {**SMALL, **DROPPED, "position.name": "sinusoidal"}
MODELS = {
    "window": {**DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "window with soft caps": {
        **DECODER,
        "attention.pattern": {"name": "window", "width": 5},
        "attention.softcap": 2.0,
    },
    "sinks": {**DECODER, "attention.pattern": {"name": "window", "width": 5}, "attention.sinks": True},
    "window of an encoder": {**ENCODER, "attention.pattern": {"name": "window", "width": 4}},
    "alternating": {
        **DECODER,
        "layer_types": ["near", "all"],
        "layer_type.near.attention.pattern": {"name": "window", "width": 3},
        "layer_type.all.position.name": "none",
    },
    "first tokens": {**DECODER, "attention.pattern": {"name": "window", "width": 2, "initial_tokens": 1}},
    "dilated": {**DECODER, "attention.pattern": {"name": "window", "width": 2, "dilation": 2}},
    "chunked": {**DECODER, "attention.pattern": {"name": "chunked", "size": 3}},
    "strided": {**DECODER, "attention.pattern": {"name": "strided", "stride": 2}},
    "bigbird": {**ENCODER, "attention.pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 1}},
    "bigbird of a decoder": {
        **DECODER,
        "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1},
    },
    "longformer": {
        **ENCODER,
        "attention.name": "longformer",
        "attention.pattern": {"name": "longformer", "width": 2, "global_tokens": [0, 3]},
        "position.name": "learned",
        "position.max_positions": 12,
    },
    "longformer without projections of its own": {
        **ENCODER,
        "attention.pattern": {"name": "longformer", "width": 2},
    },
    "linformer": {**LINFORMER, "attention.share": "none"},
    "linformer, shared by heads": {**LINFORMER, "attention.share": "headwise"},
    "linformer, shared by keys and values": {**LINFORMER, "attention.share": "key_value"},
    "linformer, shared by layers": {**LINFORMER, "attention.share": "layerwise"},
    "linformer of an encoder-decoder": {
        **{key: value for key, value in LINFORMER.items() if key != "head.bias"},
        "family": "encoder_decoder",
        "attention.share": "layerwise",
    },
    "compressed": {**COMPRESSED, "attention.name": "compressed"},
    "local, compressed and experts": {
        **{key: value for key, value in COMPRESSED.items() if key != "attention.dropout"},
        "n_layers": 3,
        "layer_types": ["local", "compressed", "experts"],
        "layer_type.local.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.compressed.attention.name": "compressed",
        "layer_type.experts.attention.pattern": {"name": "chunked", "size": 5},
        "layer_type.experts.ffn": {
            "name": "moe",
            "dropout": 0.0,
            "d_ff": 16,
            "n_experts": 4,
            "top_k": 2,
            "router": {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1},
        },
    },
    "fixed": {**DECODER, "attention.pattern": {"name": "fixed", "stride": 3, "n_summary_tokens": 1}},
}
LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "tp2": ParallelConfig(tp=2),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2),
        "zero3": ParallelConfig(dp_shard=2),
    },
}


def by_blocks(*args: object) -> torch.Tensor:
    VISITED.append(True)
    return block_sparse.blocked(*args)  # type: ignore[arg-type]


VISITED: list[bool] = []
BLOCKS = kernels.Kernel("blocks", by_blocks, kernels._on_cpu_by_blocks, kernels._anything)
WRITTEN = kernels.Kernel("products", attention_reference, kernels._anything, kernels._anything)


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts; those that were compared."""
    config = ModelConfig.from_dotted(MODELS[name])
    batch, model = batch_for(config), build(config).double().train()
    initialise(model, 7)
    with mock.patch.object(kernels, "KERNELS", (WRITTEN,)):
        terms = PassThroughObjective([])(model, batch)
        objective = test_experts.objective_of(config, [*terms])
        counts = objective.target_counts(batch)
        loss = torch.stack(
            [objective.loss_weights[term] * terms[term] / counts[term] for term in terms]
        ).sum()
        loss.backward()
    for layout, parallel in layouts.items():
        make = test_pipelines.make_engine if parallel.pp > 1 else test_layouts.make_engine
        more = () if parallel.pp > 1 else (test_layouts.ADAMW,)
        engine = make(config, parallel, *more)
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(kernels, "KERNELS", (BLOCKS,)))
            patches.enter_context(mock.patch.object(block_sparse, "SIZE", 4))
            patches.enter_context(mock.patch.object(block_sparse, "SCORES", 200))
            VISITED.clear()
            stats = engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
        assert VISITED or config.attention.name == "linformer"
        assert stats.loss == pytest.approx(loss.item(), rel=1e-12), layout
        assert test_pipelines.errors(engine, model) == {}, layout
    return list(layouts)


CASES = [
    case
    for ranks, layouts in LAYOUTS.items()
    for case in cells(dict.fromkeys(MODELS, layouts), ranks, label=f" on {ranks}")
]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=180.0)[0] == layouts


def test_every_pattern_is_here() -> None:
    here = {
        section["attention.pattern"]["name"]
        for section in ({**model, **model.get("layer_type.near", {})} for model in MODELS.values())
        if "attention.pattern" in section
    }
    shipped = {name for name in PATTERNS.names() if PATTERNS.get(name).__module__.startswith("megatfm.")}
    assert shipped - {"full"} == here
