"""Models and layouts of context parallelism, and their comparison with one device."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse
from tests.support.batches import family_batch
from tests.support.layouts import PIPELINE_SCHEDULES
from tests.support.models import BERT_OPTIONS, DROPOUTS, FAMILY_MODELS, PATTERN_MODELS, SMALL_MODEL
from tests.support.parity import backward_on_one_device, build_engine, model_gradient_errors
from tests.support.tensors import fill_memory_with_nan

DECODER = {**SMALL_MODEL, **DROPOUTS, "attention.n_kv_heads": 2}
ENCODER = {**SMALL_MODEL, **DROPOUTS, **BERT_OPTIONS, "family": "encoder"}
NO_POSITIONS = {"position": {"name": "none"}}
DECODER_PATTERNS: dict[str, dict[str, Any]] = {
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
BIASED_PATTERNS = {name: DECODER_PATTERNS[name] for name in ("full", "window", "chunked", "bigbird")}
LINFORMER_OPTIONS = {"name": "linformer", "max_length": 12, "projected_length": 3}
ENCODER_PATTERNS: dict[str, dict[str, Any]] = {
    "window": {"attention": {"pattern": {"name": "window", "width": 4}}},
    "bigbird": {"attention": {"pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 1}}},
    "etc": {
        "attention": {"pattern": {"name": "bigbird", "block_size": 1, "n_random_blocks": 0, "n_global_tokens": 2}},
    },
    "longformer": {"attention": {"pattern": {"name": "longformer", "width": 2}}},
    "apart": {
        "attention": {"name": "longformer", "pattern": {"name": "longformer", "width": 2, "global_tokens": [0, 2]}},
    },
    **{f"linformer_{share}": {"attention": {**LINFORMER_OPTIONS, "share": share}} for share in ("none", "headwise")},
    "linformer_both": {"attention": {**LINFORMER_OPTIONS, "share": "key_value"}},
    "linformer_all": {"attention": {**LINFORMER_OPTIONS, "share": "layerwise"}},
}  # fmt: skip


def use_one_block_of_each_kind(model: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A model whose every block has another pattern: so one comparison of all gradients tries all of them."""
    return {**model, "n_layers": len(kinds), "layer_types": [*kinds], "layer_type": kinds}


