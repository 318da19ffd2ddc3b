"""ZeRO stages: bytes that a rank holds and needs, and reduced gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatfm.config import Config, ModelConfig, ParallelConfig, load_config
from megatfm.describe.per_rank import fake_ranks
from megatfm.engines.interface import MemoryNeeds
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.fully_sharded import reduce_gradients
from megatfm.engines.native.replicated import assign_buckets
from megatfm.engines.pipeline import count_max_block_inputs
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.train.startup_checks import compute_block_input_bytes
from megatfm.verify.traffic import TrafficCounter
from tests.support.batches import CAUSAL, global_batch
from tests.support.expert_parity import MOE_OPTIONS, SPARSE
from tests.support.models import ADAMW, LENGTH, ROWS, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.sharded_engines import count_held_bytes, low_precision_gradients
from tests.support.tensors import OperatorCounter
from tests.support.workers import Workers


def count(layouts: list[ParallelConfig]) -> list[dict[str, int]]:
    return [count_held_bytes(parallel) for parallel in layouts]


def test_bytes_are_those_of_the_formulas(workers: Workers) -> None:
    """Ψ parameters on N = 2 ranks, of which R lie in no block."""
    n, everything = 2, {"stored": 4, "gradients": 4, "optimizer": 8}
    engine_bytes = workers.run(count, n, [ParallelConfig(dp_shard=n, zero=zero) for zero in range(4)])
    with torch.device("meta"):
        model = build(UNTIED_MODEL)
    psi = sum(p.numel() for p in model.parameters())
    root = sum(p.numel() for name, p in model.named_parameters() if ".layers." not in name)
    shard = {kind: size * psi // n for kind, size in everything.items()}
    expected = [
        {"computed": 2 * psi, "whole gradients": 4 * psi, **{k: size * psi for k, size in everything.items()}},
        {"computed": 2 * psi, "whole gradients": 4 * psi, **shard},
        {"computed": 2 * psi, "whole gradients": 0, **shard},
        {"computed": 2 * root, "whole gradients": 0, **shard},
    ]  # fmt: skip
    for rank in engine_bytes:
        assert rank == expected


def all_stages() -> None:
    expected = low_precision_gradients(3)
    for zero in range(3):
        for name, gradient in low_precision_gradients(zero).items():
            if zero < 2 and "norm" in name:
                # A broadcast weight's gradient is a sum over tokens; here it isn't rounded to bfloat16 after it.
                assert (gradient - expected[name]).norm() < 2**-8 * expected[name].norm(), (zero, name)
            else:
                assert torch.equal(gradient, expected[name]), (zero, name)


def test_stages_agree_to_the_bit_in_bfloat16(workers: Workers) -> None:
    """Gradients are bfloat16, and added up and reduced in float32, by FSDP2 as by us; so the second step's too."""
    workers.run(all_stages, 2)


SHAPES = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1
)


@given(SHAPES, st.integers(1, 4), st.sampled_from([1, 20, 1000]))
def test_packing_and_unpacking_lose_nothing(shapes: dict[str, tuple[int, ...]], ranks: int, most: int) -> None:
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    back = {name: torch.zeros(shape) for name, shape in shapes.items()}
    buckets = list(assign_buckets(shapes, ranks, most))
    assert [name for bucket in buckets for name in bucket.shapes] == list(shapes)
    for bucket in buckets:
        assert len(bucket.shapes) == 1 or sum(torch.Size(s).numel() for s in bucket.shapes.values()) <= most
        buffer = bucket.pack(tensors, torch.empty(0))
        for rank in range(ranks):
            for name, block in bucket.unpack_shard(buffer[rank], rank).items():
                first, rows = bucket.shard_rows(name, rank)
                assert torch.equal(block, tensors[name][first : first + rows])
            local = {n: tensors[n][slice(*_span(bucket.shard_rows(n, rank)))] for n in bucket.shapes}
            assert torch.equal(bucket.pack_shard(local, torch.empty(0)), buffer[rank])
        bucket.unpack(buffer, back)
    assert all(torch.equal(tensor, back[name]) for name, tensor in tensors.items())


def test_operators_of_a_bucket_do_not_grow_with_the_ranks() -> None:
    """A tensor's full shards are copied at once; a last one that is not full, and its padding, separately."""
    counts = {}
    for ranks in (4, 64):
        (bucket,) = assign_buckets({"even": (128, 3), "uneven": (130, 3)}, ranks, 2**24)
        tensors = {name: torch.rand(shape) for name, shape in bucket.shapes.items()}
        with OperatorCounter() as operators:
            bucket.unpack(bucket.pack(tensors, torch.empty(0)), tensors)
        counts[ranks] = operators.count
    assert 0 < counts[4] == counts[64], counts


