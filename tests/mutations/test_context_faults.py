"""Faults that one could make where rows are cut over ranks: the comparison with one device must find each of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Window
from megatfm.layers.sequence_shard import SequenceShard
from megatfm.models import xlnet
from megatfm.ops.attention import block_sparse
from megatfm.parallel import (
    collectives,
    context_attention,
    context_global_attention,
    context_parallel,
    expert_parallel,
    parallelize,
    ring_attention,
)
from megatfm.parallel.mesh import SHARD, Mesh
from tests.support.context_parity import context_case, context_microbatches
from tests.support.faults import EVERYTHING, patch_backward
from tests.support.models import ADAMW, LENGTH
from tests.support.parity import build_engine, model_gradient_errors
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch

ENCODERS = "patterns of encoders, rows of 11 tokens"
BELOW_ATTENTION = {"*.embedding.tokens.weight", "*.layers.0.attn*", "*.layers.1.attn.w[kv]*"}
"""Some of the parameters that what becomes of keys and values reaches."""


def a_ring_step_is_skipped(patch: Patch) -> None:
    patch.setattr(ring_attention, "merge_partial", lambda out, lse, *_: (out, lse))


def gradients_of_keys_stay_with_the_last_rank(patch: Patch) -> None:
    real = ring_attention._shift

    @dataclass
    class Lost:
        flight: context_parallel.P2PExchange

        def wait(self) -> list[Tensor]:
            return [torch.zeros_like(came) for came in self.flight.wait()]

    def shift(x: Tensor, contexts: Any, hows: Any) -> Any:
        local = contexts.token_indices(LENGTH)[contexts.rank]
        is_home = bool(hows) and torch.equal(hows[0].k_positions, local)
        flight = real(x, contexts, hows)
        return Lost(flight) if is_home else flight

    patch.setattr(ring_attention, "_shift", shift)


def gradients_of_fetched_keys_stay(patch: Patch) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        laid = torch.empty_like(g)
        laid[:, :, ctx.plan.permutation] = g
        return laid[:, :, : g.shape[2] - sum(map(len, ctx.plan.recv_indices))].clone(), None

    patch_backward(patch, context_parallel._Fetch, backward)


def a_halo_is_one_short(patch: Patch) -> None:
    real = Window.key_ranges
    patch.setattr(Window, "key_ranges", lambda self, first, last, n: real(self, first + 1, last, n))


def a_random_block_of_the_wrong_head(patch: Patch) -> None:
    """The next one's, where keys came from other ranks."""
    real = BigBird.mask_mod_for_lengths

    def sees_of(self: BigBird, q: Tensor, k: Tensor, heads: Tensor, lengths: Tensor) -> Tensor:
        return real(self, q, k, (heads + 1) % self.n_heads, lengths)

    patch.setattr(BigBird, "mask_mod_for_lengths", sees_of)


def a_wide_query_is_answered_by_one_rank_alone(patch: Patch) -> None:
    patch.setattr(context_global_attention, "merge_partial", lambda out, lse, *_: (out, lse))


def gradients_of_wide_queries_stay(patch: Patch) -> None:
    patch.setattr(context_global_attention, "all_reduce_no_grad", lambda g, group: g)


def a_stretch_is_not_summed(patch: Patch) -> None:
    patch.setattr(parallelize, "_all_reduce_both_passes", lambda x, group: x)


def a_document_s_boundary_is_lost_at_a_cut(patch: Patch) -> None:
    real = SequenceShard.document_ids

    def numbers(self: SequenceShard, **options: Any) -> Any:
        is_cut = self.key_token_indices is not None and not torch.equal(self.key_token_indices, self.token_indices)
        return None if is_cut else real(self, **options)

    patch.setattr(SequenceShard, "document_ids", numbers)


def gradients_are_not_summed_over_contexts(patch: Patch) -> None:
    patch.setattr(Mesh, "flat_group", lambda self, axes: self.group(SHARD))


def dropout_counts_tokens_from_the_cut(patch: Patch) -> None:
    patch.setattr(SequenceShard, "indices", property(lambda self: torch.arange(len(self.token_indices))))


def a_bias_counts_from_the_cut(patch: Patch) -> None:
    real = block_sparse.compute_block_indices
    patch.setattr(block_sparse, "compute_block_indices", lambda *where: real(*where[:-2], None, where[-1]))


def gradients_of_a_bias_are_of_the_last_step_alone(patch: Patch) -> None:
    real = ring_attention.partial_attention_backward

    def backward(*inputs: Any) -> Any:
        *remaining, of_bias = inputs
        return real(*remaining, of_bias.zero_())

    patch.setattr(ring_attention, "partial_attention_backward", backward)


def a_token_beside_a_span_is_lost_at_a_cut(patch: Patch) -> None:
    real = context_parallel.fetch

    def fetch(x: Tensor, expected: Any) -> Tensor:
        is_local = torch.isin(expected.indices, expected.cp.token_indices(LENGTH)[expected.cp.rank])
        return real(x, expected) * is_local[:, None]

    patch.setattr(context_parallel, "fetch", fetch)


