"""Every model family under tensor and sharded data parallelism: the gradients of one device, with dropout on.

Dropout is keyed by row, so that it is part of what must agree. The batch goes through the engine in micro-batches and
through the plain model all at once.
"""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import Objective
from tests.parity.test_layouts import (
    ADAMW,
    LENGTH,
    ROWS,
    block,
    global_batch,
    gradient_errors,
    make_engine,
    microbatches,
)
from tests.support import swin
from tests.support.grids import cells
from tests.support.images import pixels, to_batch
from tests.support.workers import Workers

SMALL = {"vocab_size": 95, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 48}
DROPPED = {"dropout": 0.2, "attention.dropout": 0.1, "ffn.dropout": 0.1, "drop_path": 0.3}
BERT = {
    "norm.name": "layer_norm",
    "norm.placement": "post",
    "ffn.activation": "gelu",
    "attention.bias": True,
    "ffn.bias": True,
    "embedding.norm": True,
    "position.name": "learned",
    "position.max_positions": LENGTH,
    "embedding.n_segments": 2,
    "lm_head.name": "transform",
    "lm_head.bias": True,
    "init.name": "bert",
}
PYRAMID = {"stages.grid": (5, 4), "stages.heads": (4, 8), "d_model": 32, "attention.pattern.window": 3}
"""Maps of 5 × 4, which are padded and shifted, then 3 × 2, one window smaller than the table."""
IMAGES_PER_ROW = 4
MODELS = {
    "gpt": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        n_mtp_heads=1,
        **{
            "norm.name": "layer_norm",
            "ffn.activation": "gelu_tanh",
            "position.name": "learned",
            "position.max_positions": LENGTH,
            "attention.bias": True,
            "ffn.bias": True,
            "lm_head.label_smoothing": 0.1,
            "lm_head.softcap": 5.0,
        },
    ),
    "alibi, sandwich norm": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        **{"position.name": "alibi", "norm.placement": "sandwich", "attention.qk_norm": True},
    ),
    "shaw, deepnorm": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        **{
            "position.name": "shaw",
            "norm.placement": "deepnorm",
            "init.name": "deepnorm",
            "position.max_distance": 3,
        },
    ),
    "llama": ModelConfig.from_dotted(
        **SMALL, **DROPPED, **{"attention.n_kv_heads": 2, "embedding.tied": False}
    ),
    "latent attention": ModelConfig.from_dotted(
        **SMALL,
        **{
            "attention.name": "mla",
            "attention.kv_lora_rank": 8,
            "attention.q_lora_rank": 6,
            "attention.qk_rope_head_dim": 4,
        },
    ),
    "bert": ModelConfig.from_dotted(
        **SMALL, **DROPPED, **BERT, family="encoder", extra_heads={"sentence": {}, "boundary": {}}
    ),
    "albert": ModelConfig.from_dotted(
        **SMALL, **DROPPED, **BERT, family="encoder", distinct_layers=1, **{"embedding.dim": 16}
    ),
    "deberta": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        family="encoder",
        **{"attention.name": "deberta", "position.name": "deberta", "position.max_distance": 4},
    ),
    "deberta v3": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        family="encoder",
        **{
            "attention.name": "deberta_v2",
            "position.name": "deberta_v2",
            "position.buckets": 4,
            "position.max_distance": 8,
        },
    ),
    "t5": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        family="encoder_decoder",
        n_encoder_layers=1,
        **{"position.name": "t5", "init.name": "t5", "attention.scale": 1.0, "lm_head.scale": 0.2},
    ),
    "xlnet": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        family="xlnet",
        **{"attention.name": "two_stream", "position.name": "transformer_xl", "lm_head.bias": True},
    ),
    "electra": ModelConfig.from_dotted(
        **SMALL,
        **DROPPED,
        **BERT,
        family="electra",
        generator={"d_model": 16, "n_heads": 4, "d_ff": 24},
        **{"embedding.dim": 16},
    ),
    "swin": ModelConfig.from_dotted(**(swin.SMALL | PYRAMID), **DROPPED),
    "swin v2": ModelConfig.from_dotted(**(swin.SMALL | swin.V2 | PYRAMID), **DROPPED),
}
PREFIX = "prefix language model"
NAMES = (*MODELS, PREFIX)
LAYOUTS = {
    2: {
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2),
        "tp2": ParallelConfig(tp=2),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
    },
    4: {
        "hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2),
        "tp4": ParallelConfig(tp=4),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
        "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    },
}
"""Ranks → layouts. Those of equally many ranks share one call, and so the reference."""


