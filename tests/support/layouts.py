"""Layouts that several tests go through."""

from megatfm.config import ParallelConfig

DATA_AND_TENSOR_LAYOUTS = {
    "zero3 on 1": ParallelConfig(),
    "zero0 on 2": ParallelConfig(dp_shard=2, zero=0),
    "zero1 on 2": ParallelConfig(dp_shard=2, zero=1),
    "zero2 on 2": ParallelConfig(dp_shard=2, zero=2),
    "zero3 on 2": ParallelConfig(dp_shard=2),
    "zero3 on 2, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
    "replicas on 2": ParallelConfig(dp_replicate=2, dp_shard=1),
    "tp2": ParallelConfig(tp=2),
    "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
    "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
    "hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2),
    "zero1 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=1),
}
RANKS_OF_LAYOUT = {
    layout: parallel.dp_replicate * max(parallel.dp_shard, 1) * parallel.tp
    for layout, parallel in DATA_AND_TENSOR_LAYOUTS.items()
}
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")
FAMILY_LAYOUTS = {
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
PLAIN_LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "tp2": ParallelConfig(tp=2),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2),
        "zero3": ParallelConfig(dp_shard=2),
    },
}
"""Ranks → one layout of each kind."""
