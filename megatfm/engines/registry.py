"""Engines by name, as `parallel.engine` chooses one."""

from collections.abc import Callable

from megatfm.engines.interface import Engine, EngineSetup
from megatfm.registry import Registry

ENGINES: Registry[Callable[[EngineSetup], Engine]] = Registry("engine")


@ENGINES.register("native")
def native(setup: EngineSetup) -> Engine:
    """FSDP2 or whole copies over the data axes, and our own pipeline runner."""
    from megatfm.engines.native.data_parallel import Sharing
    from megatfm.engines.native.engine import NativeEngine

    parallel, train = setup.config.parallel, setup.config.train
    return NativeEngine(
        setup.model,
        setup.layout,
        setup.mesh,
        device=setup.device,
        precision=setup.precision,
        seed=train.seed,
        optimizers=setup.optimizers,
        sharing=Sharing.of(parallel),
        pipeline=setup.pipeline,
        recomputed=train.recompute,
        compile_blocks=train.compile,
    )


@ENGINES.register("deepspeed")
def deepspeed(setup: EngineSetup) -> Engine:
    """DeepSpeed's ZeRO, where it is installed."""
    from megatfm.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(setup)
