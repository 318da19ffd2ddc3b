"""Estimates a config on a cluster: memory of each rank, time of a step by cause, traffic by axis."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import cast

import torch

from megatfm.config import Config
from megatfm.config.world_size import check_global_batch, compute_axis_sizes
from megatfm.describe.description import Description, describe, resolve_vocabulary
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import UsageError
from megatfm.estimate.devices import Cluster, Device
from megatfm.estimate.memory import RankMemory, RankStages, StepMemory, estimate_rank_memory
from megatfm.estimate.part_profile import ModelProfile
from megatfm.estimate.profile import LocalModel
from megatfm.estimate.rank_flows import StageSplit, count_kept_feature_bytes
from megatfm.estimate.schedule import Timeline, list_running_passes
from megatfm.estimate.stalls import estimate_checkpoint_stall, estimate_data_stall
from megatfm.estimate.step_time import StepTime, estimate_step
from megatfm.estimate.traffic import Flows
from megatfm.estimate.weights import LocalWeight, count_expert_shards, list_local_weights
from megatfm.parallel.mesh import SHARD
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.registry import import_plugins
from megatfm.split_points import SplitPoint, Splittable
from megatfm.train.build import build_model, plan_pipeline_split


@dataclass(frozen=True)
class Estimate:
    """Memory, time and traffic of a run."""

    config: Config
    """The run's config, with `dp_shard` and precision resolved."""
    cluster: Cluster
    description: Description
    """Parameters and FLOPs."""
    memory: Sequence[RankMemory]
    """Memory of each pipeline rank."""
    time: StepTime
    """Time of the busiest pipeline rank."""
    flows_by_rank: Sequence[Flows]
    """Traffic of each pipeline rank."""
    busiest: int
    """Pipeline rank with the longest passes."""
    timeline: Timeline | None
    """Passes of all ranks; None without a pipeline."""
    microbatches: int
    """Micro-batches of a rank in a step."""
    compiled: bool
    """Whether blocks are compiled."""

    @property
    def worst(self) -> RankMemory:
        """The fullest rank."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def flows(self) -> Flows:
        """Traffic of the busiest pipeline rank."""
        return self.flows_by_rank[self.busiest]

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits the device."""
        return self.worst.total <= self.cluster.device.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.description.tokens_per_step / self.time.step

    @property
    def mfu(self) -> tuple[float, float]:
        """Model FLOPs utilization, with full attention and with its causal half."""
        peak = self.cluster.device.peak(self.config.train.precision) * self.cluster.gpus
        per_second = self.tokens_per_second / peak
        return self.description.flops_full * per_second, self.description.flops_causal * per_second

    @property
    def days(self) -> float:
        """Days of computing, without failures."""
        return self.time.step * self.config.train.steps / 86400

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the run."""
        return self.days * 24 * self.cluster.gpus


@dataclass
class Estimator:
    """Estimates layouts of one model on one cluster, and caches what layouts share. `open_estimator` makes one."""

    base: Config
    cluster: Cluster
    _models: dict[object, LocalModel] = field(default_factory=dict)
    _profiles: dict[object, ModelProfile] = field(default_factory=dict)
    _weights: dict[object, list[LocalWeight]] = field(default_factory=dict)
    _pipelines: dict[object, Pipeline | str] = field(default_factory=dict)

    @cached_property
    def description(self) -> Description:
        """Parameters and FLOPs, the same under every layout."""
        return describe(self.base, self._meta_model)

    @cached_property
    def _meta_model(self) -> torch.nn.Module:
        with torch.device("meta"):
            return build_model(self.base)

    def with_cluster(self, cluster: Cluster) -> "Estimator":
        """Return an estimator of the same model on another cluster, with the same caches."""
        return replace(self, cluster=cluster)

    def estimate(self, config: Config) -> Estimate:
        """Estimate a layout. Raises UsageError where it does not fit the model, the batch or the number of GPUs."""
        parallel = config.parallel
        sizes = compute_axis_sizes(parallel, self.cluster.gpus)
        parallel = parallel.model_copy(update={"dp_shard": sizes[SHARD]})
        config = config.model_copy(update={"parallel": parallel})
        microbatches = count_microbatches(config)
        compiled = compiles(config, self.cluster.device)
        profile = self.profile(config)
        weights = self.list_local_weights(config)
        stages = self._split_stages(config, profile)
        step = estimate_step(config, self.cluster, profile, weights, stages, microbatches, compiled=compiled)
        reserved = int(self.cluster.device.reserved_gib * 2**30)
        sent_bytes = {
            stage: profile.parts[stages.parts[stage][-1]].output_bytes for stage in stages.list_sending_stages()
        }
        kept_bytes = count_kept_feature_bytes(config, profile.samples, microbatches)
        kept_bytes += microbatches * profile.batch_bytes
        memory_step = StepMemory(config, microbatches, weights, profile.parts, compiled, reserved, kept_bytes)
        schedule = parallel.pp_schedule, parallel.pp, parallel.stages_per_rank, microbatches
        if parallel.pp == 1:  # all passes between the first and the last are alike
            schedule = "1f1b", 1, 1, min(microbatches, 3)
        memory = [
            estimate_rank_memory(memory_step, RankStages(rank, stages.get_stages(rank), passes, sent_bytes))
            for rank, passes in enumerate(list_running_passes(*schedule))
        ]
        computed = step.time.step
        time = replace(
            step.time,
            data=estimate_data_stall(config, computed),
            checkpoint=estimate_checkpoint_stall(config, self.cluster, memory, computed),
        )
        return Estimate(
            config=config,
            cluster=self.cluster,
            description=self.description,
            memory=memory,
            time=time,
            flows_by_rank=step.flows,
            busiest=step.busiest,
            timeline=step.timeline,
            microbatches=microbatches,
            compiled=compiled,
        )

    def _get_model(self, config: Config) -> LocalModel:
        parallel = config.parallel
        key = (
            parallel.tp,
            parallel.sequence_parallel,
            parallel.expert_tp,
            parallel.ep > 1,
            config.train.precision,
            self.cluster.device.kind,
        )
        if key not in self._models:
            self._models[key] = LocalModel(config, self.cluster.device.kind)
        return self._models[key]

    def profile(self, config: Config) -> ModelProfile:
        """Return the profile of the parts; it depends on tp, cp and the micro-batch."""
        model = self._get_model(config)
        key = id(model), config.train.micro_batch, config.parallel.cp
        if key not in self._profiles:
            self._profiles[key] = model.profile(config.train.micro_batch, config.parallel.cp)
        return self._profiles[key]

    def list_local_weights(self, config: Config) -> list[LocalWeight]:
        """Return the parameters as a rank has them before ZeRO."""
        parallel, model = config.parallel, self._get_model(config)
        key = id(model), parallel.ep, parallel.expert_tp, count_expert_shards(parallel), parallel.zero >= 2
        if key not in self._weights:
            points = cast(Splittable, model.model).split_points
            self._weights[key] = list_local_weights(config, self._meta_model, model.layout, points, model.model)
        return self._weights[key]

    def _split_stages(self, config: Config, profile: ModelProfile) -> StageSplit:
        """Return the split points of each pipeline stage; without a pipeline there is one stage."""
        if config.parallel.pp == 1:
            return StageSplit([range(len(profile.parts))], [0])
        pipeline = self.plan_pipeline(config)
        ends = accumulate((len(stage.split_points) for stage in pipeline.stages), initial=0)
        return StageSplit([range(start, end) for start, end in pairwise(ends)], pipeline.stage_to_rank)

    def get_split_points(self, config: Config) -> Sequence[SplitPoint]:
        """Return the split points of the model."""
        return cast(Splittable, self._get_model(config).model).split_points

    def plan_pipeline(self, config: Config) -> Pipeline:
        """Return the model's pipeline stages. Raises UsageError if it has too few split points."""
        parallel = config.parallel
        is_v_shaped = parallel.pp_schedule in ("zbv", "dualpipev")
        key = parallel.pp, parallel.stages_per_rank, is_v_shaped, tuple(parallel.pp_split_points)
        if key not in self._pipelines:
            try:
                self._pipelines[key] = plan_pipeline_split(config, self._meta_model)
            except UsageError as error:
                self._pipelines[key] = str(error)
        planned = self._pipelines[key]
        if isinstance(planned, str):  # not the error itself, whose traceback would keep a config alive at each raise
            raise UsageError(planned)
        return planned


