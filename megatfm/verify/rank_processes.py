"""Rank processes on this machine: each builds the engine as training does, takes one step and returns its result.

A failure ends all of them, and the error names the rank that caused it.
"""

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import debug
from torch.utils import deterministic

from megatfm.checkpoint import ShardedTensor
from megatfm.config import Config
from megatfm.engines.interface import Engine
from megatfm.errors import MegatfmError, UsageError
from megatfm.ops.attention import block_sparse
from megatfm.parallel.layout import Region
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_plugins
from megatfm.train.build import build_engine
from megatfm.verify.forkserver import get_context
from megatfm.verify.layouts import count_ranks
from megatfm.verify.reference import draw_perturbation
from megatfm.verify.shrink import Arrays, objective_for
from megatfm.verify.traffic import CollectiveTraffic, TrafficCounter

Blocks = Mapping[str, list[tuple[Region, NDArray[np.floating[Any]]]]]
"""Parameter name → its blocks on a rank, with their offsets and sizes in the full tensor."""


@dataclass(frozen=True)
class RankAddress:
    """Rank and rendezvous of a process. store: path of the file store; timeout: of a collective, in seconds."""

    rank: int
    world_size: int
    store: str
    timeout: float


@dataclass(frozen=True)
class RankStep:
    """Request for one step. batch: the global batch."""

    address: RankAddress
    config: Config
    batch: Arrays


@dataclass(frozen=True)
class RankResult:
    """Result of a step on one rank. gradients: zeros without one. weights: after the step."""

    loss: float
    grad_norm: float
    gradients: Blocks
    traffic: list[CollectiveTraffic]
    weights: Blocks = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Error on a rank: its message and traceback. is_usage: the layout is impossible."""

    text: str
    traceback: str = ""
    is_usage: bool = False


READY = "ready"

BUCKET_NUMEL = 2**20
"""Gradients that DeepSpeed reduces at once, at most."""
BLOCK_SIZE = 8
"""Tokens of an attention kernel's block: rows are short, and a rank's shard must have several blocks."""


def run_rank(connection: Connection) -> None:
    """Run the main loop of a rank process: sends READY, then a RankResult or Failure for each RankStep, until None.

    Waits for a message after each result before it leaves the process group: leaving earlier would close sockets that
    other ranks still read.
    """
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's host name need not resolve
    torch.set_num_threads(1)
    # Unwritten memory is NaN, so that a kernel which reads it is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    block_sparse.SIZE = BLOCK_SIZE
    gc.freeze()  # imported modules need not be traversed after each step
    gc.disable()  # `_leave_group` searches for garbage, once a step
    try:
        connection.send(READY)
        while (request := connection.recv()) is not None:
            connection.send(_handle_request(request))
            connection.recv()
            _leave_group()
    except EOFError:  # the parent process is gone
        return


def _handle_request(request: RankStep) -> RankResult | Failure:
    address = request.address
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(address.store, address.world_size),
            rank=address.rank,
            world_size=address.world_size,
            timeout=timedelta(seconds=address.timeout),
        )
        import_plugins(request.config.plugins)
        return _step(request.config, request.batch, address.world_size)
    except UsageError as error:
        return Failure(str(error), traceback.format_exc(), is_usage=True)
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        return Failure(f"{type(error).__name__}: {line}", traceback.format_exc())


def _leave_group() -> None:
    """Destroy the process group, and free its threads and sockets: engines are in cycles, DTensor caches meshes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    gc.collect()


def _step(config: Config, batch: Arrays, world_size: int) -> RankResult:
    mesh = build_mesh(config.parallel, world_size, "cpu")
    engine = build_engine(config, mesh, torch.device("cpu"), config.train.precision)
    weights = _get_weights(engine)
    for name, sharded in weights.items():
        for block in sharded.blocks:
            region = sharded.global_shape, block.offsets, tuple(block.tensor.shape)
            block.tensor.add_(draw_perturbation(config.train.seed, name, *region))
    engine.sync_weights()
    with TrafficCounter(engine.process_groups()) as traffic:
        totals = engine.forward_backward(_make_microbatches(config, engine, batch), objective_for(config))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        grad_norm = engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
    updated = {name: sharded.tensor.detach().clone() for name, sharded in _get_weights(engine).items()}
    return RankResult(
        totals.loss, grad_norm, _make_blocks(weights, gradients), traffic.list_traffic(), _make_blocks(weights, updated)
    )


def _get_weights(engine: Engine) -> dict[str, ShardedTensor]:
    """Return the sharded parameters, without buffers."""
    return {name: sharded for name, sharded in engine.weights().items() if name in engine.layout}


def _make_blocks(weights: Mapping[str, ShardedTensor], values: Mapping[str, torch.Tensor]) -> Blocks:
    """Return values with the layout of the weights; zeros for missing ones."""
    return {
        name: [
            ((block.offsets, tuple(block.tensor.shape)), block.tensor.numpy())
            for block in sharded.with_tensor(values.get(name, torch.zeros_like(sharded.tensor))).blocks
        ]
        for name, sharded in weights.items()
    }


def _make_microbatches(config: Config, engine: Engine, batch: Arrays) -> list[dict[str, torch.Tensor]]:
    """Split this data rank's rows, a contiguous share of the global batch, into micro-batches."""
    share = config.train.global_batch // engine.mesh.data_ranks
    first, rows = engine.mesh.data_rank * share, config.train.micro_batch
    return [
        {field: torch.from_numpy(values[start : start + rows]) for field, values in batch.items()}
        for start in range(first, first + share, rows)
    ]


