"""A recommended layout for each preset, at the scale at which it is trained, and how a rank's step is traced."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatfm.config import Config, load_config
from megatfm.config.sources import list_model_presets
from megatfm.errors import UsageError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import Estimate, open_estimator
from megatfm.estimate.profile import LocalModel
from megatfm.estimate.traced import Traced, compare_with_trace, count_traced_microbatches, run_trace

SMALL = (8, ("parallel.zero=1",))
"""Up to two billion parameters: one node, the optimizer alone is divided (docs/guide/choosing-a-layout.md)."""


@dataclass(frozen=True)
class Recommended:
    """GPUs of a run and overrides that set its layout."""

    preset: str
    gpus: int
    overrides: Sequence[str]


def sharded(gpus: int, *overrides: str) -> tuple[int, tuple[str, ...]]:
    return gpus, ("parallel.zero=3", *overrides)


LARGE: Mapping[str, tuple[int, Sequence[str]]] = {
    "gemma2-2b": sharded(32),
    "gemma2-9b": sharded(64, "train.recompute=selective", "parallel.grad_accumulation=sharded"),
    "gemma3-4b": sharded(32),
    "gpt3-2.7b": sharded(32),
    "gpt3-6.7b": sharded(64),
    "gpt3-13b": (128, ("parallel.zero=2", "parallel.grad_accumulation=sharded", "parallel.tp=2")),
    "gpt3-175b": (1024, ("parallel.tp=8", "parallel.pp=8", "parallel.zero=1")),
    "llama3-8b": (64, ("parallel.zero=2", "parallel.grad_accumulation=sharded")),
    "llama3-70b": (
        256,
        ("parallel.zero=3", "parallel.tp=4", "parallel.dp_replicate=4", "parallel.grad_accumulation=sharded"),
    ),
    "llama3-405b": (1024, ("parallel.tp=8", "parallel.pp=16", "parallel.zero=1", "train.recompute=full")),
    "mistral-7b": sharded(64, "parallel.grad_accumulation=sharded"),
    "mistral-7b-v0.1": sharded(64, "parallel.grad_accumulation=sharded"),
    "mixtral-8x7b": (128, ("parallel.ep=8", "parallel.pp=4", "parallel.zero=1")),
    "mixtral-8x22b": (256, ("parallel.ep=8", "parallel.pp=8", "parallel.zero=1", "train.recompute=full")),
    "deepseek-v2-lite": (64, ("parallel.ep=8",)),
    "deepseek-v3": (1024, ("parallel.ep=64", "parallel.pp=16", "parallel.zero=1", "train.recompute=full")),
    "gpt-oss-20b": (64, ("parallel.ep=8",)),
    "qwen3-30b-a3b": (64, ("parallel.ep=8", "parallel.grad_accumulation=sharded")),
    "olmoe-1b-7b": (32, ("parallel.ep=8",)),
    "switch-base-128": (32, ("parallel.ep=8",)),
    "t5-3b": sharded(64),
    "t5-11b": sharded(128),
    "t5-v1.1-xl": sharded(64),
    "t5-v1.1-xxl": sharded(128),
}
LONG: Sequence[Recommended] = (
    Recommended("llama3-8b", 128, ("data.sequence_length=131072", "train.global_batch=64", "parallel.cp=8",
                                   "train.recompute=full")),
    Recommended("llama3-405b", 1024, ("data.sequence_length=131072", "train.global_batch=128", "parallel.tp=8",
                                      "parallel.cp=8", "parallel.pp=16", "parallel.zero=1", "train.recompute=full")),
    Recommended("modernbert-large", 16, ("data.sequence_length=8192", "train.micro_batch=1", "parallel.cp=2")),
)  # fmt: skip
"""The longest contexts, which ranks divide."""


def recommended() -> list[Recommended]:
    """A layout for every preset that trains a model, and for the longest rows."""
    names = [name for name in list_model_presets() if not name.startswith("quickstart")]
    cases = [Recommended(name, *LARGE.get(name, SMALL)) for name in names]
    return [*cases, *LONG]


@dataclass(frozen=True)
class TracedLayout:
    """A recommended layout: its estimate, and that of a model of few layers beside the trace of the same. Models that
    can't be estimated are traced alone, in full."""

    full: Estimate | None
    few_layers: Estimate | None
    traced: Traced

    @property
    def n_expert_passes(self) -> int:
        """Passes through a block and a micro-batch, where experts are on several ranks."""
        if self.few_layers is None or self.few_layers.config.parallel.ep == 1:
            return 0
        return self.few_layers.config.model.n_layers * self.few_layers.microbatches

    @property
    def differences(self) -> list[tuple[str, int, int]]:
        """(name, modelled, traced) bytes of memory and traffic."""
        return compare_with_trace(self.few_layers, self.traced) if self.few_layers else []

    @property
    def waits(self) -> dict[str, int]:
        """File → times that the host waits for the device in a step."""
        by_file: Counter[str] = Counter()
        for place, times in self.traced.facts["waits"].items():
            by_file[place.rpartition(" at ")[2].partition(":")[0]] += times
        return dict(by_file)


