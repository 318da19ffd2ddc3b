"""What `describe` says of a rank, against engines that are built in as many processes."""

import math

import pytest

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.describe import describe, to_lines
from megatfm.describe.per_rank import rank_state
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.replicated import Replicated
from megatfm.train.startup_checks import block_input_bytes
from tests.support.models import ADAMW, LENGTH, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.sharded_engines import held_bytes
from tests.support.workers import Workers

LAYOUTS = [
    *(ParallelConfig(dp_shard=3, zero=zero) for zero in (0, 1, 2, 3)),
    ParallelConfig(dp_shard=3, zero=2, grad_accumulation="sharded"),
    ParallelConfig(dp_shard=1, tp=2),
    ParallelConfig(dp_shard=2, tp=2, zero=3),
    ParallelConfig(dp_shard=1, dp_replicate=2, zero=3),
    ParallelConfig(dp_shard=2, cp=2, zero=1),
]
FIRST_BLOCKS = tuple(f"decoder.layers.{number}." for number in range(3))


def config_of(parallel: ParallelConfig) -> Config:
    config = load_config("quickstart", ["data.tokenizer=t", "data.train=d"])
    changed = {
        "model": UNTIED_MODEL,
        "parallel": parallel,
        "optimizer": ADAMW,
        "data": config.data.model_copy(update={"sequence_length": LENGTH}),
        "train": config.train.model_copy(update={"global_batch": 12, "micro_batch": 2, "precision": "bf16"}),
    }
    return config.model_copy(update=changed)


def measure(parallel: ParallelConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradients and moments on this rank: of an engine's tensors, and what it tells of gradients.

    ZeRO 2 keeps the weights that it gathers until a step's last backward pass.
    """
    engine: NativeEngine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16")
    config, counted = config_of(parallel), held_bytes(parallel)
    microbatches = config.train.global_batch // (config.train.micro_batch * engine.mesh.data_ranks)
    gradients = engine.memory_needed(microbatches, block_input_bytes(config, 2)).gradients
    copy = counted["computed"] if isinstance(engine.data, Replicated) or parallel.zero == 2 else 0
    return counted["stored"] + copy, gradients, counted["optimizer"]


@pytest.mark.parametrize(
    "parallel", LAYOUTS, ids=lambda parallel: str(parallel.model_dump(exclude_defaults=True))
)
def test_a_rank_holds_what_its_engine_does(workers: Workers, parallel: ParallelConfig) -> None:
    ranks = parallel.dp_shard * parallel.dp_replicate * parallel.cp * parallel.tp * parallel.pp
    fullest = max(workers.run(measure, ranks, parallel), key=sum)
    state = rank_state(config_of(parallel))
    assert state is not None
    assert state.ranks == ranks
    assert (state.weight_bytes, state.gradient_bytes, state.optimizer_bytes) == fullest


def test_the_fullest_stage_of_a_pipeline_counts() -> None:
    """Embedding and three blocks, against a block, the norm and the head."""
    words = [
        "model.vocab_size=64",
        "parallel.pp=2",
        "parallel.pp_split_points=['decoder.layers.3']",
        "optimizer={name='adamw',lr=1e-3}",
    ]
    config = load_config("quickstart", words)
    sizes = {name: math.prod(shape) for name, shape in describe(config).shapes.items()}
    first = sum(size for name, size in sizes.items() if name.startswith(("decoder.emb", *FIRST_BLOCKS)))
    state = rank_state(config)
    assert state is not None
    assert first > sum(sizes.values()) / 2
    assert (state.parameters, state.weight_bytes) == (first, (4 + 2) * first)
    assert (state.gradient_bytes, state.optimizer_bytes) == (4 * first, 8 * first)


def test_the_table_is_printed_for_several_ranks_alone() -> None:
    for words, expected in (
        ([], None),
        (["parallel.engine=deepspeed", "parallel.dp_shard=2"], None),
        (["parallel.ep=2", "parallel.dp_shard=-1"], "of 2: weights"),
        (["parallel.tp=2", "parallel.zero=0"], "of 2: weights"),
    ):
        printed = dict(
            to_lines(
                describe(
                    load_config(
                        "quickstart-moe", ["model.attention.n_heads=2", "model.vocab_size=64", *words]
                    )
                )
            )
        )
        assert (expected is None) == ("  on a rank" not in printed), words
        assert expected is None or expected in printed["  on a rank"], words
