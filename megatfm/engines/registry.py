"""Engines by name, as `parallel.engine` chooses one, and the features of each."""

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
    """Engines by name, with the features that each declares: a config that asks for another is refused.

    Parallelism that is no feature (data, tensor and sequence parallelism) is laid before an engine is built; ZeRO
    stages and other settings an engine refuses itself.
    """

    def __init__(self) -> None:
        super().__init__("engine")
        self._features: dict[str, frozenset[Feature]] = {}

    def register(
        self, name: str, *, features: Collection[Feature] = ()
    ) -> Callable[[EngineFactory], EngineFactory]:
        """Decorator that enters an engine. features: of `Feature`, those that it carries out.

        Raises UsageError for a feature that there is not, and when the name is taken by another engine.
        """
        if unknown := sorted(set(features) - set(get_args(Feature))):
            raise UsageError(
                f"engine {name!r} is registered with features = {sorted(features)}: there is no {unknown[0]!r}; there "
                f"are: {', '.join(get_args(Feature))}"
            )
        enter = super().register(name)

        def enter_with_features(engine: EngineFactory) -> EngineFactory:
            enter(engine)
            self._features[name] = frozenset(features)
            return engine

        return enter_with_features

    def has(self, name: str, feature: Feature) -> bool:
        """Return whether an engine declares a feature."""
        self.get(name)
        return feature in self._features[name]

    def check(self, config: Config, precision: str) -> None:
        """Raise UsageError for a feature that the config asks for and its engine does not declare."""
        name = config.parallel.engine
        self.get(name)
        for feature, setting, instead in _asked_features(config, precision):
            if feature not in self._features[name]:
                supporting = [engine for engine in self.names() if feature in self._features[engine]]
                raise UsageError(
                    f"{setting}: parallel.engine = {name!r} does not declare {feature!r} among its features: set "
                    f"{instead}, or parallel.engine = {' or '.join(map(repr, supporting))}"
                )


class _Asked(NamedTuple):
    """A feature that a config asks for, by which setting, and a setting that does without."""

    feature: Feature
    setting: str
    instead: str


def _asked_features(config: Config, precision: str) -> Iterator[_Asked]:
    parallel, train = config.parallel, config.train
    axes: tuple[tuple[Feature, int], ...] = (("pp", parallel.pp), ("cp", parallel.cp), ("ep", parallel.ep))
    for axis, size in axes:
        if size > 1:
            yield _Asked(axis, f"parallel.{axis} = {size}", f"parallel.{axis} = 1")
    if precision == "fp16":
        yield _Asked("fp16", f"train.precision = {precision!r}", "train.precision = 'bf16'")
    if PRECISIONS[precision].fp8:
        yield _Asked("fp8", f"train.precision = {precision!r}", "train.precision = 'bf16'")
    if train.recompute != "none":
        yield _Asked("recompute", f"train.recompute = {train.recompute!r}", "train.recompute = 'none'")
    if train.compile not in (False, "auto"):
        yield _Asked("compile", f"train.compile = {train.compile!r}", "train.compile = false")
    if train.cuda_graphs:
        yield _Asked("cuda_graphs", "train.cuda_graphs = true", "train.cuda_graphs = false")
    if config.evaluate.sample_prompts:
        yield _Asked("samples", "evaluate.sample_prompts", "no prompts")
    if config.objective.name == "contrastive":
        instead = "another objective"
        yield _Asked("compares_samples", "objective.name = 'contrastive'", instead)
    if parallel.async_tp:
        yield _Asked("async_tp", "parallel.async_tp = true", "parallel.async_tp = false")


ENGINES = EngineRegistry()


@ENGINES.register("native", features=get_args(Feature))
def native(setup: EngineSetup) -> Engine:
    """FSDP2 or whole copies over the data axes, and our own pipeline runner."""
    from megatfm.engines.native.compile import (
        enable_symmetric_memory,
        keeps_attention_eager,
        should_compile,
    )
    from megatfm.engines.native.cuda_graphs import make_graph_capture
    from megatfm.engines.native.engine import NativeEngine
    from megatfm.engines.native.zero import ZeroOptions

    parallel, train = setup.config.parallel, setup.config.train
    if parallel.async_tp:
        enable_symmetric_memory(setup.mesh, setup.device)
    return NativeEngine(
        setup.model,
        setup.layout,
        setup.mesh,
        device=setup.device,
        precision=setup.precision,
        seed=train.seed,
        optimizers=setup.optimizers,
        sharing=ZeroOptions.of(parallel),
        pipeline=setup.pipeline,
        recomputed=train.recompute,
        compile_blocks=should_compile(setup.config, setup.device),
        autotune=train.compile == "autotune",
        eager_attention=keeps_attention_eager(setup.config, setup.device),
        async_tp=parallel.async_tp,
        graphs=make_graph_capture(setup.config, setup.device),
    )


@ENGINES.register("deepspeed", features=("pp", "cp", "ep", "fp16", "recompute", "loss_by_source"))
def deepspeed(setup: EngineSetup) -> Engine:
    """DeepSpeed's ZeRO, where it is installed."""
    from megatfm.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(setup)
