"""The control plane at N ranks, by the real classes in one process: start, rank monitor, and a checkpoint's plan.

    python benchmarks/control_plane.py ranks --ranks 64 256 1024 --out benchmarks/results
    python benchmarks/control_plane.py checkpoint --ranks 64 256 1024 --out benchmarks/results

ranks: light clients of threads and sockets. The monitor: rank 0's thread with a connection for each rank, against one
for each node of 8 ranks, whose relay sends for them. The start: ranks that meet in a store, and ranks that wait for a
missing one. Seconds are CPU seconds of the server's thread or process, unless "wall" is in the name; clients run on
the same machine.

checkpoint: plan, metadata and load plan of Llama 3 70B with AdamW. Tensor parallelism over 8 ranks, ZeRO 3 over the
others, once with 8 replicas (HSDP). One process takes the part of each rank in turn: tensors have shapes and no
memory, files are not written. Seconds of CPU; bytes as they are sent.
"""

import argparse
import json
import os
import pickle
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import common
import torch
import torch.distributed as dist

from megatfm.checkpoint import writer
from megatfm.checkpoint.file_format import FileEntry
from megatfm.checkpoint.metadata import encode_metadata, encode_runs, parse_metadata
from megatfm.checkpoint.planner import WritePlan, group_shards, hash_group, merge_plans
from megatfm.checkpoint.reader import Reader
from megatfm.checkpoint.sharded_tensor import ShardedTensor
from megatfm.config import load_config
from megatfm.errors import MegatfmError
from megatfm.files import raise_descriptor_limit
from megatfm.parallel.process_environment import ProcessEnvironment
from megatfm.parallel.rendezvous import wait_for_all_ranks
from megatfm.parallel.tp_plans import match_styles
from megatfm.train.build import build_model
from megatfm.train.hang_detector import HangDetector, Heartbeat
from megatfm.train.json_connection import JsonConnection
from megatfm.train.rank_monitor_server import RankMonitorServer

# ---------------------------------------------------------------------------------------------------- ranks

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of each wait that a rank takes up again

PER_NODE = 8
ROUNDS = 5
HEARTBEAT = Heartbeat(1, "step", 1, 0.01, True, "megatfm/engines/native/engine.py:141, in forward_backward").__dict__


