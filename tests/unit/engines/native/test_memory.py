"""What a step is said to need, against the bytes that are counted in one."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.engines.interface import MemoryNeeds
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.zero import max_block_inputs
from megatfm.parallel.layout import transformer_blocks
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.train.startup_checks import compute_block_input_bytes
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, LENGTH, ROWS, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.sharded_engines import held_bytes
from tests.support.workers import Workers

MICRO = 2


def config(parallel: ParallelConfig, micro_batch: int = MICRO) -> Config:
    config = load_config("quickstart", ["data.tokenizer=t", "data.train=d"])
    return config.model_copy(
        update={
            "model": UNTIED_MODEL,
            "parallel": parallel,
            "data": config.data.model_copy(update={"sequence_length": LENGTH}),
            "train": config.train.model_copy(update={"global_batch": ROWS, "micro_batch": micro_batch}),
        }
    )


def needs(config: Config, engine: NativeEngine) -> MemoryNeeds:
    """As the check before training asks for it."""
    microbatches = config.train.global_batch // (config.train.micro_batch * engine.mesh.data_ranks)
    return engine.memory_needed(
        microbatches, compute_block_input_bytes(config, engine.precision.compute_dtype.itemsize)
    )


def compare() -> None:
    for zero in range(4):
        parallel = ParallelConfig(dp_shard=2, zero=zero)  # type: ignore[arg-type]
        output = needs(config(parallel), build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16"))
        actual = held_bytes(parallel)
        psi = actual["stored"] * (1 if zero == 0 else 2) // 4
        assert output.optimizer_state == actual["optimizer"], zero
        assert output.gradients == (actual["whole gradients"] or 4 * psi), zero
        one_pass = needs(
            config(parallel, ROWS // 2), build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16")
        )
        assert one_pass.gradients == (actual["whole gradients"] or actual["gradients"]), zero
        largest = max(
            sum(p.numel() for p in b.parameters())
            for b in transformer_blocks(build_engine(UNTIED_MODEL, parallel, ADAMW).model)
        )
        # Between a forward and a backward pass stage 3 has no block gathered; in a block's pass, one.
        assert output.gathered == (0 if zero < 2 else actual["computed"] + (zero == 3) * 2 * largest), zero


def test_gradients_moments_and_gathered_weights_are_those_counted(workers: Workers) -> None:
    workers.run(compare, 2)


def kept_inputs(n_layers: int) -> tuple[int, int]:
    """Bytes said to be kept of inputs of blocks, and all that full recomputation keeps, in one micro-batch."""
    model = UNTIED_MODEL.model_copy(update={"n_layers": n_layers})
    engine = build_engine(model, ParallelConfig(zero=0), ADAMW, recomputed="full")
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held_here.append(tensor)  # or its address might come up again
        return tensor

    held_here: list[torch.Tensor] = []
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        CAUSAL(engine.model.train(), {k: v[:MICRO] for k, v in global_batch(seed=1).items()})
    return needs(config(ParallelConfig(zero=0)), engine).block_inputs, sum(kept.values())


def test_a_block_more_keeps_its_input_more(workers: Workers) -> None:
    ((few, kept),) = workers.run(kept_inputs, 1, 2)
    ((more, kept_more),) = workers.run(kept_inputs, 1, 5)
    weights = 0  # recomputed blocks save none
    assert more - few == kept_more - kept - weights == 3 * MICRO * LENGTH * UNTIED_MODEL.d_model * 8


@pytest.mark.parametrize(
    ("schedule", "rank", "microbatches", "expected"),
    [
        ("gpipe", 0, 6, 6), ("gpipe", 3, 6, 6),
        ("1f1b", 0, 6, 4), ("1f1b", 3, 6, 1), ("1f1b", 0, 2, 2),
    ],
)  # fmt: skip
def test_a_pipeline_rank_holds_several_microbatches(
    schedule: str, rank: int, microbatches: int, expected: int
) -> None:
    pipeline = Pipeline(schedule, ranks=4, stages_per_rank=1, stages=(), parameter_ranks={})
    assert max_block_inputs(pipeline, rank, microbatches, n_blocks=3) == 3 * expected


def test_sequence_parallel_ranks_keep_their_part() -> None:
    full = compute_block_input_bytes(config(ParallelConfig()), 2)
    assert full == 2 * MICRO * LENGTH * UNTIED_MODEL.d_model
    assert compute_block_input_bytes(config(ParallelConfig(tp=2)), 2) == full // 2
    assert compute_block_input_bytes(config(ParallelConfig(tp=2, sequence_parallel=False)), 2) == full
