"""Traffic that one step of a layout should cause, by rank: the one way into the `expected_*` files, one for each axis.

Inputs are the config, the global batch and the shapes that modules of the plain model see. Nothing is imported from
`megatfm.parallel` or `megatfm.layers`, which are what is checked: how rows, stages, experts and weights are divided,
and which keys a query sees, is worked out once more, by closed forms and by looking at every case.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.train.build import build_model
from megatfm.verify.axes import CONTEXT, TENSOR, MeshPosition, sizes
from megatfm.verify.expected_activations import add_activations, add_experts, groups_of_the_same_ranks
from megatfm.verify.expected_comparison import add_comparison, forward_alone
from megatfm.verify.expected_context import ContextShards
from megatfm.verify.expected_keys import pattern_of, sees_runs_alone
from megatfm.verify.expected_pipeline import Stages, add_pipeline, divide
from megatfm.verify.expected_weights import RankParameters, weights_and_gradients
from megatfm.verify.module_calls import Call, record_module_calls
from megatfm.verify.module_cuts import ModuleCut, is_a, module_cuts, silent
from megatfm.verify.reference import initialise_perturbed
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic, TrafficTable


def unpredicted(config: Config) -> dict[str, str]:
    """Axis → why there is no closed form for what it sends."""
    parallel, engine = config.parallel, config.parallel.engine
    if engine != "native":
        reason = f"the engine {engine!r} is not ours, and only its authors know what it sends"
        return {axis: reason for axis, size in sizes(parallel).items() if size > 1}
    with torch.device("meta"):
        model = build_model(config)
    reasons = {}
    if parallel.tp > 1 and config.train.recompute.endswith("B"):
        reasons[TENSOR] = (
            f"train.recompute = {config.train.recompute!r}: what blocks keep is measured while they run, so how many "
            "of them repeat their gathers is not known beforehand"
        )
    elif parallel.tp > 1 and (style := silent(model)):
        reasons[TENSOR] = f"the style {style!r} doesn't say what it sends (`communication`)"
    if parallel.cp > 1 and (pattern := _unknown_pattern(config, model)):
        reasons[CONTEXT] = (
            f"the pattern {pattern!r} is a plugin's, and only its author knows which keys it needs"
        )
    return reasons


def _unknown_pattern(config: Config, model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        if hasattr(module, "pattern"):
            section = pattern_of(config, path)
            if sees_runs_alone(section, 1, causal=False) is None:
                return str(getattr(section, "name", section))
    return None


def expected_flows(config: Config, batch: Arrays) -> list[TrafficTable]:
    """Expected traffic of one step, by rank; not reliable for axes that `unpredicted` names."""
    with torch.random.fork_rng():
        model = build_model(config).double().train()
    initialise_perturbed(model, config.train.seed)
    step = _Step(config, model, batch)
    parallel = config.parallel
    world_size = parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp
    return [step.flows(MeshPosition.of(rank, parallel)) for rank in range(world_size)]


class _Step:
    """A step of the plain model, of which each rank of the layout takes its part."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self.config, self.model = config, model
        self.stages: Stages | None = divide(config, model) if parallel.pp > 1 else None
        self.cuts: dict[str, ModuleCut] = module_cuts(model, parallel)
        self.rows_cut = ContextShards(config, model, batch) if parallel.cp > 1 else None
        self.batches = self.rows_cut.batches if self.rows_cut else [batch]
        self.calls_of = [record_module_calls(config, model, part, self.stages) for part in self.batches]
        # A token's experts depend on all that it attends to, also on what other ranks hold: whole rows are routed.
        self.routed = self.calls_of[0]
        if parallel.ep > 1 and self.rows_cut:
            self.routed = record_module_calls(config, model, batch, self.stages)
        self.microbatches = len(self.calls_of[0]) // (parallel.dp_replicate * parallel.dp_shard)

    def flows(self, place: MeshPosition) -> TrafficTable:
        """Traffic that the rank at a mesh position sends."""
        config, parallel = self.config, self.config.parallel
        first = place.data_rank * self.microbatches
        my_microbatches = range(first, first + self.microbatches)
        stages = {stage.index for stage in self.stages.of_rank(place.pp)} if self.stages else {0}
        calls = [
            [call for call in self.calls_of[place.cp][i] if call.stage in stages] for i in my_microbatches
        ]
        ledger = ExpectedTraffic(sizes(parallel), groups_of_the_same_ranks(config))
        first_passes = forward_alone(config, calls)
        for microbatch_calls in (*first_passes, *calls) if parallel.tp > 1 else ():
            add_activations(ledger, config, self.model, self.cuts, microbatch_calls)
        for i in range(self.microbatches) if parallel.ep > 1 else ():
            add_experts(ledger, config, place, self._among(place, i, stages), self.rows_cut)
        if self.rows_cut:
            for i, microbatch_calls in zip(my_microbatches, calls, strict=True):
                self.rows_cut.add_context_traffic(ledger, i, place.cp, microbatch_calls)
                self._add_pair_sums(ledger, microbatch_calls)
        if self.stages:
            add_pipeline(ledger, config, self.stages, place.pp, self.batches[place.cp], my_microbatches)
        rank_params = RankParameters(self.model, self.cuts, self.stages, place, parallel)
        weights_and_gradients(ledger, config, rank_params, calls, first_passes)
        add_comparison(ledger, config, self.batches[place.cp], place.data_rank)
        return ledger.flows()

    def _add_pair_sums(self, ledger: ExpectedTraffic, calls: Sequence[Call]) -> None:
        """Add the sums of preferences, one for each pair that a whole row has room for, in float32 or better."""
        size = max(PRECISIONS[self.config.train.precision].compute_dtype.itemsize, 4)
        slots = self.config.data.sequence_length // 2 + 1
        for call in calls:
            if is_a(self.model.get_submodule(call.path), "PairSums"):
                ledger.all_reduce(CONTEXT, call.rows * slots * size)

    def _among(self, place: MeshPosition, microbatch: int, stages: set[int]) -> Sequence[Sequence[Call]]:
        """Calls of experts on each rank that divides experts with this one."""
        numbers = [peer.data_rank * self.microbatches + microbatch for peer in place.peers]
        return [[call for call in self.routed[i] if call.stage in stages and call.n_experts] for i in numbers]
