"""Faults that one could make where rows are cut over ranks: the comparison with one device must find each of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Window
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models import xlnet
from megatfm.ops.attention import block_sparse
from megatfm.parallel import (
    collectives,
    context_attention,
    context_global_attention,
    context_parallel,
    cp_plans,
    ring_attention,
)
from megatfm.parallel.mesh import SHARD, DataAxes, Mesh, Position
from tests.support.context_parity import context_case, context_microbatches
from tests.support.models import ADAMW, LENGTH
from tests.support.parity import EVERYTHING, build_engine, list_expected_errors, model_gradient_errors
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch

ENCODERS = "patterns of encoders, rows of 11 tokens"
BELOW_ATTENTION = {"*", "-*.layers.1.attn.w[oq].*", "-*.layers.1.ffn*", "-decoder.norm.*"}
"""Parameters whose gradients come by way of keys and values."""
BIASES_OF_WIDE_KEYS = ("*.layers.[123].attn.wk.bias", "*.layers.4.attn.wk_global.bias")
"""Biases of the keys that tokens which see a whole row read, in the encoders."""


def a_ring_step_is_skipped(patch: Patch) -> None:
    patch.setattr(ring_attention, "merge_partial", lambda out, lse, *_: (out, lse))


def gradients_of_keys_stay_with_the_last_rank(patch: Patch) -> None:
    real = ring_attention._start_shift

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

    patch.setattr(ring_attention, "_start_shift", shift)


def gradients_of_fetched_keys_stay(patch: Patch) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        laid = torch.empty_like(g)
        laid[:, :, ctx.plan.permutation] = g
        return laid[:, :, : g.shape[2] - sum(map(len, ctx.plan.recv_indices))].clone(), None

    patch.setattr(context_parallel._Fetch, "backward", staticmethod(backward))


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
    patch.setattr(cp_plans, "_all_reduce_both_passes", lambda x, group: x)


def a_document_s_boundary_is_lost_at_a_cut(patch: Patch) -> None:
    real = SequenceShard.document_ids

    def numbers(self: SequenceShard, **options: Any) -> Any:
        is_cut = self.key_token_indices is not None and not torch.equal(self.key_token_indices, self.token_indices)
        return None if is_cut else real(self, **options)

    patch.setattr(SequenceShard, "document_ids", numbers)


def gradients_are_not_summed_over_contexts(patch: Patch) -> None:
    patch.setattr(Mesh, "flat_group", lambda self, axes: self.group(SHARD))


def shards_are_numbered_backwards_over_contexts(patch: Patch) -> None:
    real = Mesh.get_shard_index

    def get(self: Mesh, data: DataAxes, position: Position | None = None) -> int:
        return self.count_shards(data) - 1 - real(self, data, position)

    patch.setattr(Mesh, "get_shard_index", get)


def dropout_counts_tokens_from_the_cut(patch: Patch) -> None:
    patch.setattr(SequenceShard, "indices", property(lambda self: torch.arange(len(self.token_indices))))


def a_bias_counts_from_the_cut(patch: Patch) -> None:
    real = block_sparse.compute_block_indices
    patch.setattr(block_sparse, "compute_block_indices", lambda *where: real(*where[:-2], None, where[-1]))


def gradients_of_a_bias_are_of_the_last_step_alone(patch: Patch) -> None:
    real = ring_attention.compute_partial_attention_backward

    def backward(*inputs: Any) -> Any:
        *remaining, of_bias = inputs
        return real(*remaining, of_bias.zero_())

    patch.setattr(ring_attention, "compute_partial_attention_backward", backward)


def a_token_beside_a_span_is_lost_at_a_cut(patch: Patch) -> None:
    real = context_parallel.fetch

    def fetch(x: Tensor, expected: Any) -> Tensor:
        is_local = torch.isin(expected.indices, expected.cp.token_indices(LENGTH)[expected.cp.rank])
        return real(x, expected) * is_local[:, None]

    patch.setattr(cp_plans, "fetch", fetch)


def keys_of_a_row_are_one_further(patch: Patch) -> None:
    real = context_attention.fetch
    patch.setattr(context_attention, "fetch", lambda x, expected: real(x, expected).roll(1, 2))


def queries_of_a_stream_count_from_the_cut(patch: Patch) -> None:
    real = xlnet.make_two_streams

    def streams(*args: Any) -> Any:
        return tuple(replace(item, indices_BQ=item.indices_BQ - item.indices_BQ.min()) for item in real(*args))

    patch.setattr(xlnet, "make_two_streams", streams)


def parts_of_a_row_count_alike_in_its_slots(patch: Patch) -> None:
    real = cp_plans.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return real(x if dim else torch.zeros_like(x), dim, group)

    patch.setattr(cp_plans, "all_gather", gather)


def gradients_of_slots_are_of_one_rank_s_tokens(patch: Patch) -> None:
    real = cp_plans.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return collectives.all_gather_replicated(x, dim, group) if dim else real(x, dim, group)

    patch.setattr(cp_plans, "all_gather", gather)


def gradients_of_the_sums_of_slots_stay(patch: Patch) -> None:
    real = cp_plans.all_gather

    def gather(x: Tensor, dim: int, group: Any) -> Tensor:
        return real(x, dim, group) if dim else collectives.all_gather_replicated(x, dim, group)

    patch.setattr(cp_plans, "all_gather", gather)


FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    a_ring_step_is_skipped: ("llama", EVERYTHING),
    gradients_of_keys_stay_with_the_last_rank: ("llama", BELOW_ATTENTION),
    gradients_of_fetched_keys_stay: ("window", BELOW_ATTENTION),
    a_halo_is_one_short: ("window", EVERYTHING),
    a_document_s_boundary_is_lost_at_a_cut: ("llama", EVERYTHING),
    gradients_are_not_summed_over_contexts: ("llama", EVERYTHING),
    shards_are_numbered_backwards_over_contexts: ("llama", EVERYTHING),
    dropout_counts_tokens_from_the_cut: ("llama", EVERYTHING),
    a_random_block_of_the_wrong_head: (ENCODERS, EVERYTHING),
    a_wide_query_is_answered_by_one_rank_alone: (ENCODERS, {"*", *BIASES_OF_WIDE_KEYS}),
    gradients_of_wide_queries_stay: (
        ENCODERS,
        {"*.embedding.*", "*.layers.[0-3].*", "*.layers.4.attn.w?_global.*", *BIASES_OF_WIDE_KEYS},
    ),
    a_stretch_is_not_summed: ("compressed", EVERYTHING),
    a_bias_counts_from_the_cut: ("t5 positions, patterns", EVERYTHING),
    gradients_of_a_bias_are_of_the_last_step_alone: ("t5 positions, patterns", {"decoder.position.weight"}),
    a_token_beside_a_span_is_lost_at_a_cut: ("bert", {"boundary.*", "encoder.*"}),
    keys_of_a_row_are_one_further: ("deberta", EVERYTHING),
    queries_of_a_stream_count_from_the_cut: ("xlnet", EVERYTHING),
    parts_of_a_row_count_alike_in_its_slots: ("soft experts", EVERYTHING),
    gradients_of_slots_are_of_one_rank_s_tokens: ("soft experts", {"encoder.*", "-*.layers.1.ffn_residual.*"}),
    gradients_of_the_sums_of_slots_stay: (
        "soft experts",
        {"encoder.*", "-*.layers.1.ffn_residual.*", "-*.ffn.experts.*"},
    ),
}
"""Fault → the model that shows it, and parameters whose gradients must be found wrong, and no others."""


LAYOUT = ParallelConfig(cp=2, zero=0)
"""Weights are whole: FSDP2 sums gradients, and numbers shards, itself."""
LAYOUTS: dict[Callable[[Patch], None], ParallelConfig] = {
    shards_are_numbered_backwards_over_contexts: ParallelConfig(cp=2, zero=1)
}


MODELS = sorted({name for name, _ in FAULTS.values()})


def list_faults(name: str) -> list[Callable[[Patch], None]]:
    """Faults that a model shows."""
    return [fault for fault, (model, _) in FAULTS.items() if model == name]


def wrong_gradients(names: list[str]) -> dict[str, list[tuple[set[str], set[str]]]]:
    """Model → parameters that must be wrong and those that are, without a fault and under each that it shows."""
    compared: dict[str, list[tuple[set[str], set[str]]]] = {}
    for name in names:
        config, batch, model, objective, _ = context_case(name)
        compared[name] = []
        for fault in (None, *list_faults(name)):
            with pytest.MonkeyPatch.context() as patch:
                if fault:
                    fault(patch)
                engine = build_engine(config, LAYOUTS.get(fault, LAYOUT) if fault else LAYOUT, ADAMW)
                engine.forward_backward(context_microbatches(engine, batch), objective)
                expected = list_expected_errors(model, FAULTS[fault][1]) if fault else set()
                compared[name].append((expected, set(model_gradient_errors(engine, model))))
    return compared


def test_each_fault_is_found(workers: Workers) -> None:
    by_rank = workers.run(wrong_gradients, 2, MODELS, timeout=180.0)
    for name in MODELS:
        for fault, *pairs in zip((None, *list_faults(name)), *(rank[name] for rank in by_rank), strict=True):
            assert set().union(*(wrong for _, wrong in pairs)) == pairs[0][0], fault