START_SECONDS = 300.0  # to import torch, while all ranks do
COLLECTIVE_SECONDS = 20.0  # timeout of a collective; a step takes a fraction of a second
STEP_SECONDS = 120.0
GRACE_SECONDS = 1.0  # how long other ranks may still report errors after the first failure
EXIT_SECONDS = 10.0
SECONDARY_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out")
"""Messages of a rank that failed only because another rank was gone or late."""


@dataclass(frozen=True)
class RankProcess:
    """Rank process and the connection to it."""

    process: ForkServerProcess
    connection: Connection


class RankPool:
    """Pool of rank processes, reused from one layout to the next. A failure ends them all; the next step starts new
    ones."""

    def __init__(self) -> None:
        self._members: list[RankProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of running processes by rank."""
        return [member.process.pid or 0 for member in self._members]

    def step(self, config: Config, batch: Arrays) -> list[RankResult]:
        """Take one step of `config` under its layout, one process per rank; returns results by rank.

        Raises MegatfmError that names the rank which failed, died or hangs, and UsageError for an impossible layout;
        all processes have ended by then.
        """
        world_size = count_ranks(config.parallel)
        try:
            with tempfile.TemporaryDirectory(prefix="megatfm-verify-") as folder:
                n_running = len(self._members)
                for _ in range(n_running, world_size):
                    self._members.append(_start_rank())
                _collect(self._members[n_running:], START_SECONDS)
                processes, store = self._members[:world_size], str(Path(folder) / "store")
                config = limit_buckets(config, Path(folder))
                # All processes are ready: from here on, a silent rank hangs.
                for rank, member in enumerate(processes):
                    address = RankAddress(rank, world_size, store, COLLECTIVE_SECONDS)
                    member.connection.send(RankStep(address, config, batch))
                results: list[RankResult] = _collect(processes, STEP_SECONDS)
                for member in processes:
                    member.connection.send("leave")
                return results
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End all processes."""
        for member in self._members:
            with suppress(OSError):
                member.connection.send(None)
        for member in self._members:
            member.process.join(EXIT_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
            member.process.join()
            member.connection.close()
        self._members = []


def limit_buckets(config: Config, folder: Path) -> Config:
    """Return a config whose DeepSpeed JSON, written to a folder, has buckets of `BUCKET_NUMEL` gradients at most.

    DeepSpeed's default takes 2 GB a pass, all of which is filled with NaN. Which gradients share a bucket changes no
    result.
    """
    if config.parallel.engine != "deepspeed":
        return config
    options: Any = {}
    try:
        if config.deepspeed.json_file is not None:
            options = json.loads(Path(config.deepspeed.json_file).read_text(encoding="utf-8-sig"))
        zero = dict(options.get("zero_optimization", {}))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):  # the engine refuses it by name
        return config
    size = zero.get("reduce_bucket_size")
    if not isinstance(size, int) or size > BUCKET_NUMEL:
        zero["reduce_bucket_size"] = BUCKET_NUMEL
    path = folder / "deepspeed.json"
    path.write_text(json.dumps({**options, "zero_optimization": zero}), encoding="utf-8")
    return config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update={"json_file": str(path)})})


def _start_rank() -> RankProcess:
    connection, child_pipe = get_context().Pipe()
    process = get_context().Process(target=run_rank, args=(child_pipe,), daemon=True)
    process.start()
    child_pipe.close()  # so that the end of the process closes the connection
    return RankProcess(process, connection)


def _collect(processes: Sequence[RankProcess], seconds: float) -> list[Any]:
    """Receive one message from each rank within `seconds`."""
    pending = {member.connection: rank for rank, member in enumerate(processes)}
    messages: list[Any] = [None] * len(processes)
    failures: dict[int, Failure] = {}
    deadline = time.monotonic() + seconds
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                message = Failure(_describe_exit(processes[rank].process))
            if isinstance(message, Failure):
                failures[rank] = message
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            messages[rank] = message
    if failures or pending:
        raise _make_error(failures, sorted(pending.values()), seconds)
    return messages


def _make_error(failures: Mapping[int, Failure], silent: Sequence[int], seconds: float) -> MegatfmError:
    """Build the error of the rank that caused the failure, rather than of those that noticed it."""
    causes = [rank for rank, failure in failures.items() if not any(sign in failure.text for sign in SECONDARY_ERRORS)]
    if not causes and silent:
        seconds_to_wait = COLLECTIVE_SECONDS if failures else seconds
        names = ", ".join(map(str, silent))
        return MegatfmError(
            f"rank {names} hangs: no answer within {seconds_to_wait:g} s; look for a collective that "
            "not all ranks reach"
        )
    rank = causes[0] if causes else next(iter(failures))
    failure = failures[rank]
    if failure.is_usage:
        return UsageError(failure.text)
    error = MegatfmError(f"rank {rank} failed: {failure.text}; run with --debug to see where")
    error.add_note(failure.traceback)
    return error


def _describe_exit(process: ForkServerProcess) -> str:
    process.join(EXIT_SECONDS)
    code = process.exitcode
    return f"the process was killed by signal {-code}" if code and code < 0 else f"the process exited with {code}"
