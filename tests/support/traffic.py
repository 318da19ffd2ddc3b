"""Configs whose traffic has a closed form, and the flows that differ from it."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatfm.config import Config, DataConfig, ModelConfig, OptimizerSection, ParallelConfig, TrainConfig
from megatfm.config.objective import ObjectiveConfig
from megatfm.verify.expected import compute_expected_traffic
from megatfm.verify.rank_processes import RankResult, _step
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import find_traffic_mismatches
from tests.support.models import ADAMW, LENGTH
from tests.support.workers import Workers


def traffic_config(
    model: ModelConfig,
    objective: ObjectiveConfig,
    parallel: ParallelConfig,
    *,
    optimizer: OptimizerSection = ADAMW,
    recompute: str = "none",
    plugins: Sequence[str] = (),
) -> Config:
    """Two micro-batches a step, and one more with stages."""
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    return Config(
        name="x",
        plugins=tuple(plugins),
        model=model,
        objective=objective,
        data=DataConfig(
            train="t",
            tokenizer="m",
            sequence_length=LENGTH,
            target_length=LENGTH if model.family == "encoder_decoder" else None,
        ),
        parallel=parallel,
        optimizer=optimizer,
        train=TrainConfig(
            steps=1,
            global_batch=2 * (3 if parallel.pp > 1 else 2) * data_ranks,
            micro_batch=2,
            precision="fp64",
            recompute=recompute,
        ),
    )


def count_steps(configs: list[Config]) -> list[RankResult]:
    """The traffic of a step of each config on this rank."""
    return [_step(config, draw_batch(config), dist.get_world_size()) for config in configs]


def traffic_mismatches(workers: Workers, ranks: int, configs: Mapping[str, Config]) -> dict[str, list[str]]:
    """Layouts with flows that are not as expected, and a line for each such flow."""
    by_rank = workers.run(count_steps, ranks, list(configs.values()), timeout=180.0)
    actual = {}
    for (layout, config), answers in zip(configs.items(), zip(*by_rank, strict=True), strict=True):
        if misses := find_traffic_mismatches(answers, compute_expected_traffic(config, draw_batch(config))):
            actual[layout] = misses
    return actual
