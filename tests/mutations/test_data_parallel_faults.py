"""Faults in sharing weights, gradients and optimizer state, in loss scaling and clipping: each must be found.

Every fault is put in on all ranks while one of the suite's own comparisons runs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.engines import gradients
from megatfm.engines.native import replicated
from megatfm.engines.native.fully_sharded import FullySharded
from megatfm.engines.native.replicated import Bucket, Replicated
from megatfm.layers import dropout
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.support.batches import CAUSAL, PassThroughObjective, family_batch, global_batch
from tests.support.layouts import DATA_AND_TENSOR_LAYOUTS, RANKS_OF_LAYOUT
from tests.support.models import ADAMW, FAMILY_MODELS, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    gradient_errors,
    local_block,
    microbatches,
    one_device,
    one_device_gradients,
)
from tests.support.sharded_engines import low_precision_gradients, overflow_on_one_rank
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def last_microbatch_is_not_reduced(patch: Patch) -> None:
    real = FullySharded.start_microbatch

    def start_microbatch(self: FullySharded, is_last: bool) -> None:
        self._calls = getattr(self, "_calls", 0) + 1  # type: ignore[attr-defined]
        real(self, is_last=self._calls == 1)  # type: ignore[attr-defined]

    patch.setattr(FullySharded, "start_microbatch", start_microbatch)


def shards_are_the_neighbour_s(patch: Patch) -> None:
    real = Bucket.unpack_shard
    patch.setattr(Bucket, "unpack_shard", lambda self, row, rank: real(self, row.roll(1), rank))


def rows_are_dealt_off_by_one(patch: Patch) -> None:
    real = Bucket.pack

    def pack(self: Bucket, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
        return real(self, {name: tensor.roll(1, 0) for name, tensor in tensors.items()}, like)

    patch.setattr(Bucket, "pack", pack)


def replicas_are_not_summed(patch: Patch) -> None:
    patch.setattr(Replicated, "_start_replica_reduction", lambda self, index: None)


def whole_gradients_are_averaged(patch: Patch) -> None:
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        work = real(tensor, **options)
        if tensor.numel() > 100:
            work.wait()
            tensor /= 2
        return work

    patch.setattr(replicated.dist, "all_reduce", all_reduce)


def buckets_are_sent_before_they_are_complete(patch: Patch) -> None:
    def complete(self: Replicated, place: int, parameter: Tensor) -> None:
        if self._awaited and len(self._pending_gradients) < len(self._buckets):
            self._start_next_reduction()

    patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
    patch.setattr(Replicated, "_on_gradient_ready", complete)


def weights_are_not_gathered_after_a_step(patch: Patch) -> None:
    real, calls = Replicated.sync_weights, [0]

    def sync_weights(self: Replicated, frozen: bool = False) -> None:
        calls[0] += 1
        if calls[0] == 1:  # the initial ones
            real(self, frozen)

    patch.setattr(Replicated, "sync_weights", sync_weights)


def gathered_weights_are_kept_over_a_step(patch: Patch) -> None:
    real = FullySharded.start_microbatch

    def start_microbatch(self: FullySharded, is_last: bool) -> None:
        real(self, is_last)
        self._root.set_reshard_after_backward(False)

    patch.setattr(FullySharded, "start_microbatch", start_microbatch)
    patch.setattr(FullySharded, "sync_weights", lambda self, frozen=False: None)


def the_norm_counts_copies(patch: Patch) -> None:
    real = gradients._find_sharded_axes
    patch.setattr(gradients, "_find_sharded_axes", lambda layout, sharded, replicas: real(layout, True, replicas))


def the_norm_is_of_the_own_shard(patch: Patch) -> None:
    real = gradients._find_sharded_axes
    patch.setattr(gradients, "_find_sharded_axes", lambda layout, sharded, replicas: real(layout, False, replicas))


def one_key_for_all_rows(patch: Patch) -> None:
    real = dropout.require_rng_keys
    patch.setattr(dropout, "require_rng_keys", lambda *how: torch.zeros_like(real(*how)))


def the_scale_stays_in_the_gradients(patch: Patch) -> None:
    patch.setattr(torch, "_foreach_mul_", lambda tensors, factor: None)


def the_scale_is_not_lowered(patch: Patch) -> None:
    from megatfm.engines.losses import LossScale

    patch.setattr(LossScale, "update", lambda self, finite: None)


def gradients_add_up_in_bfloat16(patch: Patch) -> None:
    real = replicated.materialize

    def materialise(stage: Any, precision: Any, device: Any) -> None:
        real(stage, precision, device)
        for parameter in stage.parameters():
            parameter.grad_dtype = precision.compute_dtype

    patch.setattr(replicated, "materialize", materialise)


def gradients_differ(layout: str) -> bool:
    batch = global_batch(seed=3)
    _, expected = one_device_gradients(one_device(UNTIED_MODEL), batch)
    engine = build_engine(UNTIED_MODEL, DATA_AND_TENSOR_LAYOUTS[layout], ADAMW)
    engine.forward_backward(microbatches(engine, batch), CAUSAL)
    return bool(gradient_errors(engine, expected))


def two_steps_differ(layout: str) -> bool:
    """The norms, and the gradients at the weights after one step."""
    engine, reference = (build_engine(UNTIED_MODEL, DATA_AND_TENSOR_LAYOUTS[layout], ADAMW), one_device(UNTIED_MODEL))
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.dim() == 2]},
            {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        weight_decay=0.1,
        betas=ADAMW.betas,
        eps=ADAMW.eps,
    )
    for step in range(2):
        batch = global_batch(seed=step)
        _, expected = one_device_gradients(reference, batch)
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
        wrong = {
            name: float((g - local_block(engine, name, expected[name])).norm())
            for name, g in engine.gradients().items()
        }
        norm = torch.nn.utils.clip_grad_norm_(list(reference.parameters()), 0.3)
        if max(wrong.values()) > 1e-6 * norm or abs(engine.step(1e-2, 0.3) - norm) > 1e-9 * norm:
            return True
        plain.step()
    return False


def dropout_differs(layout: str) -> bool:
    config = FAMILY_MODELS["gpt"]
    batch = family_batch(config)
    with pytest.MonkeyPatch.context() as clean:
        clean.setattr(dropout, "require_rng_keys", lambda keys, _: keys)
        reference = build(config).double().train()
        initialise(reference, 7)
        terms = PassThroughObjective([])(reference, batch)
    objective = PassThroughObjective(list(terms))
    counts = objective.target_counts(batch)
    expected = sum(objective.loss_weights[n] * float(t.detach()) / int(counts[n]) for n, t in terms.items())
    engine = build_engine(config, DATA_AND_TENSOR_LAYOUTS[layout], ADAMW)
    stats = engine.forward_backward(microbatches(engine, batch), objective)
    return abs(stats.loss - expected) > 1e-9 * expected


def half_precision_differs(layout: str) -> bool:
    try:
        overflow_on_one_rank(DATA_AND_TENSOR_LAYOUTS[layout])
    except AssertionError:
        return True
    return False


def bfloat16_differs(layout: str) -> bool:
    zero = DATA_AND_TENSOR_LAYOUTS[layout].zero
    actual, expected = (low_precision_gradients(stage) for stage in (zero, 3))
    return any(not torch.equal(g, expected[name]) for name, g in actual.items() if "norm" not in name)


FAULTS: dict[Callable[[Patch], None], tuple[Callable[[str], bool], str]] = {
    last_microbatch_is_not_reduced: (gradients_differ, "zero3 on 2"),
    shards_are_the_neighbour_s: (gradients_differ, "zero1 on 2"),
    rows_are_dealt_off_by_one: (gradients_differ, "zero1 on 2"),
    replicas_are_not_summed: (gradients_differ, "zero1 2 × replicas 2"),
    whole_gradients_are_averaged: (gradients_differ, "zero0 on 2"),
    buckets_are_sent_before_they_are_complete: (gradients_differ, "zero1 on 2"),
    weights_are_not_gathered_after_a_step: (two_steps_differ, "zero1 on 2"),
    gathered_weights_are_kept_over_a_step: (two_steps_differ, "zero2 on 2"),
    the_norm_counts_copies: (two_steps_differ, "zero0 on 2"),
    the_norm_is_of_the_own_shard: (two_steps_differ, "zero1 on 2"),
    one_key_for_all_rows: (dropout_differs, "zero3 on 2"),
    the_scale_stays_in_the_gradients: (half_precision_differs, "zero3 on 2"),
    the_scale_is_not_lowered: (half_precision_differs, "zero1 on 2"),
    gradients_add_up_in_bfloat16: (bfloat16_differs, "zero1 on 2"),
}
"""Fault → the comparison that must find it, and the layout."""


def is_found(fault: str | None, check: str, layout: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            globals()[fault](patch)
        try:
            return bool(globals()[check](layout))
        except AssertionError:
            return True


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    check, layout = FAULTS[fault]
    assert any(workers.run(is_found, RANKS_OF_LAYOUT[layout], fault.__name__, check.__name__, layout))


def list_passing_checks(ranks: int) -> list[str]:
    used = {(check, layout) for check, layout in FAULTS.values() if RANKS_OF_LAYOUT[layout] == ranks}
    return [
        f"{check.__name__}, {layout}"
        for check, layout in sorted(used, key=lambda case: (case[0].__name__, case[1]))
        if check(layout)
    ]


def test_without_a_fault_nothing_is_found(workers: Workers) -> None:
    """In the same processes, so that no fault has stayed behind."""
    for ranks in (2, 4):
        assert set(map(tuple, workers.run(list_passing_checks, ranks, ranks))) == {()}