def _span(rows: tuple[int, int]) -> tuple[int, int]:
    return rows[0], rows[0] + rows[1]


def list_groups(config: ModelConfig, parallel: ParallelConfig, rank: int) -> list[list[int]]:
    """Return the ranks of the process groups that a rank makes for its engine, in order; a step must make none."""
    created: list[list[int]] = []
    make = device_mesh.new_group

    def record(*, ranks: list[int], **options: Any) -> Any:
        created.append(ranks)
        return make(ranks=ranks, **options)

    ranks = parallel.pp * parallel.dp_replicate * parallel.dp_shard
    with fake_ranks(ranks, rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_mesh, "new_group", record)
        engine = build_engine(config, parallel)
        before = list(created)
        for parameter in engine.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.data.reduce()
        engine.step(1e-2, clip=1.0)
        assert created == before
    return before


@pytest.mark.parametrize("zero", [0, 1])
def test_all_stages_make_the_same_groups_before_the_first_step(zero: int) -> None:
    """Making one takes all ranks, and would hang if they differed; only the second stage of two has experts here."""
    kinds = {"layer_types": ["plain", "plain", "sparse", "sparse"], "layer_type.sparse.ffn": MOE_OPTIONS}
    config = ModelConfig.from_dotted(**{**SPARSE, "n_layers": 4, **kinds})
    parallel = ParallelConfig(pp=2, dp_replicate=2, dp_shard=4, ep=2, zero=zero)
    first, second = (list_groups(config, parallel, rank) for rank in (0, 8))
    assert first == second


def test_accumulating_shards_needs_a_stage_that_has_them() -> None:
    with pytest.raises(ValueError, match="grad_accumulation = 'sharded': zero = 1 doesn't shard gradients"):
        ParallelConfig(zero=1, grad_accumulation="sharded")


LAYOUTS = [
    ParallelConfig(dp_shard=2, zero=0),
    ParallelConfig(dp_shard=2, zero=1),
    ParallelConfig(dp_replicate=2, dp_shard=1, zero=1),
    ParallelConfig(dp_shard=2, zero=2, grad_accumulation="sharded"),
    ParallelConfig(dp_shard=2, zero=3, grad_accumulation="sharded"),
]
REDUCTIONS = ("all_reduce", "reduce_scatter")


def reduced(parallel: ParallelConfig) -> tuple[float, int]:
    """‖g − r‖ / ‖r‖ over all gradients here, and bytes sent to reduce them."""
    batch = global_batch(seed=4)
    _, expected = one_device_gradients(one_device(TIED_MODEL), batch)
    engine = build_engine(TIED_MODEL, parallel, ADAMW, precision="fp32")
    with TrafficCounter({}) as traffic:
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
    off = norm = 0.0
    for name, gradient in engine.gradients().items():
        assert gradient.dtype == engine.local[name].dtype
        expected_block = local_block(engine, name, expected[name])
        off += float((gradient - expected_block).square().sum())
        norm += float(expected_block.square().sum())
    sent = sum(flow.sent_bytes for flow in traffic.list_traffic() if flow.collective in REDUCTIONS)
    return (off / norm) ** 0.5, sent


def compare() -> list[tuple[float, float]]:
    actual = []
    for parallel in LAYOUTS:
        _, full = reduced(parallel)
        error, half = reduced(parallel.model_copy(update={"reduce_dtype": "bf16"}))
        actual.append((error, half / full))
    return actual


def test_half_the_bytes_and_one_rounding(workers: Workers) -> None:
    for (error, share), parallel in zip(workers.run(compare, 2)[0], LAYOUTS, strict=True):
        assert share == pytest.approx(0.5, abs=0.01), parallel
        # Of two addends that are each rounded to half a step of bfloat16, and their sum.
        micro_batches = 4 if parallel.grad_accumulation == "sharded" else 1
        assert 1e-4 < error < 3 * 2**-9 * micro_batches**0.5, parallel


def test_micro_batches_are_not_added_up_in_it() -> None:
    with pytest.raises(ValueError, match=r"zero = 3 would also add up micro-batches in bf16: set grad_accumulation"):
        ParallelConfig(reduce_dtype="bf16")


def sum_deferred_gradients() -> float:
    """Return the sum of this rank's gradients, of a pass after which FSDP2 was told to reduce nothing yet."""
    mesh = build_mesh(ParallelConfig(dp_shard=2), 2, "cpu")
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=mesh.device_mesh["dp_shard"])
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 2)).sum().backward()
    reduce_gradients(model)
    (gradient,) = (parameter.grad for parameter in model.parameters())
    assert isinstance(gradient, DTensor)
    return float(gradient.to_local().sum())