class PassThroughObjective:
    """Gives the model all that the batch holds and counts what has a target."""

    fields: ClassVar = {
        "causal": "targets",
        "permutation": "targets",
        "future_1": "ahead",
        "masked": "targets",
        "span": "targets",
        "generator": "targets",
        "sentence": "sentence_targets",
        "boundary": "span_left",
        "discriminator": "documents",
        "classifier": "labels",
    }

    def __init__(self, terms: list[str]) -> None:
        self.loss_weights = {name: 1.0 + i for i, name in enumerate(sorted(terms))}

    field_prefixes = Objective.field_prefixes
    n_tokens = Objective.n_tokens

    def target_counts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._counted(name, batch).sum() for name in self.loss_weights}

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(model(**{name: value for name, value in batch.items() if name != "ahead"}).losses)

    def _counted(self, name: str, batch: Mapping[str, Tensor]) -> Tensor:
        values = batch[self.fields[name]]
        return values > 0 if name == "boundary" else values >= 0


def images_for(config: ModelConfig) -> dict[str, Tensor]:
    """Rows of several images, the last row with one image less."""
    assert config.stages is not None
    height, width = (4 * side for side in config.stages.grid)
    images = [pixels(height, width, seed=number) for number in range(5)]
    rows = [[(row + n) % 5 for n in range(IMAGES_PER_ROW - (row == ROWS - 1))] for row in range(ROWS)]
    return to_batch(images, 4, 0, rows, labels=[4, 0, 2, 1, 3])


def batch_for(config: ModelConfig) -> dict[str, Tensor]:
    batch = images_for(config) if config.family == "hierarchical" else global_batch(seed=3)
    batch["keys"] = torch.arange(ROWS) * 7919 + 3
    if config.family == "hierarchical":
        return batch
    if config.family == "decoder":
        if config.n_mtp_heads:
            same = batch["documents"][:, 1:] == batch["documents"][:, :-1]
            batch["ahead"] = torch.full_like(batch["targets"], -100)
            batch["ahead"][:, :-1] = batch["targets"][:, 1:].where(same, -100)
        return batch
    if config.family == "encoder_decoder":
        other = global_batch(seed=4)
        for name in ("tokens", "positions", "documents"):
            batch[f"encoder_{name}"] = other[name]
        return batch
    if config.family == "xlnet":
        wanted = (batch["tokens"] % 3 == 0) & (batch["documents"] >= 0)
        batch["targets"] = batch["tokens"].where(wanted, -100)
        batch["order"] = (batch["tokens"] + 1).where(wanted, 0)
        return batch | {"segments": batch["positions"] % 3}
    masked = torch.arange(LENGTH).remainder(5) == torch.arange(ROWS)[:, None].remainder(4)
    original, masked = batch["tokens"].clone(), masked & (batch["documents"] >= 0)
    batch["targets"] = original.where(masked, -100)
    batch["tokens"] = original.where(~masked, 4)
    if config.embedding.n_segments:
        batch["segments"] = batch["positions"].remainder(2)
    if config.family == "electra":
        batch["original"] = original
    if "sentence" in config.extra_heads:
        first = batch["positions"] == 0
        batch["sentence_targets"] = (original % 2).where(first & (batch["documents"] >= 0), -100)
    if "boundary" in config.extra_heads:
        inside = torch.arange(LENGTH).clamp(1, LENGTH - 2) == torch.arange(LENGTH)
        batch["span_left"] = batch["span_right"] = (masked & inside).long()
    return batch


def compare(name: str, layouts: list[str]) -> list[str]:
    """The gradients of these layouts; those that were compared."""
    config = MODELS["llama" if name == PREFIX else name]
    reference = build(config).double().train()
    initialise(reference, 7)
    batch = batch_for(config)
    if name == PREFIX:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    terms = PassThroughObjective([]).__call__(reference, batch)
    objective = PassThroughObjective(list(terms))
    counts = objective.target_counts(batch)
    assert min(counts.values()) > 0
    losses = [objective.loss_weights[term] * terms[term] / counts[term] for term in terms]
    torch.stack(losses).sum().backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    compared = []
    for layout in layouts:
        engine = make_engine(config, LAYOUTS[dist.get_world_size()][layout], ADAMW)
        for n, parameter in reference.named_parameters():
            initial = block(engine, n, parameter.detach())
            assert torch.equal(initial, engine.local[n]), f"{layout}: initial {n} differs"
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(float(torch.stack(losses).sum().detach()), rel=1e-12), layout
        assert gradient_errors(engine, expected) == {}, layout
        compared.append(layout)
    return compared


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    [
        *cells(dict.fromkeys(NAMES, LAYOUTS[2]), 2, always=["tp2"], label=" on 2"),
        *cells(dict.fromkeys(NAMES, LAYOUTS[4]), 4, label=" on 4"),
    ],
)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    (compared, *_) = workers.run(compare, ranks, name, layouts)
    assert compared == layouts
