"""ZeRO stages: bytes that a rank holds, gradients in bfloat16 to the bit or summed in it, and packing into buffers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatfm.config import ParallelConfig
from megatfm.engines.native.replicated import assign_buckets
from megatfm.models import build
from megatfm.verify.traffic import TrafficCounter
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.sharded_engines import held_bytes, low_precision_gradients
from tests.support.workers import Workers


def count(layouts: list[ParallelConfig]) -> list[dict[str, int]]:
    return [held_bytes(parallel) for parallel in layouts]


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
        {
            "computed": 2 * psi,
            "whole gradients": 4 * psi,
            **{k: size * psi for k, size in everything.items()},
        },
        {"computed": 2 * psi, "whole gradients": 4 * psi, **shard},
        {"computed": 2 * psi, "whole gradients": 0, **shard},
        {"computed": 2 * root, "whole gradients": 0, **shard},
    ]
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
def test_packing_and_unpacking_lose_nothing(
    shapes: dict[str, tuple[int, ...]], ranks: int, most: int
) -> None:
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


def _span(rows: tuple[int, int]) -> tuple[int, int]:
    return rows[0], rows[0] + rows[1]


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
        wanted = local_block(engine, name, expected[name])
        off += float((gradient - wanted).square().sum())
        norm += float(wanted.square().sum())
    sent = sum(flow.sent_bytes for flow in traffic.flows() if flow.collective in REDUCTIONS)
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
    with pytest.raises(
        ValueError, match=r"zero = 3 would also add up micro-batches in bf16: set grad_accumulation"
    ):
        ParallelConfig(reduce_dtype="bf16")