@contextmanager
def open_estimator(config: Config, cluster: Cluster, tp_sizes: Sequence[int] = ()) -> Iterator[Estimator]:
    """Open an estimator for layouts with the config's `tp` or one of `tp_sizes`.

    Raises UsageError for another engine than the native one.
    """
    import_plugins(config.plugins)
    if config.parallel.engine != "native":
        raise UsageError(
            f"parallel.engine = {config.parallel.engine!r}: estimates are of the native engine: set "
            "parallel.engine = 'native'"
        )
    resolved = resolve_precision(resolve_vocabulary(config), cluster.device)
    ranks = 1
    for size in {config.parallel.tp, *tp_sizes}:
        ranks = lcm(ranks, size)
    with fake_ranks(ranks):
        estimator = Estimator(resolved, cluster)
        _ = estimator.description  # a model that can't be built is refused here
        yield estimator


def resolve_precision(config: Config, device: Device) -> Config:
    """Return the config with the device's precision for "auto"."""
    if config.train.precision != "auto":
        return config
    precision = "bf16" if "bf16" in device.flops else next(iter(device.flops))
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def count_microbatches(config: Config) -> int:
    """Return the micro-batches of a rank in a step. Raises UsageError if data ranks do not divide the global batch."""
    train, parallel = config.train, config.parallel
    data_ranks = parallel.dp_shard * parallel.dp_replicate
    check_global_batch(train.global_batch, train.micro_batch, data_ranks)
    return train.global_batch // (train.micro_batch * data_ranks)


def compiles(config: Config, device: Device) -> bool:
    """Return whether blocks are compiled (see `engines.native.compile.should_compile`)."""
    if config.train.compile == "auto":
        return device.compiles and config.find_compile_conflict() is None
    return bool(config.train.compile)