def keys_of_a_row_are_one_further(patch: Patch) -> None:
    real = context_attention.fetch
    patch.setattr(context_attention, "fetch", lambda x, expected: real(x, expected).roll(1, 2))


def queries_of_a_stream_count_from_the_cut(patch: Patch) -> None:
    real = xlnet.make_two_streams

    def streams(*args: Any) -> Any:
        return tuple(replace(item, indices_BQ=item.indices_BQ - item.indices_BQ.min()) for item in real(*args))

    patch.setattr(xlnet, "make_two_streams", streams)


def parts_of_a_row_count_alike_in_its_slots(patch: Patch) -> None:
    real = expert_parallel.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return real(x if dim else torch.zeros_like(x), dim, group)

    patch.setattr(expert_parallel, "all_gather", gather)


def gradients_of_slots_are_of_one_rank_s_tokens(patch: Patch) -> None:
    real = expert_parallel.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return collectives.all_gather_replicated(x, dim, group) if dim else real(x, dim, group)

    patch.setattr(expert_parallel, "all_gather", gather)


def gradients_of_the_sums_of_slots_stay(patch: Patch) -> None:
    real = expert_parallel.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return real(x, dim, group) if dim else collectives.all_gather_replicated(x, dim, group)

    patch.setattr(expert_parallel, "all_gather", gather)


FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    a_ring_step_is_skipped: ("llama", EVERYTHING),
    gradients_of_keys_stay_with_the_last_rank: ("llama", BELOW_ATTENTION),
    gradients_of_fetched_keys_stay: ("window", BELOW_ATTENTION),
    a_halo_is_one_short: ("window", EVERYTHING),
    a_document_s_boundary_is_lost_at_a_cut: ("llama", EVERYTHING),
    gradients_are_not_summed_over_contexts: ("llama", EVERYTHING),
    dropout_counts_tokens_from_the_cut: ("llama", EVERYTHING),
    a_random_block_of_the_wrong_head: (ENCODERS, {"encoder.layers.1.attn.w*.weight"}),
    a_wide_query_is_answered_by_one_rank_alone: (ENCODERS, {"encoder.layers.[0-3].attn.w[qkv].weight"}),
    gradients_of_wide_queries_stay: (ENCODERS, {"encoder.layers.[123].attn.w[kv].weight"}),
    a_stretch_is_not_summed: ("compressed", EVERYTHING),
    a_bias_counts_from_the_cut: ("t5 positions, patterns", EVERYTHING),
    gradients_of_a_bias_are_of_the_last_step_alone: ("t5 positions, patterns", {"decoder.position.weight"}),
    a_token_beside_a_span_is_lost_at_a_cut: ("bert", {"boundary.dense1.weight", "encoder.layers.*.weight"}),
    keys_of_a_row_are_one_further: ("deberta", {"encoder.layers.*.attn.w*.weight"}),
    queries_of_a_stream_count_from_the_cut: ("xlnet", {"encoder.layers.*.attn.wk_position.weight"}),
    parts_of_a_row_count_alike_in_its_slots: ("soft experts", {"encoder.layers.1.ffn.*"}),
    gradients_of_slots_are_of_one_rank_s_tokens: ("soft experts", {"encoder.layers.1.ffn.experts.*"}),
    gradients_of_the_sums_of_slots_stay: ("soft experts", {"encoder.layers.1.ffn.weight"}),
}
"""Fault → the model that shows it, and parameters whose gradients must be found wrong."""


MODELS = sorted({name for name, _ in FAULTS.values()})


def wrong_gradients(names: list[str]) -> dict[str, list[set[str]]]:
    """Model → the parameters that are wrong under each of the faults, and under none."""
    actual = {}
    for name in names:
        config, batch, model, objective, _ = context_case(name)
        parameters = {name for name, _ in model.named_parameters()}
        actual[name] = [parameters]
        for fault in (None, *(fault for fault, (shows, _) in FAULTS.items() if shows == name)):
            with pytest.MonkeyPatch.context() as patch:
                if fault:
                    fault(patch)
                engine = build_engine(config, ParallelConfig(cp=2), ADAMW)
                engine.forward_backward(context_microbatches(engine, batch), objective)
                actual[name].append(set(model_gradient_errors(engine, model)))
    return actual


def test_each_fault_is_found(workers: Workers) -> None:
    by_rank = workers.run(wrong_gradients, 2, MODELS, timeout=180.0)
    for name in MODELS:
        (parameters, *_), *_ = (rank[name] for rank in by_rank)
        _, none, *wrong = (set().union(*item) for item in zip(*(rank[name] for rank in by_rank), strict=True))
        assert none == set()
        faults = [(fault, patterns) for fault, (shows, patterns) in FAULTS.items() if shows == name]
        for (fault, patterns), actual in zip(faults, wrong, strict=True):
            expected = {p for p in parameters if any(fnmatchcase(p, pattern) for pattern in patterns)}
            assert expected, patterns
            assert expected <= actual, f"{fault.__name__}: {sorted(expected - actual)}"
