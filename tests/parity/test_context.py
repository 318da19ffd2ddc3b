"""Rows that are cut over ranks: loss and every gradient are those of one device, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.config.objective import CausalObjective, MaskedObjective, SpanCorruptionObjective
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.parity import test_experts, test_families, test_layouts, test_patterns, test_pipelines
from tests.parity.test_families import BERT, DROPPED, SMALL, PassOn, batch_for
from tests.parity.test_traffic import config_of, missed
from tests.workers import Workers

DECODER = {**SMALL, **DROPPED, "attention.n_kv_heads": 2}
ENCODER = {**SMALL, **DROPPED, **BERT, "family": "encoder"}
MODELS = {
    "llama": DECODER,
    "bert": {**ENCODER, "heads": {"sentence": {}}},
    "alibi": {**DECODER, "position.name": "alibi"},
    "t5 positions": {**DECODER, "position.name": "t5"},
    "shaw": {**DECODER, "position.name": "shaw", "position.max_distance": 3},
    "window": {**DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "bigbird": {**ENCODER, "attention.pattern": {"name": "bigbird", "block": 1, "random": 1}},
    "latent": {
        **SMALL,
        "attention.name": "latent",
        "attention.kv_rank": 8,
        "attention.q_rank": 6,
        "attention.rope_dim": 4,
    },
}
MODELS |= {
    "first tokens": {**DECODER, "attention.pattern": {"name": "window", "width": 2, "first": 1}},
    "dilated": {**DECODER, "attention.pattern": {"name": "window", "width": 2, "step": 2}},
    "soft caps, sinks": {**DECODER, "attention.softcap": 2.0, "attention.sinks": True},
    "two-sided window": {**ENCODER, "attention.pattern": {"name": "window", "width": 4}},
    "chunked": {**DECODER, "attention.pattern": {"name": "chunked", "size": 3}},
    "strided": {**DECODER, "attention.pattern": {"name": "strided", "stride": 2}},
    "fixed": {**DECODER, "attention.pattern": {"name": "fixed", "stride": 3, "summary": 1}},
    "longformer": {**ENCODER, "attention.pattern": {"name": "longformer", "width": 2}},
    "bigbird of a decoder": {**DECODER, "attention.pattern": {"name": "bigbird", "block": 2, "random": 1}},
}
MOE = {"name": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2, "n_shared_experts": 1}
FAMILIES = {name: test_families.MODELS[name] for name in ("t5", "albert", "electra")}
FAMILIES["experts"] = ModelConfig.of(
    **{key: value for key, value in SMALL.items() if key != "ffn.d_ff"},
    dropout=0.2,
    ffn={**MOE, "router": {"name": "top_k", "balance": 0.3, "z_loss": 0.1}},
)
MODELS = {name: ModelConfig.of(**model) for name, model in MODELS.items()} | FAMILIES
LINFORMERS = [name for name in test_patterns.MODELS if name.startswith("linformer")]
MODELS |= {name: ModelConfig.of(**test_patterns.MODELS[name]) for name in LINFORMERS}
COMPRESSED = [name for name in test_patterns.MODELS if "compressed" in name]
MODELS |= {name: ModelConfig.of(**test_patterns.MODELS[name]) for name in COMPRESSED}
UNEVEN = ("compressed", "linformer", "llama", "bert", "bigbird", "window", "two-sided window")
"""Also on rows of one document each, of a length that no number of ranks divides."""
MODELS |= {f"{name}, rows of 11 tokens": MODELS[name].changed({"heads": {}}) for name in UNEVEN}
MODELS["prefix language model"] = MODELS["llama"]
MODELS["window, prefixes"] = MODELS["window"]
LAYOUTS = {
    2: {"cp2": ParallelConfig(cp=2), "cp2 by heads": ParallelConfig(cp=2, context="heads")},
    3: {"cp3": ParallelConfig(cp=3)},
    4: {
        "cp4": ParallelConfig(cp=4),
        "cp4 by heads": ParallelConfig(cp=4, context="heads"),
        "cp4 by a ring": ParallelConfig(cp=4, context="ring"),
        "cp2 × tp2": ParallelConfig(cp=2, tp=2),
        "cp2 × tp2 without sequence parallel": ParallelConfig(cp=2, tp=2, sequence_parallel=False),
        "pp2 1f1b × cp2": ParallelConfig(pp=2, cp=2),
        "pp2 zbv × cp2": ParallelConfig(pp=2, cp=2, schedule="zbv"),
        "zero0 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=0),
        "zero1 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=1),
        "zero2 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=2),
        "zero3 × cp2": ParallelConfig(dp_shard=2, cp=2),
        "replicas × cp2": ParallelConfig(dp_replicate=2, dp_shard=1, cp=2),
    },
    8: {
        "zero3 × cp2 × tp2": ParallelConfig(dp_shard=2, cp=2, tp=2),
        "replicas × zero3 × cp2": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2),
        "replicas × zero1 × cp2": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, zero=1),
    },
}
MANY = {
    2: tuple(MODELS),
    3: ("llama, rows of 11 tokens", "window, rows of 11 tokens"),
    4: ("llama", "bert", "window", "alibi", "t5"),
    8: ("llama",),
}
"""Models by ranks; those of equally many share one call, and so the reference."""


def one_device(name: str) -> tuple[ModelConfig, dict[str, Tensor], nn.Module, Any, float]:
    """A model with the gradients of one device, the batch and objective that they are of, and the loss."""
    config = MODELS[name]
    batch, model = batch_for(config), build(config).double().train()
    if "prefix" in name:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    if "11" in name:
        batch = {field: values if field == "keys" else values[:, :11] for field, values in batch.items()}
        batch["positions"] = torch.arange(11).expand(test_layouts.ROWS, -1)
        del batch["documents"]
    initialise(model, 7)
    terms = PassOn([])(model, batch)
    objective = test_experts.objective_of(config, [*terms])
    counts = objective.counts(batch)
    loss = torch.stack([objective.weights[term] * terms[term] / counts[term] for term in terms]).sum()
    loss.backward()
    return config, batch, model, objective, loss.item()


def compare(name: str, ranks: int) -> list[str]:
    """Loss and every gradient of the layouts of so many ranks; the layouts that were compared."""
    config, batch, model, objective, loss = one_device(name)
    for layout, parallel in LAYOUTS[ranks].items():
        make = test_pipelines.make_engine if parallel.pp > 1 else test_layouts.make_engine
        more = () if parallel.pp > 1 else (test_layouts.ADAMW,)
        engine = make(config, parallel, *more)
        stats = engine.forward_backward(test_layouts.microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert test_pipelines.errors(engine, model) == {}, layout
        evaluated = engine.evaluate(test_layouts.microbatches(engine, batch), objective)
        assert evaluated.counts == stats.counts
    return list(LAYOUTS[ranks])


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for ranks, names in MANY.items() for name in names]
)
def test_gradients_equal_one_device(workers: Workers, name: str, ranks: int) -> None:
    assert workers.run(compare, ranks, name, ranks, timeout=180.0)[0] == list(LAYOUTS[ranks])


TRAFFIC = {
    "t5": ["cp2"],
    "llama": ["cp2", "cp2, recomputed", "cp2 by heads", "cp2 by heads, recomputed"],
    "bert": ["cp2"],
    "linformer": ["cp2", "cp2, recomputed"],
    "linformer of an encoder-decoder": ["cp2"],
    "compressed": ["cp2", "cp2, recomputed"],
    "alibi": ["cp2"],
    "window": ["cp2", "cp2, recomputed"],
    "chunked": ["cp2"],
}
OBJECTIVES = {"t5": SpanCorruptionObjective(), "bert": MaskedObjective(), "linformer": MaskedObjective()}
OBJECTIVES["linformer of an encoder-decoder"] = SpanCorruptionObjective()


def test_counted_traffic_is_expected(workers: Workers) -> None:
    configs = {}
    for name, layouts in TRAFFIC.items():
        for layout in layouts:
            which, _, again = layout.partition(", ")
            objective = OBJECTIVES.get(name, CausalObjective())
            parallel = LAYOUTS[2][which].model_copy(update={"dp_shard": 1})
            model = MODELS[name].changed({"heads": {}})
            recompute = "full" if again else "none"
            configs[f"{name}, {layout}"] = config_of(model, objective, parallel, recompute=recompute)
    assert missed(workers, 2, configs) == {}
