"""Expected traffic of one step on each rank of a layout: the entry point of the `expected_*` files.

Follows from the config, the global batch and the shapes of the plain model's module calls. Imports nothing from
`megatfm.parallel` or `megatfm.layers`, which are under test: how they divide rows, stages, experts and weights, and
which keys a query sees, is computed a second time here, by closed forms and brute force.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.split_points import SplitPoint
from megatfm.train.build import build_model
from megatfm.verify.context_shards import ContextShards
from megatfm.verify.expected_activations import (
    add_activations,
    add_contrastive_loss,
    add_experts,
    list_first_pass_calls,
    name_equal_groups,
)
from megatfm.verify.expected_context import add_context
from megatfm.verify.expected_keys import get_pattern_config, sees_key_runs
from megatfm.verify.expected_pipeline import ExpectedPipeline, add_pipeline, divide_into_stages
from megatfm.verify.expected_weights import RankParameters, add_weights_and_gradients
from megatfm.verify.layouts import CONTEXT, SHARD, TENSOR, MeshPosition, count_ranks, list_group_sizes, name_group
from megatfm.verify.module_calls import Call, record_module_calls
from megatfm.verify.module_shardings import ModuleSharding, find_module_shardings, find_undeclared_style, is_a
from megatfm.verify.reference import initialise_perturbed
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic, TrafficTable


def explain_unpredicted_axes(config: Config) -> dict[str, str]:
    """Return axis → why its traffic has no closed form, for axes without one."""
    parallel, engine = config.parallel, config.parallel.engine
    if engine != "native":
        reason = f"the engine {engine!r} does not declare what it sends"
        return {axis: reason for axis, size in list_group_sizes(parallel).items() if size > 1}
    with torch.device("meta"):
        model = build_model(config)
    reasons = {}
    if parallel.tp > 1 and config.train.recompute.endswith("B"):
        reasons[TENSOR] = (
            f"train.recompute = {config.train.recompute!r}: blocks are chosen by memory measured at run time, so how "
            "many repeat their all-gathers is not known beforehand"
        )
    elif parallel.tp > 1 and (style := find_undeclared_style(model)):
        reasons[TENSOR] = f"the style {style!r} doesn't say what it sends (`communication`)"
    if parallel.pp > 1 and parallel.zero == 3 and _has_frozen_block_before_trained_part(config, model):
        reasons[name_group(list_group_sizes(parallel), SHARD, CONTEXT)] = (
            "a frozen block lies before a trained part of its pipeline stage: FSDP2 prefetches it unused, and whether "
            "a later pass finds it gathered depends on the schedule"
        )
    if parallel.cp > 1 and (pattern := _find_plugin_pattern(config, model)):
        reasons[CONTEXT] = f"the pattern {pattern!r} is a plugin's and does not declare which keys a query needs"
    return reasons


def _has_frozen_block_before_trained_part(config: Config, model: nn.Module) -> bool:
    """Return whether a pipeline stage has a frozen block, and later a trained embedding, connector or block."""

    def is_trained(point: SplitPoint) -> bool:
        modules = (model.get_submodule(path) for path in point.modules)
        return any(weight.requires_grad for module in modules for weight in module.parameters())

    for stage in divide_into_stages(config, model).stages:
        has_frozen_block = False
        for point in stage.split_points:
            is_block = ".layers." in point.name
            if has_frozen_block and point.writes and not point.name.endswith(".norm") and is_trained(point):
                return True
            has_frozen_block |= is_block and not is_trained(point)
    return False


def _find_plugin_pattern(config: Config, model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        if hasattr(module, "pattern"):
            section = get_pattern_config(config, path)
            if sees_key_runs(section, 1, causal=False) is None:
                return str(getattr(section, "name", section))
    return None


def compute_expected_traffic(config: Config, batch: Arrays) -> list[TrafficTable]:
    """Compute the expected traffic of one step by rank; unreliable for axes that `explain_unpredicted_axes` names."""
    with torch.random.fork_rng():
        model = build_model(config).double().train()
    initialise_perturbed(model, config.train.seed)
    step, parallel = _Step(config, model, batch), config.parallel
    return [step.compute_traffic(MeshPosition.from_rank(rank, parallel)) for rank in range(count_ranks(parallel))]


class _Step:
    """Module calls of one step of the plain model, from which each rank's traffic follows."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self.config, self.model = config, model
        self.pipeline: ExpectedPipeline | None = divide_into_stages(config, model) if parallel.pp > 1 else None
        self.shardings: dict[str, ModuleSharding] = find_module_shardings(model, parallel)
        self.parameters = RankParameters.from_model(config, model, self.shardings, self.pipeline)
        self.context_shards = ContextShards(config, model, batch) if parallel.cp > 1 else None
        self.batches = self.context_shards.batches if self.context_shards else [batch]
        self.calls_by_cp_rank = [record_module_calls(config, model, shard, self.pipeline) for shard in self.batches]
        # A token's experts depend on every token that it attends to, so routing needs full rows.
        self.full_row_calls = self.calls_by_cp_rank[0]
        if parallel.ep > 1 and self.context_shards:
            self.full_row_calls = record_module_calls(config, model, batch, self.pipeline)
        self.microbatches = len(self.calls_by_cp_rank[0]) // (parallel.dp_replicate * parallel.dp_shard)

    def compute_traffic(self, position: MeshPosition) -> TrafficTable:
        """Compute the traffic that the rank at a mesh position sends."""
        config, parallel = self.config, self.config.parallel
        first_microbatch = position.data_rank * self.microbatches
        microbatch_indices = range(first_microbatch, first_microbatch + self.microbatches)
        stages = {stage.index for stage in self.pipeline.list_stages(position.pp)} if self.pipeline else {0}
        calls = [
            [call for call in self.calls_by_cp_rank[position.cp][i] if call.stage in stages] for i in microbatch_indices
        ]
        traffic = ExpectedTraffic(list_group_sizes(parallel), name_equal_groups(config))
        first_passes = list_first_pass_calls(config, calls)
        for microbatch_calls in (*first_passes, *calls) if parallel.tp > 1 else ():
            add_activations(traffic, config, self.model, self.shardings, microbatch_calls)
        for i in range(self.microbatches) if parallel.ep > 1 else ():
            add_experts(traffic, config, position, self._list_peer_calls(position, i, stages), self.context_shards)
        if self.context_shards:
            for i, microbatch_calls in zip([*microbatch_indices] * 2, (*calls, *first_passes), strict=False):
                add_context(traffic, self.context_shards, i, position.cp, microbatch_calls)
                self._add_pair_sums(traffic, microbatch_calls)
        if self.pipeline:
            add_pipeline(traffic, config, self.pipeline, position.pp, self.batches[position.cp], microbatch_indices)
        add_weights_and_gradients(traffic, config, replace(self.parameters, position=position), calls, first_passes)
        if not self.pipeline or len(self.pipeline.stages) - 1 in stages:  # that has the features
            add_contrastive_loss(traffic, config, self.batches, position)
        return traffic.to_table()

    def _add_pair_sums(self, traffic: ExpectedTraffic, calls: Sequence[Call]) -> None:
        """Add the all-reduces of preference pairs, one slot for each pair that fits in a full row, in ≥ float32."""
        size = max(PRECISIONS[self.config.train.precision].compute_dtype.itemsize, 4)
        slots = self.config.data.sequence_length // 2 + 1
        for call in calls:
            if is_a(self.model.get_submodule(call.path), "PairSums"):
                traffic.all_reduce(CONTEXT, call.rows * slots * size)

    def _list_peer_calls(self, position: MeshPosition, microbatch: int, stages: set[int]) -> Sequence[Sequence[Call]]:
        """Return the expert calls of each rank that divides experts with this one."""
        indices = [peer.data_rank * self.microbatches + microbatch for peer in position.expert_peers]
        return [[call for call in self.full_row_calls[i] if call.stage in stages and call.n_experts] for i in indices]
