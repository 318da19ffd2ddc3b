"""A process of the layout: builds the engine as training does, takes one step, answers."""

import gc
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import debug
from torch.utils import deterministic

from megatfm.checkpoint import ShardedTensor
from megatfm.config import Config
from megatfm.engines.interface import Engine
from megatfm.errors import UsageError
from megatfm.ops.attention import blocks
from megatfm.parallel.layout import Chunk
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.train.build import build_engine
from megatfm.verify.batch import Arrays, objective_for
from megatfm.verify.reference import perturbation
from megatfm.verify.traffic import CollectiveTraffic, TrafficCounter

Blocks = Mapping[str, list[tuple[Chunk, NDArray[np.floating[Any]]]]]
"""Parameter name → its blocks on a rank, and where they are in the whole tensor."""


@dataclass(frozen=True)
class RankInit:
    """One rank among those of the layout; they meet in the file `store`."""

    rank: int
    world_size: int
    store: str
    timeout: float


@dataclass(frozen=True)
class Job:
    """A step that a rank process is asked to take."""

    place: RankInit
    config: Config
    batch: Arrays


@dataclass(frozen=True)
class RankResult:
    """One rank's share of the step: its blocks of every gradient (zeros where there is none), and of the weights after
    it."""

    loss: float
    grad_norm: float
    blocks: Blocks
    flows: list[CollectiveTraffic]
    weights: Blocks = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in a line and as a traceback. is_usage: it is the layout that can't be."""

    text: str
    traceback: str = ""
    is_usage: bool = False


READY = "ready"

BLOCK = 8
"""Tokens of an attention kernel's block: rows are short, and a rank's part must be several blocks."""


def run_rank(connection: Connection) -> None:
    """Main function of a rank process: sends READY, then for each Job an Answer or a Failure, until None comes.

    After an answer it waits for a word before it leaves the group: to leave earlier would close sockets that other
    ranks still read.
    """
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine calls itself need not resolve
    torch.set_num_threads(1)
    # Memory that nobody has written is NaN, so that a kernel which reads it is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    blocks.SIZE = BLOCK
    gc.freeze()  # the modules imported so far need not be searched after each step
    try:
        connection.send(READY)
        while (job := connection.recv()) is not None:
            connection.send(_answer(job))
            connection.recv()
            _leave_group()
    except EOFError:  # the process that asked is gone
        return


def _answer(job: Job) -> RankResult | Failure:
    place = job.place
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(place.store, place.world_size),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.timeout),
        )
        import_plugins(job.config.plugins)
        return _step(job.config, job.batch, place.world_size)
    except UsageError as error:
        return Failure(str(error), traceback.format_exc(), is_usage=True)
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        return Failure(f"{type(error).__name__}: {line}", traceback.format_exc())


def _leave_group() -> None:
    """Close the group, and what keeps its threads and sockets: an engine is in cycles, DTensor caches its meshes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    gc.collect()


def _step(config: Config, batch: Arrays, world_size: int) -> RankResult:
    mesh = build_mesh(config.parallel, world_size, "cpu")
    engine = build_engine(config, mesh, torch.device("cpu"), config.train.precision)
    weights = _weights(engine)
    for name, box in weights.items():
        for part in box.blocks:
            sizes = tuple(part.tensor.shape)
            part.tensor.add_(perturbation(config.train.seed, name, box.global_shape, part.offsets, sizes))
    engine.weights_changed()
    with TrafficCounter(engine.process_groups()) as traffic:
        stats = engine.forward_backward(_microbatches(config, engine, batch), objective_for(config))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        grad_norm = engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
    updated = {name: box.tensor.detach().clone() for name, box in _weights(engine).items()}
    return RankResult(
        stats.loss, grad_norm, _blocks(weights, gradients), traffic.flows(), _blocks(weights, updated)
    )


def _weights(engine: Engine) -> dict[str, ShardedTensor]:
    """Blocks of the parameters, without what modules keep beside them."""
    return {name: box for name, box in engine.weights().items() if name in engine.layout}


def _blocks(weights: Mapping[str, ShardedTensor], gradients: Mapping[str, torch.Tensor]) -> Blocks:
    return {
        name: [
            ((part.offsets, tuple(part.tensor.shape)), part.tensor.numpy())
            for part in box.with_tensor(gradients.get(name, torch.zeros_like(box.tensor))).blocks
        ]
        for name, box in weights.items()
    }


def _microbatches(config: Config, engine: Engine, batch: Arrays) -> list[dict[str, torch.Tensor]]:
    """This data rank's rows, a contiguous share of the global batch, in micro-batches."""
    share = config.train.global_batch // engine.mesh.data_ranks
    first, rows = engine.mesh.data_rank * share, config.train.micro_batch
    return [
        {field: torch.from_numpy(values[start : start + rows]) for field, values in batch.items()}
        for start in range(first, first + share, rows)
    ]
