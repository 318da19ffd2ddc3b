"""Rows that are cut over ranks: loss and every gradient are those of one device, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse
from tests.parity import test_experts, test_families, test_layouts, test_patterns, test_pipelines
from tests.parity.test_families import BERT, DROPPED, SMALL, PassThroughObjective, batch_for
from tests.support.grids import SLOW, cells
from tests.support.uninitialized_memory import memory_of_nan
from tests.support.workers import Workers

ROWS = 4
DECODER = {**SMALL, **DROPPED, "attention.n_kv_heads": 2}
ENCODER = {**SMALL, **DROPPED, **BERT, "family": "encoder"}
NO_POSITIONS = {"position": {"name": "none"}}
OF_DECODERS: dict[str, dict[str, Any]] = {
    "full": {"attention": {"softcap": 2.0, "sinks": True}},
    "window": {"attention": {"pattern": {"name": "window", "width": 3}}},
    "first": {"attention": {"pattern": {"name": "window", "width": 2, "initial_tokens": 1}}},
    "dilated": {"attention": {"pattern": {"name": "window", "width": 2, "dilation": 2}}},
    "chunked": {"attention": {"pattern": {"name": "chunked", "size": 3}}},
    "strided": {"attention": {"pattern": {"name": "strided", "stride": 2}}},
    "fixed": {"attention": {"pattern": {"name": "fixed", "stride": 3, "n_summary_tokens": 1}}},
    "bigbird": {"attention": {"pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}}},
    "compressed": {"attention": {"name": "compressed"}, **NO_POSITIONS},
}
OF_BIASED = {name: OF_DECODERS[name] for name in ("full", "window", "chunked", "bigbird")}
LINFORMER = {"name": "linformer", "max_length": 12, "projected_length": 3}
OF_ENCODERS: dict[str, dict[str, Any]] = {
    "window": {"attention": {"pattern": {"name": "window", "width": 4}}},
    "bigbird": {"attention": {"pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 1}}},
    "etc": {
        "attention": {
            "pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 0, "n_global_tokens": 2}
        }
    },
    "longformer": {"attention": {"pattern": {"name": "longformer", "width": 2}}},
    "apart": {
        "attention": {
            "name": "longformer",
            "pattern": {"name": "longformer", "width": 2, "global_tokens": [0, 2]},
        }
    },
    **{f"linformer_{share}": {"attention": {**LINFORMER, "share": share}} for share in ("none", "headwise")},
    "linformer_both": {"attention": {**LINFORMER, "share": "key_value"}},
    "linformer_all": {"attention": {**LINFORMER, "share": "layerwise"}},
}


def one_block_each(model: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A model whose every block has another pattern: so one comparison of all gradients tries all of them."""
    return {**model, "n_layers": len(kinds), "layer_types": [*kinds], "layer_type": kinds}