def traced_layout(case: Recommended) -> TracedLayout:
    """Estimate a layout at its real size, then trace and estimate it with few layers, all of their real widths."""
    overrides = [*case.overrides, "train.precision=bf16"]
    config = load_config(case.preset, overrides)
    cluster = load_cluster("h100", case.gpus)
    try:
        LocalModel.check(config)
    except UsageError:
        rows = 2 * config.train.micro_batch * case.gpus
        few = [f"train.global_batch={rows}", "train.compile=false", *few_layers(config)]
        return TracedLayout(None, None, run_trace(case.preset, [*overrides, *few], case.gpus, 1))
    with open_estimator(config, cluster) as opened:
        full = opened.estimate(opened.base)
        few = [*few_layers(config), "train.compile=false", f"parallel.dp_shard={full.config.parallel.dp_shard}"]
        rows = count_traced_microbatches(full) * config.train.micro_batch
        few.append(f"train.global_batch={rows * full.config.parallel.dp_shard * config.parallel.dp_replicate}")
        traced_config = load_config(case.preset, [*overrides, *few])
        is_full = traced_config.model == config.model  # a hierarchical model with few layers is profiled once
        estimate = opened.estimate(traced_config) if is_full else None
    if estimate is None:
        with open_estimator(traced_config, cluster) as opened:
            estimate = opened.estimate(opened.base)
    # The estimate is of the largest shares, which are the first rank's.
    rank = estimate.worst.pipeline_rank * (case.gpus // config.parallel.pp)
    return TracedLayout(full, estimate, run_trace(case.preset, [*overrides, *few], case.gpus, rank))


def few_layers(config: Config) -> list[str]:
    """Overrides that leave a block of each kind, and two for each pipeline stage.

    A hierarchical model keeps up to six blocks a stage: beside fewer, the merging of patches weighs too much.
    """
    model, parallel = config.model, config.parallel
    if model.stages is not None:
        by_stage = [min(layers, 6) for layers in model.stages.n_layers]
        return [f"model.n_layers={sum(by_stage)}", f"model.stages.n_layers={by_stage}"]
    if model.text_tower is not None:
        return [f"model.{tower}n_layers=2" for tower in ("", "text_tower.")]
    kinds = [model.layer_types.index(kind) + 1 for kind in set(model.layer_types)]
    n_stages = parallel.pp * parallel.stages_per_rank if parallel.pp > 1 else 1
    layers = min(model.n_layers, max(2 * n_stages, *kinds, 2, 1 + (model.distinct_layers or 0)))
    words = [f"model.n_layers={layers}"]
    if model.n_encoder_layers:
        words.append(f"model.n_encoder_layers={min(model.n_encoder_layers, layers)}")
    return words