def test_deferred_gradients_are_summed_unscaled(workers: Workers) -> None:
    """Each rank has one row of the weight; its gradient is two ones from each rank."""
    assert workers.run(sum_deferred_gradients, 2) == [2 * 2.0, 2 * 2.0]


# ------------------------------------------------------------------------------------------- memory of a step


MICRO = 2


def config(parallel: ParallelConfig, micro_batch: int = MICRO) -> Config:
    config = load_config("quickstart", ["data.tokenizer=t", "data.train=d"])
    return config.model_copy(
        update={"model": UNTIED_MODEL, "parallel": parallel,
                "data": config.data.model_copy(update={"sequence_length": LENGTH}),
                "train": config.train.model_copy(update={"global_batch": ROWS, "micro_batch": micro_batch})},
    )  # fmt: skip


def needs(config: Config, engine: NativeEngine) -> MemoryNeeds:
    """Return the memory needs, as the check before training asks for them."""
    microbatches = config.train.global_batch // (config.train.micro_batch * engine.mesh.data_ranks)
    return engine.estimate_memory(
        microbatches, compute_block_input_bytes(config, engine.precision.compute_dtype.itemsize)
    )


def compare_memory() -> None:
    for zero in range(4):
        parallel = ParallelConfig(dp_shard=2, zero=zero)  # type: ignore[arg-type]
        output = needs(config(parallel), build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16"))
        actual = count_held_bytes(parallel)
        psi = actual["stored"] * (1 if zero == 0 else 2) // 4
        assert output.optimizer_state == actual["optimizer"], zero
        assert output.gradients == (actual["whole gradients"] or 4 * psi), zero
        one_pass = needs(config(parallel, ROWS // 2), build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16"))
        assert one_pass.gradients == (actual["whole gradients"] or actual["gradients"]), zero
        largest = max(
            sum(p.numel() for p in b.parameters())
            for b in iter_blocks(build_engine(UNTIED_MODEL, parallel, ADAMW).model)
        )
        # Between a forward and a backward pass stage 3 has no block gathered; in a block's pass, one.
        assert output.gathered == (0 if zero < 2 else actual["computed"] + (zero == 3) * 2 * largest), zero


def test_gradients_moments_and_gathered_weights_are_those_counted(workers: Workers) -> None:
    workers.run(compare_memory, 2)


def kept_inputs(n_layers: int) -> tuple[int, int]:
    """Bytes said to be kept of inputs of blocks, and all that full recomputation keeps, in one micro-batch."""
    model = UNTIED_MODEL.model_copy(update={"n_layers": n_layers})
    engine = build_engine(model, ParallelConfig(zero=0), ADAMW, recomputed="full")
    n_bytes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        n_bytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held_here.append(tensor)  # or its address might come up again
        return tensor

    held_here: list[torch.Tensor] = []
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        CAUSAL(engine.model.train(), {k: v[:MICRO] for k, v in global_batch(seed=1).items()})
    return needs(config(ParallelConfig(zero=0)), engine).block_inputs, sum(n_bytes.values())


def test_a_block_more_keeps_its_input_more(workers: Workers) -> None:
    ((few, n_bytes),) = workers.run(kept_inputs, 1, 2)
    ((more, kept_more),) = workers.run(kept_inputs, 1, 5)
    weights = 0  # recomputed blocks save none
    assert more - few == kept_more - n_bytes - weights == 3 * MICRO * LENGTH * UNTIED_MODEL.d_model * 8


@pytest.mark.parametrize(("schedule", "rank", "microbatches", "expected"), [
    ("gpipe", 0, 6, 6), ("gpipe", 3, 6, 6),
    ("1f1b", 0, 6, 4), ("1f1b", 3, 6, 1), ("1f1b", 0, 2, 2),
])  # fmt: skip
def test_a_pipeline_rank_holds_several_microbatches(schedule: str, rank: int, microbatches: int, expected: int) -> None:
    pipeline = Pipeline(schedule, ranks=4, stages_per_rank=1, stages=(), parameter_ranks={})
    assert count_max_block_inputs(pipeline, rank, microbatches, n_blocks=3) == 3 * expected


def test_sequence_parallel_ranks_keep_their_part() -> None:
    full = compute_block_input_bytes(config(ParallelConfig()), 2)
    assert full == 2 * MICRO * LENGTH * UNTIED_MODEL.d_model
    assert compute_block_input_bytes(config(ParallelConfig(tp=2)), 2) == full // 2
    assert compute_block_input_bytes(config(ParallelConfig(tp=2, sequence_parallel=False)), 2) == full