LATENT = {
    **SMALL,
    "attention.name": "mla",
    "attention.kv_lora_rank": 8,
    "attention.q_lora_rank": 6,
    "attention.qk_rope_head_dim": 4,
    "attention.v_head_dim": 5,
    "attention.dropout": 0.2,
}
MODELS = {
    "llama": DECODER,
    "bert": {**ENCODER, "extra_heads": {"sentence": {}, "boundary": {}}},
    "patterns of decoders": one_block_each(DECODER, OF_DECODERS),
    "patterns of encoders": one_block_each(ENCODER, OF_ENCODERS),
    "window": {**DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "compressed": {**SMALL, **DROPPED, "attention.name": "compressed", "position.name": "sinusoidal"},
    "alibi, patterns": one_block_each({**DECODER, "position.name": "alibi"}, OF_BIASED),
    "t5 positions, patterns": one_block_each({**DECODER, "position.name": "t5"}, OF_BIASED),
    "shaw": {**DECODER, "position.name": "shaw", "position.max_distance": 3},
    "latent": LATENT,
}
MODELS["latent, patterns"] = one_block_each(
    MODELS["latent"],
    {
        "full": {},
        "window": {"attention": {"pattern": {"name": "window", "width": 3}}},
        "bigbird": {"attention": {"pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}}},
    },
)
MOE = {"name": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2, "n_shared_experts": 1}
APART = ("deberta", "deberta v3", "xlnet")
"""Whose attention is one of its own."""
FAMILIES = {name: test_families.MODELS[name] for name in ("gpt", "t5", "albert", "electra", *APART)}
FAMILIES["experts"] = ModelConfig.from_dotted(
    **{key: value for key, value in SMALL.items() if key != "ffn.d_ff"},
    dropout=0.2,
    ffn={**MOE, "router": {"name": "top_k", "aux_loss_coef": 0.3, "z_loss_coef": 0.1}},
)
FAMILIES["soft experts"] = ModelConfig.from_dotted(
    **{**ENCODER, "layer_types": ["plain", "soft"], "layer_type.plain": {}},
    **{"layer_type.soft.ffn": {"name": "soft_moe", "d_ff": 16, "n_experts": 4, "dropout": 0.0}},
)
MODELS = {name: ModelConfig.from_dotted(**model) for name, model in MODELS.items()} | FAMILIES
OF_LATENTS = {"name": "mla", "kv_lora_rank": 8, "q_lora_rank": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENTS = {
    f"latent {name}": {"attention": {**OF_LATENTS, **OF_DECODERS[name]["attention"]}}
    for name in ("window", "bigbird")
}
for family, base, kinds in (("decoders", DECODER, OF_DECODERS | LATENTS), ("encoders", ENCODER, OF_ENCODERS)):
    dense = {key: value for key, value in base.items() if not key.startswith("ffn.")}
    MODELS[f"patterns of {family}, experts"] = ModelConfig.from_dotted(
        **one_block_each({**dense, "ffn": MOE}, kinds)
    )
OTHERS = ("local, compressed and experts", "linformer of an encoder-decoder")
MODELS |= {name: ModelConfig.from_dotted(**test_patterns.MODELS[name]) for name in OTHERS}
UNEVEN = (
    "patterns of decoders",
    "patterns of encoders",
    "llama",
    "window",
    "latent, patterns",
    "alibi, patterns",
    "deberta",
    "xlnet",
    "soft experts",
)
"""Also on rows of one document each, of a length that no number of ranks divides."""
MODELS |= {f"{name}, rows of 11 tokens": MODELS[name].with_changes({"extra_heads": {}}) for name in UNEVEN}
MODELS["prefix language model"] = MODELS["llama"]
MODELS["window, prefixes"] = MODELS["window"]
LAYOUTS = {
    2: {
        "cp2": ParallelConfig(cp=2),
        "cp2 by heads": ParallelConfig(cp=2, cp_method="ulysses"),
        "ep2 × cp2": ParallelConfig(ep=2, dp_shard=1, cp=2),
    },
    3: {"cp3": ParallelConfig(cp=3)},
    4: {
        "cp4": ParallelConfig(cp=4),
        "cp4 by heads": ParallelConfig(cp=4, cp_method="ulysses"),
        "cp4 by a ring": ParallelConfig(cp=4, cp_method="ring"),
        "cp2 × tp2": ParallelConfig(cp=2, tp=2),
        "cp2 × tp2 without sequence parallel": ParallelConfig(cp=2, tp=2, sequence_parallel=False),
        **{
            f"pp2 {each} × cp2": ParallelConfig(pp=2, cp=2, pp_schedule=each)
            for each in test_pipelines.SCHEDULES
        },
        "zero0 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=0),
        "zero1 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=1),
        "zero2 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=2),
        "zero3 × cp2": ParallelConfig(dp_shard=2, cp=2),
        "replicas × cp2": ParallelConfig(dp_replicate=2, dp_shard=1, cp=2),
        "ep4 of 2 × cp2": ParallelConfig(dp_shard=2, ep=4, cp=2, zero=3),
    },
    8: {
        "zero3 × cp2 × tp2": ParallelConfig(dp_shard=2, cp=2, tp=2),
        "zero3 × cp2 × tp2 without sequence parallel": ParallelConfig(
            dp_shard=2, cp=2, tp=2, sequence_parallel=False
        ),
        "replicas × zero3 × cp2": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2),
    },
}
PATTERNS = ("patterns of decoders", "patterns of encoders")
BIASED = ("alibi, patterns", "t5 positions, patterns")
TOGETHER = ("cp4", "cp2 × tp2", "pp2 1f1b × cp2", "zero3 × cp2")
ONE = ("cp2",)
EXPERTS = ("patterns of decoders, experts", "patterns of encoders, experts")
"""Where nothing is sent by heads."""
SOME: dict[tuple[str, int], tuple[str, ...]] = {
    **{(name, 2): ONE for name in ("window", "compressed", "shaw", *APART, *OTHERS)},
    **{(f"{name}, rows of 11 tokens", 2): ONE for name in ("window", "deberta", "xlnet", "soft experts")},
    ("window, prefixes", 2): ONE,
    **{(name, 2): ("ep2 × cp2",) for name in EXPERTS},
    ("soft experts", 2): ("cp2", "ep2 × cp2"),
    ("soft experts", 4): ("cp4", "pp2 1f1b × cp2", "pp2 zbv × cp2", "zero3 × cp2", "ep4 of 2 × cp2", "replicas × cp2"),
    ("patterns of encoders", 2): ONE,
    ("latent, patterns", 2): ONE,
    ("patterns of encoders, rows of 11 tokens", 2): ONE,
    ("llama", 4): (
        "cp4 by heads", "cp4 by a ring", "cp2 × tp2 without sequence parallel", "replicas × cp2",
        *(f"zero{zero} × cp2" for zero in range(3)),
    ),
    ("patterns of decoders", 4): (*TOGETHER, *(f"pp2 {each} × cp2" for each in test_pipelines.SCHEDULES)),
    ("patterns of encoders", 4): TOGETHER,
    ("t5", 4): TOGETHER,
    **{
        (f"{name}, rows of 11 tokens", 4): (
            "cp4", "cp2 × tp2 without sequence parallel", "pp2 1f1b × cp2", "zero3 × cp2"
        )
        for name in PATTERNS
    },
    **{(name, 4): (*TOGETHER, "pp2 zbv × cp2") for name in (*BIASED, *APART, "bert")},
    ("latent, patterns", 4): (*TOGETHER, "pp2 zbv × cp2"),
    ("alibi, patterns, rows of 11 tokens", 4): ("cp4",),
    ("latent, patterns, rows of 11 tokens", 4): ("cp4", "cp2 × tp2 without sequence parallel"),
    **{(name, 8): ("zero3 × cp2 × tp2",) for name in PATTERNS},
    **{
        (f"{name}, rows of 11 tokens", 8): ("zero3 × cp2 × tp2 without sequence parallel",)
        for name in PATTERNS
    },
    ("llama", 8): ("replicas × zero3 × cp2",),
}  # fmt: skip
"""Models that are not compared under all layouts of so many ranks."""
ON_FOUR = ("latent, patterns, rows of 11 tokens", "alibi, patterns, rows of 11 tokens")
MANY = {
    2: tuple(name for name in MODELS if name not in ON_FOUR),
    3: (
        "llama, rows of 11 tokens",
        "patterns of decoders, rows of 11 tokens",
        "soft experts, rows of 11 tokens",
    ),
    4: (
        "llama",
        *PATTERNS,
        *(f"{name}, rows of 11 tokens" for name in (*PATTERNS, "latent, patterns", "alibi, patterns")),
        "t5",
        "latent, patterns",
        *BIASED,
        *APART,
        "bert",
        "soft experts",
    ),
    8: ("llama", *PATTERNS, *(f"{name}, rows of 11 tokens" for name in PATTERNS)),
}
"""Models by ranks; those of equally many share one call, and so the reference."""


def layouts_of(name: str, ranks: int) -> dict[str, ParallelConfig]:
    """The layouts of so many ranks under which a model is compared."""
    usual = [layout for layout, parallel in LAYOUTS[ranks].items() if parallel.ep == 1]
    return {each: LAYOUTS[ranks][each] for each in SOME.get((name, ranks), usual)}


def one_device(name: str) -> tuple[ModelConfig, dict[str, Tensor], nn.Module, Any, float]:
    """A model with the gradients of one device, the batch and objective that they are of, and the loss."""
    config = MODELS[name]
    batch, model = batch_for(config), build(config).double().train()
    batch = {field: values[1::2] for field, values in batch.items()}
    if "prefix" in name:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    if "boundary" in config.extra_heads:  # spans of three and of one, also where a row is cut
        for row, at in enumerate((4, 4, 5, 5)):
            batch["span_left"][row, at : at + 3] = torch.tensor([1, 2, 3])
            batch["span_right"][row, at : at + 3] = torch.tensor([3, 2, 1])
    if "11" in name:
        batch = {field: values if field == "keys" else values[:, :11] for field, values in batch.items()}
        batch["positions"] = torch.arange(11).expand(ROWS, -1)
        del batch["documents"]
    initialise(model, 7)
    terms = PassThroughObjective([])(model, batch)
    objective = test_experts.objective_of(config, [*terms])
    counts = objective.target_counts(batch)
    loss = torch.stack([objective.loss_weights[term] * terms[term] / counts[term] for term in terms]).sum()
    loss.backward()
    return config, batch, model, objective, loss.item()


def microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows, one and then the others."""
    rows = ROWS // engine.mesh.data_ranks
    mine = {key: value[engine.mesh.data_rank * rows :][:rows] for key, value in batch.items()}
    return [{key: value[:1] for key, value in mine.items()}, {key: value[1:] for key, value in mine.items()}]


@memory_of_nan()
def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts, on memory of NaN; those that were compared. Kernels have blocks of four
    tokens, so that a rank's part is several, of which queries see some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "SIZE", 4)
        return compare_layouts(name, layouts)


def compare_layouts(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config, batch, model, objective, loss = one_device(name)
    for layout, parallel in layouts.items():
        make = test_pipelines.make_engine if parallel.pp > 1 else test_layouts.make_engine
        more = () if parallel.pp > 1 else (test_layouts.ADAMW,)
        engine = make(config, parallel, *more)
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert test_pipelines.errors(engine, model) == {}, layout
    evaluated = engine.evaluate(microbatches(engine, batch), objective)
    assert evaluated.target_counts == stats.target_counts
    return list(layouts)


LATER = (
    ("patterns of encoders", 8),
    ("patterns of decoders, rows of 11 tokens", 8),
    ("patterns of encoders, rows of 11 tokens", 8),
    ("t5 positions, patterns", 4),
    ("deberta v3", 4),
    ("deberta, rows of 11 tokens", 2),
)
"""Dear ones that others are much like."""
CASES = [
    case
    for ranks, names in MANY.items()
    for case in cells({name: layouts_of(name, ranks) for name in names}, ranks, label=f" on {ranks}")
    if (case.values[0], ranks) not in LATER
]
CASES += [pytest.param(name, [*layouts_of(name, ranks)], ranks, marks=SLOW) for name, ranks in LATER]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=180.0)[0] == layouts
