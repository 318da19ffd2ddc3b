"""Bytes that a step sends, counted where torch dispatches them, equal the closed forms: by axis, collective, rank."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatfm.config import (
    AdamWConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from megatfm.config.objective import (
    CausalObjective,
    MaskedObjective,
    ObjectiveConfig,
    PermutationObjective,
    ReplacedTokenObjective,
    SpanCorruptionObjective,
)
from megatfm.engines.data_parallel import blocks
from megatfm.models import build
from megatfm.verify.batch import random_batch
from megatfm.verify.expected import expected_flows
from megatfm.verify.rank import Answer, _step
from megatfm.verify.verify import traffic_misses
from tests.parity.test_families import MODELS
from tests.workers import Workers

LENGTH = 12
CAUSAL = CausalObjective()
CASES = {
    "gpt": CAUSAL,
    "llama": CAUSAL,
    "albert": MaskedObjective(),
    "t5": SpanCorruptionObjective(),
    "xlnet": PermutationObjective(),
    "electra": ReplacedTokenObjective(),
}
LAYOUTS = {
    2: {
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero2, shards": ParallelConfig(dp_shard=2, zero=2, accumulate="shards"),
        "zero3": ParallelConfig(dp_shard=2),
        "zero3, shards": ParallelConfig(dp_shard=2, accumulate="shards"),
        "tp2": ParallelConfig(tp=2, dp_shard=1),
        "tp2 without sequence parallel": ParallelConfig(tp=2, dp_shard=1, sequence_parallel=False),
    },
    4: {
        "zero0 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=0),
        "zero1 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=1),
        "hsdp": ParallelConfig(dp_replicate=2, dp_shard=2),
        "tp4": ParallelConfig(tp=4, dp_shard=1),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
        "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    },
}


def config_of(model: ModelConfig, objective: ObjectiveConfig, parallel: ParallelConfig) -> Config:
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return Config(
        name="x",
        model=model,
        objective=objective,
        data=DataConfig(
            train="t",
            tokenizer="m",
            sequence_length=LENGTH,
            target_length=LENGTH if model.family == "encoder_decoder" else None,
        ),
        parallel=parallel,
        optimizer=AdamWConfig(lr=1e-3),
        train=TrainConfig(steps=1, global_batch=4 * data_ranks, micro_batch=2, precision="fp64"),
    )


def steps(configs: list[Config]) -> list[Answer]:
    return [_step(config, random_batch(config), dist.get_world_size()) for config in configs]


@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_counted_is_expected(workers: Workers, name: str, ranks: int) -> None:
    configs = {
        layout: config_of(MODELS[name], CASES[name], parallel)
        for layout, parallel in LAYOUTS[ranks].items()
        if name != "xlnet" or parallel.tp == 1
    }
    by_rank = workers.run(steps, ranks, list(configs.values()))
    missed = {}
    for (layout, config), answers in zip(configs.items(), zip(*by_rank, strict=True), strict=True):
        if misses := traffic_misses(answers, expected_flows(config, random_batch(config))):
            missed[layout] = misses
    assert missed == {}


DIVISIBLE = ModelConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, d_ff=48)
SCALARS = 1000
"""Bytes that sums of losses and counts, and the gradient's norm, take at most; no weight or activation is so small."""


def test_sums_are_those_of_the_papers(workers: Workers) -> None:
    """In elements of float64, b = 2 rows of s = 12 tokens, two micro-batches a step."""
    with torch.device("meta"):
        model = build(DIVISIBLE)
    everything = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for block in blocks(model) for p in block.parameters())
    residual, m, half = 2 * 12 * 32, 2, 1 / 2
    tp = m * (8 * DIVISIBLE.n_layers + 4) * residual * half  # 4 more for embedding and head
    wanted = {
        "zero0": 2 * everything * half,
        "zero1": 2 * everything * half,
        "zero2": 2 * everything * half,
        "zero2, shards": (m + 1) * everything * half,
        # What no block owns is gathered once for both passes.
        "zero3": ((m + 1) * everything + m * in_blocks) * half,
        "zero3, shards": (2 * m * everything + m * in_blocks) * half,
        "tp2": tp,
        "tp2 without sequence parallel": tp,
    }
    configs = [config_of(DIVISIBLE, CAUSAL, LAYOUTS[2][layout]) for layout in wanted]
    for answers in workers.run(steps, 2, configs):
        for layout, answer in zip(wanted, answers, strict=True):
            sent = sum(flow.sent_bytes for flow in answer.flows)
            if layout == "tp2":  # norms' gradients, and the loss over the vocabulary
                sent -= next(f.sent_bytes for f in answer.flows if f.collective == "all_reduce")
            elif "tp2" in layout:
                sent -= m * 4 * 24 * 8  # the loss over the vocabulary: 4 numbers a token
            assert 0 <= sent - wanted[layout] * 8 < SCALARS, layout


def test_recomputing_repeats_gathers_and_few_sums(workers: Workers) -> None:
    """Two gathers a layer; "full" stops before the second scatter, "selective" keeps what both gave."""
    plain = config_of(DIVISIBLE, CAUSAL, LAYOUTS[2]["tp2"])
    how = ("none", "full", "selective")
    configs = [
        plain.model_copy(update={"train": plain.train.model_copy(update={"recompute": each})}) for each in how
    ]
    blocks_run = 2 * DIVISIBLE.n_layers  # in two micro-batches
    for answers in workers.run(steps, 2, configs):
        calls = [{f.collective: f.calls for f in answer.flows} for answer in answers]
        none, full, selective = (Counter(found) for found in calls)
        assert full - none == Counter(all_gather=2 * blocks_run, reduce_scatter=blocks_run)
        assert selective - none == Counter(all_gather=2 * blocks_run)