@common.argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
@common.argument("--out", type=common.make_output_folder)
def run_ranks(args: argparse.Namespace) -> None:
    raise_descriptor_limit(4 * max(args.ranks))
    threading.stack_size(256 * 1024)
    rows = []
    for ranks in args.ranks:
        tree = [rank if rank < PER_NODE else rank // PER_NODE * PER_NODE for rank in range(ranks)]
        row = {
            "ranks": ranks,
            "connection a rank": measure_monitor(range(ranks)),
            "connection a node": measure_monitor(tree),
            "diagnosis": measure_diagnosis(ranks),
            "start": measure_start(ranks),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {"system": common.describe_system(), "cpu": common.get_cpu_name(), "rows": rows}
    common.write_json(common.make_dated_path(args.out, "control-plane.json"), result)


def list_hosts(ranks: int) -> list[str]:
    return [f"n{rank // PER_NODE:05d}" for rank in range(ranks)]


class Clients:
    """Connections to a monitor. relays: for each rank, the rank whose connection carries its messages."""

    def __init__(self, listener: socket.socket, relays: Sequence[int]) -> None:
        self.members: dict[int, list[int]] = {}
        for rank, relay in enumerate(relays):
            self.members.setdefault(relay, []).append(rank)
        self.lines = {relay: connect(listener, relay) for relay in self.members}

    def send(self, message: dict[str, Any]) -> None:
        for relay, line in self.lines.items():
            ranks = self.members[relay]
            line.send({"relayed": [(rank, message) for rank in ranks]} if len(ranks) > 1 else message)


def measure_monitor(relays: Sequence[int]) -> dict[str, Any]:
    """Connect all, send heartbeats of all ranks round by round, and end."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = RankMonitorServer(list_hosts(len(relays)), 600.0, 60.0, "token", listener, relays)
    server.start()
    clock = time.pthread_getcpuclockid(server.ident or 0)
    start = time.perf_counter()
    clients = Clients(listener, relays)
    while server._n_identified < len(clients.lines):
        time.sleep(0.01)
    connect_wall = time.perf_counter() - start
    before = time.clock_gettime(clock)
    for number in range(ROUNDS):
        clients.send({"heartbeat": {**HEARTBEAT, "ticks": number + 1}})
        while any(rank.heartbeat.ticks <= number for rank in server._detector._ranks):
            time.sleep(0.01)
    round_cpu = (time.clock_gettime(clock) - before) / ROUNDS
    before, idle_start = time.clock_gettime(clock), time.perf_counter()
    time.sleep(2.0)
    idle = (time.clock_gettime(clock) - before) / (time.perf_counter() - idle_start)
    start = time.perf_counter()
    clients.send({"bye": True})
    wait_for_bye(list(clients.lines.values()))
    end_wall = time.perf_counter() - start
    for line in clients.lines.values():
        line.close()
    server.join(30)
    return {
        "connections": len(clients.lines),
        "connect_wall_s": round(connect_wall, 3),
        "round_cpu_ms": round(1e3 * round_cpu, 2),
        "idle_percent_of_core": round(100 * idle, 2),
        "goodbye_wall_s": round(end_wall, 3),
    }


def connect(listener: socket.socket, rank: int) -> JsonConnection:
    line = JsonConnection(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=60))
    line.send({"rank": rank, "token": "token"})
    return line


def wait_for_bye(lines: Sequence[JsonConnection]) -> None:
    selector = selectors.DefaultSelector()
    waiting = set(lines)
    for line in lines:
        selector.register(line, selectors.EVENT_READ)
    while waiting:
        for key, _ in selector.select(5.0):
            connection: Any = key.fileobj
            messages = connection.receive()
            if messages is None or any("bye" in message for message in messages):
                waiting.discard(connection)
                selector.unregister(connection)
    selector.close()


def measure_diagnosis(ranks: int) -> dict[str, Any]:
    """Measure a diagnosis of healthy ranks, and one where all but rank 0 are silent."""
    detector = HangDetector(list_hosts(ranks), 30.0, 3.0, 0.0)
    for rank in range(ranks):
        detector.record_heartbeat(rank, Heartbeat(1, "step", 1, 0.0, True), 0.0)
    start = time.process_time()
    for _ in range(20):
        detector.diagnose(1.0)
    look = (time.process_time() - start) / 20
    detector.record_heartbeat(0, Heartbeat(1, "step", 1, 40.0, True), 40.0)
    start = time.process_time()
    diagnosis = detector.diagnose(40.0)
    assert diagnosis is not None
    return {
        "look_ms": round(1e3 * look, 3),
        "all_silent_ms": round(1e3 * (time.process_time() - start), 2),
        "all_silent_bytes": len(json.dumps({"diagnosis": diagnosis.to_dict()})),
    }


def measure_start(ranks: int) -> dict[str, Any]:
    """Measure a start of all ranks, and one at which the last rank is missing."""
    meet_cpu, errors = time_meeting(ranks, range(ranks), 60.0)
    assert not errors, errors[:1]
    _, errors = time_meeting(ranks, range(ranks - 1), 5.0)
    return {"meet_cpu_s": round(meet_cpu, 3), "name_the_missing": sorted(set(errors)), "named_by": len(errors)}


def time_meeting(world_size: int, present: Sequence[int], seconds: float) -> tuple[float, list[str]]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    errors: list[str] = []

    def arrive(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60))
        try:
            place = ProcessEnvironment("srun", rank, world_size)
            wait_for_all_ranks(store, place, timedelta(seconds=seconds), time.monotonic())
        except (MegatfmError, dist.DistError) as error:
            errors.append(str(error))

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in present]
    cpu = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.process_time() - cpu, errors


# ----------------------------------------------------------------------------------------------- checkpoint

T = TypeVar("T")
Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""Name → global shape, and the dim that tensor parallelism shards."""
TP = 8


@common.argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
@common.argument("--replicas", type=int, nargs="*", default=[1, 8])
@common.argument("--layers", type=int, default=80)
@common.argument("--out", type=common.make_output_folder)
def run_checkpoint(args: argparse.Namespace) -> None:
    shapes, rows = load_shapes(args.layers), []
    for replicas in args.replicas:
        for ranks in args.ranks:
            rows.append(measure_plan(shapes, ranks, replicas))
            print(json.dumps(rows[-1]), flush=True)
    facts = {"system": common.describe_system(), "cpu": common.get_cpu_name(), "layers": args.layers}
    common.write_json(common.make_dated_path(args.out, "control-plane-checkpoint.json"), {**facts, "rows": rows})


def load_shapes(layers: int) -> Shapes:
    config = load_config("llama3-70b", [f"model.n_layers={layers}"])
    with torch.device("meta"):
        model = build_model(config)
    return {
        f"{path}.{key}": (tuple(tensor.shape), style.shard_dim(key, tensor.dim()))
        for path, style in match_styles(model).items()
        for key, tensor in model.get_submodule(path).named_parameters(recurse=False)
    }


def iter_shards(shapes: Shapes, rank: int, tp: int, shards: int) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield weights, moments and step counts of a rank; ranks `tp · shards` apart are replicas."""
    zero = torch.zeros(())
    part, shard = rank % tp, rank // tp % shards
    for name, (shape, dim) in shapes.items():
        offsets, sizes = [0] * len(shape), list(shape)
        if dim is not None:
            sizes[dim] //= tp
            offsets[dim] = part * sizes[dim]
        per_rank = -(-sizes[0] // shards)
        first = min(per_rank * shard, sizes[0])
        offsets[0] += first
        sizes[0] = min(per_rank, sizes[0] - first)
        block = ShardedTensor(zero.expand(sizes), shape, tuple(offsets))
        yield f"model.{name}", block
        yield f"optimizer.{name}.exp_avg", block
        yield f"optimizer.{name}.exp_avg_sq", block
        yield f"optimizer.{name}.step", ShardedTensor.from_tensor(zero)
    for kind, size in (("python", 627), ("numpy", 627), ("torch", 5056), ("cuda", 16)):
        yield f"rng.{rank}.{kind}", ShardedTensor.from_tensor(zero.expand(size))


def measure_plan(shapes: Shapes, ranks: int, replicas: int) -> dict[str, Any]:
    """Measure what each rank describes, how rank 0 merges it, and what metadata and a load plan of it cost."""
    shards = ranks // TP // replicas
    figures: dict[str, Any] = {"ranks": ranks, "replicas": replicas, "tensors": 4 * (len(shapes) + ranks)}

    def timed(name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        figures[name] = round(time.process_time() - start, 3)
        return result

    def kib(value: object, times: int = 1) -> float:
        return round(len(pickle.dumps(value)) * times / 2**10, 1)

    groups, cuts = timed("describe_s", lambda: group_shards(dict(iter_shards(shapes, 0, TP, shards))))
    hashes = [(hash_group(group), its_cuts) for group, its_cuts in zip(groups, cuts, strict=True)]
    by_digest: dict[bytes, Any] = {}
    described = []
    for rank in range(ranks):
        groups, cuts = group_shards(dict(iter_shards(shapes, rank, TP, shards)))
        shared = [by_digest.setdefault(hash_group(group), group) for group in groups]
        described.append(list(zip(shared, cuts, strict=True)))
    plan = timed("merge_s", lambda: merge_plans(described))
    message = pickle.dumps(plan)
    plan = timed("receive_s", lambda: pickle.loads(message))
    timed("items_s", lambda: WritePlan(plan, ranks - 1).items)
    results = [write_result(plan, rank) for rank in range(ranks)]
    loads = [sum(item.nbytes for item in WritePlan(plan, rank).items) for rank in range(0, ranks, 7)]
    content = timed("build_s", lambda: writer.build_metadata(1, {"step": 1}, plan, results))
    raw = timed("encode_s", lambda: encode_metadata(content))
    content = timed("parse_s", lambda: parse_metadata(Path("step-00000001"), raw))
    elsewhere = dict(iter_shards(shapes, ranks // 3, TP // 2, ranks // 4 // replicas))
    reader = timed("reader_s", lambda: Reader(Path("step-00000001"), content, elsewhere))
    return figures | {
        "groups": len(plan), "pieces": sum(len(group.pieces) * len(group.names) for group in plan),
        "gathered_kib": kib(hashes, ranks), "names_kib": kib(list(by_digest.values())), "plan_kib": kib(plan),
        "fullest_to_mean": round(max(loads) / (sum(loads) / len(loads)), 4),
        "reported_kib": kib((results[-1], None), ranks), "metadata_mib": round(len(raw) / 2**20, 2),
        "files_of_reader": len(reader.files),
    }  # fmt: skip


def write_result(plan: Any, rank: int) -> writer.WriteResult:
    """Return a rank's report of its files, which are not written."""
    files: dict[str, FileEntry] = {}
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, items in enumerate(writer._split_into_files(WritePlan(plan, rank).items)):
        files[f"rank-{rank:05d}-{number:03d}.safetensors"] = FileEntry(bytes=2**40, blake3="0" * 64)
        for item in items:
            numbers[item.group, item.piece].append(number)
    return writer.WriteResult(files, {piece: encode_runs(indices) for piece, indices in numbers.items()})


PARTS = {"ranks": run_ranks, "checkpoint": run_checkpoint}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