LATENT_MODEL = {
    **SMALL_MODEL, "attention.name": "mla", "attention.kv_lora_rank": 8, "attention.q_lora_rank": 6,
    "attention.qk_rope_head_dim": 4, "attention.v_head_dim": 5, "attention.dropout": 0.2,
}  # fmt: skip
CONTEXT_MODELS: dict[str, Any] = {
    "llama": DECODER,
    "bert": {**ENCODER, "extra_heads": {"sentence": {}, "boundary": {}}},
    "patterns of decoders": use_one_block_of_each_kind(DECODER, DECODER_PATTERNS),
    "patterns of encoders": use_one_block_of_each_kind(ENCODER, ENCODER_PATTERNS),
    "window": {**DECODER, "attention.pattern": {"name": "window", "width": 3}},
    "compressed": {**SMALL_MODEL, **DROPOUTS, "attention.name": "compressed", "position.name": "sinusoidal"},
    "alibi, patterns": use_one_block_of_each_kind({**DECODER, "position.name": "alibi"}, BIASED_PATTERNS),
    "t5 positions, patterns": use_one_block_of_each_kind({**DECODER, "position.name": "t5"}, BIASED_PATTERNS),
    "shaw": {**DECODER, "position.name": "shaw", "position.max_distance": 3},
    "latent": LATENT_MODEL,
}
CONTEXT_MODELS["latent, patterns"] = use_one_block_of_each_kind(
    CONTEXT_MODELS["latent"],
    {"full": {}, "window": {"attention": {"pattern": {"name": "window", "width": 3}}},
     "bigbird": {"attention": {"pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}}}},
)  # fmt: skip
SMALL_MOE = {"name": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2, "n_shared_experts": 1}
OWN_ATTENTION = ("deberta", "deberta v3", "xlnet")
"""Whose attention is one of its own."""
FAMILIES = {name: FAMILY_MODELS[name] for name in ("gpt", "t5", "albert", "electra", *OWN_ATTENTION)}
FAMILIES["experts"] = ModelConfig.from_dotted(
    **{key: value for key, value in SMALL_MODEL.items() if key != "ffn.d_ff"},
    dropout=0.2,
    ffn={**SMALL_MOE, "router": {"name": "top_k", "aux_loss_coef": 0.3, "z_loss_coef": 0.1}},
)
FAMILIES["soft experts"] = ModelConfig.from_dotted(
    **{**ENCODER, "layer_types": ["plain", "soft"], "layer_type.plain": {}},
    **{"layer_type.soft.ffn": {"name": "soft_moe", "d_ff": 16, "n_experts": 4, "dropout": 0.0}},
)
CONTEXT_MODELS = {name: ModelConfig.from_dotted(**model) for name, model in CONTEXT_MODELS.items()} | FAMILIES
LATENT_OPTIONS = {"name": "mla", "kv_lora_rank": 8, "q_lora_rank": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT_PATTERNS = {
    f"latent {name}": {"attention": {**LATENT_OPTIONS, **DECODER_PATTERNS[name]["attention"]}}
    for name in ("window", "bigbird")
}


for family, base, kinds in (
    ("decoders", DECODER, DECODER_PATTERNS | LATENT_PATTERNS),
    ("encoders", ENCODER, ENCODER_PATTERNS),
):
    dense = {key: value for key, value in base.items() if not key.startswith("ffn.")}
    CONTEXT_MODELS[f"patterns of {family}, experts"] = ModelConfig.from_dotted(
        **use_one_block_of_each_kind({**dense, "ffn": SMALL_MOE}, kinds)
    )


OTHERS = ("local, compressed and experts", "linformer of an encoder-decoder")
CONTEXT_MODELS |= {name: ModelConfig.from_dotted(**PATTERN_MODELS[name]) for name in OTHERS}
UNEVEN = (
    "patterns of decoders", "patterns of encoders", "llama", "window", "latent, patterns", "alibi, patterns",
    "deberta", "xlnet", "soft experts",
)  # fmt: skip
"""Models that are tested on rows of one document each, too, whose length no number of ranks divides."""
CONTEXT_MODELS |= {
    f"{name}, rows of 11 tokens": CONTEXT_MODELS[name].with_changes({"extra_heads": {}}) for name in UNEVEN
}
CONTEXT_MODELS["prefix language model"] = CONTEXT_MODELS["llama"]
CONTEXT_MODELS["window, prefixes"] = CONTEXT_MODELS["window"]
CONTEXT_LAYOUTS = {
    2: {
        "cp2": ParallelConfig(cp=2, zero=0), "cp2 by heads": ParallelConfig(cp=2, cp_method="ulysses", zero=0),
        "ep2 × cp2": ParallelConfig(ep=2, dp_shard=1, cp=2),
    },
    3: {"cp3": ParallelConfig(cp=3, zero=0)},
    4: {
        "cp4": ParallelConfig(cp=4, zero=0), "cp4 by heads": ParallelConfig(cp=4, cp_method="ulysses", zero=0),
        "cp4 by a ring": ParallelConfig(cp=4, cp_method="ring", zero=0),
        "cp2 × tp2": ParallelConfig(cp=2, tp=2, zero=0),
        "cp2 × tp2 without sequence parallel": ParallelConfig(cp=2, tp=2, sequence_parallel=False, zero=0),
        **{f"pp2 {item} × cp2": ParallelConfig(pp=2, cp=2, pp_schedule=item, zero=0) for item in PIPELINE_SCHEDULES},
        "zero0 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=0),
        "zero1 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=1),
        "zero2 × cp2": ParallelConfig(dp_shard=2, cp=2, zero=2), "zero3 × cp2": ParallelConfig(dp_shard=2, cp=2),
        "replicas × cp2": ParallelConfig(dp_replicate=2, dp_shard=1, cp=2),
        "ep4 of 2 × cp2": ParallelConfig(dp_shard=2, ep=4, cp=2, zero=3),
    },
    8: {
        "zero3 × cp2 × tp2": ParallelConfig(dp_shard=2, cp=2, tp=2),
        "zero3 × cp2 × tp2 without sequence parallel": ParallelConfig(dp_shard=2, cp=2, tp=2, sequence_parallel=False),
        "replicas × zero3 × cp2": ParallelConfig(dp_replicate=2, dp_shard=2, cp=2),
    },
}  # fmt: skip
"""Weights are whole where no name speaks of ZeRO, since FSDP2 takes a third of a comparison.

In tests/parity/test_context_documents.py they are sharded over `cp`.
"""
PATTERN_NAMES = ("patterns of decoders", "patterns of encoders")
CP2_ALONE = ("cp2",)


def attention_kinds(config: ModelConfig) -> set[tuple[str, ...]]:
    """Kinds of blocks of a model that differ for attention on parts of rows."""
    actual = set()
    for depth in range(max(1, len(config.layer_types))):
        of_block = config.layer_config(depth)
        position = of_block.position.name
        added = position if position in ("alibi", "t5", "shaw") else "of each token by itself"
        attention = of_block.attention.name, of_block.attention.pattern.name
        actual |= {("attention", config.family, *attention, added), ("ffn", of_block.ffn.name)}
    return actual


BIASED_NAMES = ("alibi, patterns", "t5 positions, patterns")
COMBINED_LAYOUTS = ("cp4", "cp2 × tp2", "pp2 1f1b × cp2", "zero3 × cp2")
EXPERT_NAMES = ("patterns of decoders, experts", "patterns of encoders, experts")
"""Models that send nothing by heads."""
CHOSEN_LAYOUTS: dict[tuple[str, int], tuple[str, ...]] = {
    **{(name, 2): CP2_ALONE for name in ("window", "compressed", "shaw", *OWN_ATTENTION, *OTHERS)},
    **{(f"{name}, rows of 11 tokens", 2): CP2_ALONE for name in ("window", "deberta", "xlnet", "soft experts")},
    ("window, prefixes", 2): CP2_ALONE,
    **{(name, 2): ("ep2 × cp2",) for name in EXPERT_NAMES},
    ("soft experts", 2): ("cp2", "ep2 × cp2"),
    ("soft experts", 4): ("cp4", "pp2 1f1b × cp2", "pp2 zbv × cp2", "zero3 × cp2", "ep4 of 2 × cp2", "replicas × cp2"),
    ("patterns of encoders", 2): CP2_ALONE,
    ("latent, patterns", 2): CP2_ALONE,
    ("patterns of encoders, rows of 11 tokens", 2): CP2_ALONE,
    ("llama", 4): (
        "cp4 by heads", "cp4 by a ring", "cp2 × tp2 without sequence parallel", "replicas × cp2",
        *(f"zero{zero} × cp2" for zero in range(3)),
    ),
    ("patterns of decoders", 4): (*COMBINED_LAYOUTS, *(f"pp2 {item} × cp2" for item in PIPELINE_SCHEDULES)),
    ("patterns of encoders", 4): COMBINED_LAYOUTS,
    ("t5", 4): COMBINED_LAYOUTS,
    **{
        (f"{name}, rows of 11 tokens", 4): (
            "cp4", "cp2 × tp2 without sequence parallel", "pp2 1f1b × cp2", "zero3 × cp2"
        )
        for name in PATTERN_NAMES
    },
    **{(name, 4): (*COMBINED_LAYOUTS, "pp2 zbv × cp2") for name in (*BIASED_NAMES, *OWN_ATTENTION, "bert")},
    ("latent, patterns", 4): (*COMBINED_LAYOUTS, "pp2 zbv × cp2"),
    ("alibi, patterns, rows of 11 tokens", 4): ("cp4",),
    ("latent, patterns, rows of 11 tokens", 4): ("cp4", "cp2 × tp2 without sequence parallel"),
    **{(name, 8): ("zero3 × cp2 × tp2",) for name in PATTERN_NAMES},
    **{
        (f"{name}, rows of 11 tokens", 8): ("zero3 × cp2 × tp2 without sequence parallel",)
        for name in PATTERN_NAMES
    },
    ("llama", 8): ("replicas × zero3 × cp2",),
}  # fmt: skip
"""Models that are not compared under all layouts of so many ranks."""
FOUR_RANKS_ONLY = ("latent, patterns, rows of 11 tokens", "alibi, patterns, rows of 11 tokens")
CONTEXT_MODELS_BY_RANKS = {
    2: tuple(name for name in CONTEXT_MODELS if name not in FOUR_RANKS_ONLY),
    3: ("llama, rows of 11 tokens", "patterns of decoders, rows of 11 tokens", "soft experts, rows of 11 tokens"),
    4: (
        "llama",
        *PATTERN_NAMES,
        *(f"{name}, rows of 11 tokens" for name in (*PATTERN_NAMES, "latent, patterns", "alibi, patterns")),
        "t5",
        "latent, patterns",
        *BIASED_NAMES,
        *OWN_ATTENTION,
        "bert",
        "soft experts",
    ),
    8: ("llama", *PATTERN_NAMES, *(f"{name}, rows of 11 tokens" for name in PATTERN_NAMES)),
}
"""Models by ranks; those of equally many share one call, and so the reference."""


def context_layouts_of(name: str, ranks: int) -> dict[str, ParallelConfig]:
    """The layouts of so many ranks under which a model is compared."""
    usual = [layout for layout, parallel in CONTEXT_LAYOUTS[ranks].items() if parallel.ep == 1]
    return {item: CONTEXT_LAYOUTS[ranks][item] for item in CHOSEN_LAYOUTS.get((name, ranks), usual)}


CONTEXT_ROWS = 4


@cache
def context_case(name: str) -> tuple[ModelConfig, dict[str, Tensor], nn.Module, Any, float]:
    """A model with the gradients of one device, the batch and objective that they are of, and the loss.

    A process computes them once: several numbers of ranks are compared with the same.
    """
    config = CONTEXT_MODELS[name]
    batch, model = family_batch(config), build(config).double().train()
    batch = {field: values[1::2] for field, values in batch.items()}
    if "prefix" in name:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    if "boundary" in config.extra_heads:  # spans of three and of one, also where a row is cut
        for row, at in enumerate((4, 4, 5, 5)):
            batch["span_left"][row, at : at + 3] = torch.tensor([1, 2, 3])
            batch["span_right"][row, at : at + 3] = torch.tensor([3, 2, 1])
    if "11" in name:
        batch = {field: values if field == "keys" else values[:, :11] for field, values in batch.items()}
        batch["positions"] = torch.arange(11).expand(CONTEXT_ROWS, -1)
        del batch["documents"]
    initialise(model, 7)
    return config, batch, model, *backward_on_one_device(config, model, batch)


def context_microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows, one and then the others."""
    rows = CONTEXT_ROWS // engine.mesh.data_ranks
    rows_of_rank = {key: value[engine.mesh.data_rank * rows :][:rows] for key, value in batch.items()}
    return [
        {key: value[:1] for key, value in rows_of_rank.items()},
        {key: value[1:] for key, value in rows_of_rank.items()},
    ]


@fill_memory_with_nan()
def compare_context_layouts(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts, on memory of NaN; returns the layouts that were compared.

    Kernels have blocks of four tokens, so that a rank's part is several, of which queries see some.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "SIZE", 4)
        return _compare(name, layouts)


def _compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config, batch, model, objective, loss = context_case(name)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(context_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
    if dist.get_world_size() == 2:  # what differs without gradients, two ranks show
        evaluated = engine.evaluate(context_microbatches(engine, batch), objective)
        assert evaluated.target_counts == stats.target_counts
    return list(layouts)
