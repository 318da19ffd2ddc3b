"""Faults that send too much and compute the right numbers: what is expected must not move along with them.

Each is planted in the ranks and in what computes the expectation alike, as a mistake in the repository would be.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import Config, ModelConfig, ParallelConfig, load_config
from megatfm.config.objective import CausalObjective, MaskedObjective, SpanBoundaryObjective
from megatfm.layers.attention.patterns.local import Window
from megatfm.parallel import context_parallel, cp_plans, mesh, pipeline_stages, styles
from megatfm.parallel.collectives import TensorParallelGroup
from megatfm.parallel.styles import STYLES
from megatfm.verify.expected import compute_expected_traffic
from megatfm.verify.rank_processes import _step
from megatfm.verify.shrink import draw_batch, shrink
from megatfm.verify.verify import find_traffic_mismatches
from tests.support.layouts import traffic_config
from tests.support.models import FAMILY_MODELS
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def a_window_reaches_eight_times_as_far(patch: Patch) -> None:
    def reach(self: Window, first: int, last: int, length: int) -> Any:
        return ((first - 8 * self.left, last + 8 * self.right),)

    patch.setattr(Window, "key_ranges", reach)


def a_style_sums_twice_and_says_so(patch: Patch) -> None:
    def install(module: nn.Module, ranks: TensorParallelGroup, layouts: styles.Layouts) -> None:
        assert styles.ROWWISE.apply
        styles.ROWWISE.apply(module, ranks, layouts)

        def twice(_: nn.Module, __: Any, output: Tensor) -> None:
            full = output.new_zeros(2 * output.numel())
            dist.all_reduce(full, group=ranks.group)

        module.register_forward_hook(twice)

    row = styles.ParallelStyle(
        "rowwise", 1, "partial_with_sp", apply=install, communication=("output summed", "loss summed")
    )
    patch.setattr(STYLES, "_parts", {**STYLES._parts, "rowwise": row})


def rewrite(patch: Patch, function: Any, other: Callable[..., Any]) -> None:
    """Give a function another body, also for those who imported it by name. other: without closure."""
    patch.setattr(function, "__code__", other.__code__)


def experts_get_slots_that_no_row_has(patch: Patch) -> None:
    rewrite(patch, cp_plans.count_slots_per_rank, lambda slots, ranks: -(-slots // ranks) + 2)


def stages_are_divided_unequally(patch: Patch) -> None:
    rewrite(patch, pipeline_stages._balance_cuts, lambda starts, costs, stages: list(starts[1:stages]))


def a_rank_is_dealt_more_of_a_row_than_others(patch: Patch) -> None:
    def uneven(length: int, ranks: int, folded: bool, unit: int = 1) -> list[Tensor]:
        return list(torch.arange(length).tensor_split([length // ranks + 3 + i for i in range(ranks - 1)]))

    rewrite(patch, context_parallel.compute_token_indices.__wrapped__, uneven)


def more_tokens_around_spans_are_fetched(patch: Patch) -> None:
    def around_spans(left_BS: Tensor, right_BS: Tensor, local: Tensor) -> Tensor:
        rows, columns = (left_BS[:, local] > 0).nonzero(as_tuple=True)
        at = local[columns]
        actual = torch.cat([at - left_BS[rows, at], at + right_BS[rows, at]])
        return torch.cat([actual, (actual + 1).clamp(max=left_BS.shape[1] - 1)]).unique()

    rewrite(patch, cp_plans.find_span_boundary_indices, around_spans)


def ranks_that_share_rows_hold_copies_of_shards(patch: Patch) -> None:
    """ZeRO shards over `dp_shard` alone, and gradients are summed over `cp` afterwards."""
    patch.setitem(vars(mesh.DENSE_DATA_AXES), "shard", (mesh.SHARD,))
    replicas = property(lambda _: (mesh.REPLICATE, mesh.CONTEXT))
    patch.setattr(mesh.DataAxes, "replicate_axes", replicas)


MISTRAL = shrink(load_config("mistral-7b-v0.1", ["parallel.cp=2"]))[0].model.with_changes(
    {"attention.pattern.width": 2}
)
SOFT = FAMILY_MODELS["albert"].with_changes({"ffn": {"name": "soft_moe", "d_ff": 16, "n_experts": 3, "dropout": 0.0}})
CP2 = ParallelConfig(cp=2, dp_shard=1)
FAULTS: dict[Callable[[Patch], None], tuple[ModelConfig, ParallelConfig, Any, str]] = {
    a_window_reaches_eight_times_as_far: (MISTRAL, CP2, CausalObjective(), "send over cp"),
    a_style_sums_twice_and_says_so: (FAMILY_MODELS["llama"], ParallelConfig(tp=2, dp_shard=1), CausalObjective(),
                                     "all_reduce over tp"),
    experts_get_slots_that_no_row_has: (SOFT, CP2, MaskedObjective(), "all_gather over cp"),
    stages_are_divided_unequally: (FAMILY_MODELS["gpt"], ParallelConfig(pp=2, dp_shard=2, zero=1), CausalObjective(),
                                   "reduce_scatter over dp_shard"),
    a_rank_is_dealt_more_of_a_row_than_others: (FAMILY_MODELS["llama"], CP2, CausalObjective(), "over cp"),
    more_tokens_around_spans_are_fetched: (FAMILY_MODELS["bert"].with_changes({"extra_heads": {"boundary": {}}}), CP2,
                                           SpanBoundaryObjective(), "send over cp"),
    ranks_that_share_rows_hold_copies_of_shards: (FAMILY_MODELS["llama"], ParallelConfig(dp_shard=2, cp=2, zero=1),
                                                  CausalObjective(), "reduce_scatter over dp_shard × cp"),
}  # fmt: skip
"""Fault → the model, layout and objective that show it, and the collective that must be found to differ."""


def misses(fault: str | None, config: Config) -> list[str]:
    """Lines of the flows that differ, with a fault on all ranks and in what computes the expectation."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            globals()[fault](patch)
        context_parallel.compute_token_indices.cache_clear()
        batch = draw_batch(config)
        answer = _step(config, batch, dist.get_world_size())
        expected = compute_expected_traffic(config, batch)[dist.get_rank()]
        return find_traffic_mismatches([answer], [expected])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_needless_traffic_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    model, parallel, objective, flow = FAULTS[fault]
    config = traffic_config(model, objective, parallel)
    ranks = parallel.pp * parallel.dp_shard * parallel.cp * parallel.tp
    assert any(flow in line for lines in workers.run(misses, ranks, fault.__name__, config) for line in lines)
    assert not any(workers.run(misses, ranks, None, config))
