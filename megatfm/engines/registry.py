"""Engines by name (`parallel.engine`), and the features that each supports."""

from collections.abc import Callable, Collection, Iterator
from typing import Literal, NamedTuple, get_args

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS, Engine, EngineSetup
from megatfm.errors import UsageError
from megatfm.registry import Registry

Feature = Literal[
    "pp",
    "cp",
    "ep",
    "fp16",
    "fp8",
    "recompute",
    "compile",
    "cuda_graphs",
    "async_tp",
    "loss_by_source",
    "samples",
    "compares_samples",
]
EngineFactory = Callable[[EngineSetup], Engine]


class EngineRegistry(Registry[EngineFactory]):
    """Engines by name, with the features that each declares. A config that needs another feature is refused.

    Data, tensor and sequence parallelism are no features: they are applied before an engine is built. ZeRO stages and
    other settings are refused by the engine itself.
    """

    def __init__(self) -> None:
        super().__init__("engine")
        self._features: dict[str, frozenset[Feature]] = {}

    def register(self, name: str, *, features: Collection[Feature] = ()) -> Callable[[EngineFactory], EngineFactory]:
        """Return a decorator that registers an engine. features: those of `Feature` that it supports.

        Raises UsageError for an unknown feature, and if another engine has the name.
        """
        if unknown := sorted(set(features) - set(get_args(Feature))):
            raise UsageError(
                f"engine {name!r} is registered with features = {sorted(features)}: there is no {unknown[0]!r}; there "
                f"are: {', '.join(get_args(Feature))}"
            )
        register_name = super().register(name)

        def register_engine(engine: EngineFactory) -> EngineFactory:
            register_name(engine)
            self._features[name] = frozenset(features)
            return engine

        return register_engine

    def has(self, name: str, feature: Feature) -> bool:
        """Return whether an engine declares a feature."""
        self.get(name)
        return feature in self._features[name]

    def build(self, name: str, setup: EngineSetup) -> Engine:
        """Build an engine. Raises UsageError for members of the interface that it lacks, before one is needed."""
        engine = self.get(name)(setup)
        members = [member for member in vars(Engine) if not member.startswith("_")]
        if missing := [member for member in members if not hasattr(engine, member)]:
            raise UsageError(
                f"parallel.engine = {name!r}: {type(engine).__name__} lacks {', '.join(missing)} of "
                "megatfm.engines.interface.Engine"
            )
        return engine

    def check(self, config: Config, precision: str) -> None:
        """Raise UsageError for a feature that the config asks for and its engine does not declare."""
        name = config.parallel.engine
        self.get(name)
        for feature, setting, alternative in _iter_requested_features(config, precision):
            if feature not in self._features[name]:
                supporting = [engine for engine in self.names() if feature in self._features[engine]]
                raise UsageError(
                    f"{setting}: parallel.engine = {name!r} does not declare {feature!r} among its features: set "
                    f"{alternative}, or parallel.engine = {' or '.join(map(repr, supporting))}"
                )


class _RequestedFeature(NamedTuple):
    """A feature that a config needs, the setting that needs it, and a setting that does without."""

    feature: Feature
    setting: str
    alternative: str


def _iter_requested_features(config: Config, precision: str) -> Iterator[_RequestedFeature]:
    parallel, train = config.parallel, config.train
    axes: tuple[tuple[Feature, int], ...] = (("pp", parallel.pp), ("cp", parallel.cp), ("ep", parallel.ep))
    for axis, size in axes:
        if size > 1:
            yield _RequestedFeature(axis, f"parallel.{axis} = {size}", f"parallel.{axis} = 1")
    if precision == "fp16":
        yield _RequestedFeature("fp16", f"train.precision = {precision!r}", "train.precision = 'bf16'")
    if PRECISIONS[precision].fp8:
        yield _RequestedFeature("fp8", f"train.precision = {precision!r}", "train.precision = 'bf16'")
    if train.recompute != "none":
        yield _RequestedFeature("recompute", f"train.recompute = {train.recompute!r}", "train.recompute = 'none'")
    if train.compile not in (False, "auto"):
        yield _RequestedFeature("compile", f"train.compile = {train.compile!r}", "train.compile = false")
    if train.cuda_graphs:
        yield _RequestedFeature("cuda_graphs", "train.cuda_graphs = true", "train.cuda_graphs = false")
    if config.evaluate.sample_prompts:
        yield _RequestedFeature("samples", "evaluate.sample_prompts", "no prompts")
    if config.objective.name == "contrastive":
        yield _RequestedFeature("compares_samples", "objective.name = 'contrastive'", "another objective")
    if parallel.async_tp:
        yield _RequestedFeature("async_tp", "parallel.async_tp = true", "parallel.async_tp = false")


ENGINES = EngineRegistry()


@ENGINES.register("native", features=get_args(Feature))
def build_native(setup: EngineSetup) -> Engine:
    """Build the native engine: FSDP2 or replicated weights over the data axes, and our own pipeline passes."""
    from megatfm.engines.native.compile import enable_symmetric_memory
    from megatfm.engines.native.engine import NativeEngine, NativeOptions

    if setup.config.parallel.async_tp:
        enable_symmetric_memory(setup.mesh, setup.device)
    return NativeEngine(
        setup,
        setup.optimizers,
        precision=setup.precision,
        seed=setup.config.train.seed,
        options=NativeOptions.from_config(setup.config, setup.device),
    )


@ENGINES.register("deepspeed", features=("pp", "cp", "ep", "fp16", "recompute", "loss_by_source"))
def build_deepspeed(setup: EngineSetup) -> Engine:
    """Build the engine of DeepSpeed's ZeRO. Raises UsageError if DeepSpeed is not installed."""
    from megatfm.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(setup)
