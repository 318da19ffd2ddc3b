"""Engines by name, as `parallel.engine` chooses one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatfm.config import Config
from megatfm.engines.interface import Engine, EngineSetup
from megatfm.errors import UsageError
from megatfm.ops.attention import kernels
from megatfm.parallel.symmetric import enable_symmetric_memory
from megatfm.registry import Registry

if TYPE_CHECKING:
    from megatfm.engines.native.graphed import GraphCapture

ENGINES: Registry[Callable[[EngineSetup], Engine]] = Registry("engine")


@ENGINES.register("native")
def native(setup: EngineSetup) -> Engine:
    """FSDP2 or whole copies over the data axes, and our own pipeline runner."""
    from megatfm.engines.native.data_parallel import ZeroOptions
    from megatfm.engines.native.engine import NativeEngine

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
        eager_attention=leaves_attention(setup.config, setup.device),
        async_tp=parallel.async_tp,
        graphs=make_graph_capture(setup.config, setup.device),
    )


def make_graph_capture(config: Config, device: torch.device) -> "GraphCapture | None":
    """Who records passes, where it was asked for. Raises UsageError where they can't be."""
    if not config.train.cuda_graphs:
        return None
    from megatfm.engines.native.graphed import CudaGraphs

    processes = torch.distributed.get_world_size()
    if device.type != "cuda" or processes > 1:
        raise UsageError(
            f"train.cuda_graphs = true is for one process on a GPU, and this run has {processes} on {device.type}: "
            "set train.cuda_graphs = false"
        )
    return CudaGraphs()


def should_compile(config: Config, device: torch.device) -> bool:
    """Whether the native engine compiles blocks: where "auto" says nothing else, on GPUs if nothing is in the way. On a
    CPU it gains a few per cent at most, and takes seconds at the start."""
    if config.train.compile == "auto":
        return device.type == "cuda" and config.refuses_compile() is None and config.parallel.cp == 1
    return bool(config.train.compile)


def leaves_attention(config: Config, device: torch.device) -> bool:
    """Whether attention stays as it is in compiled blocks: on a CPU, where which blocks of keys long rows visit depends
    on the batch, and compiled attention would look at a mask of all pairs."""
    return device.type == "cpu" and config.data.sequence_length >= kernels.LONG


@ENGINES.register("deepspeed")
def deepspeed(setup: EngineSetup) -> Engine:
    """DeepSpeed's ZeRO, where it is installed."""
    from megatfm.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(setup)
