"""Start and rank monitor at N ranks: the real classes, driven by light clients of threads and sockets in one process.

    python benchmarks/control_plane.py --ranks 64 256 1024 --out benchmarks/results

The monitor: rank 0's thread with a connection for each rank, and with one for each node of 8 ranks, whose relay sends
for them. The start: ranks that meet in a store, and ranks that wait for a missing one. Seconds are CPU seconds of the
server's thread or process, unless "wall" is in the name; clients run on the same machine.
"""

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import common

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of each wait that a rank takes up again

import torch.distributed as dist

from megatfm.errors import MegatfmError
from megatfm.files import raise_descriptor_limit
from megatfm.parallel.distributed import _wait_for_all_ranks
from megatfm.parallel.process_environment import ProcessEnvironment
from megatfm.train.hang_detector import HangDetector, Heartbeat
from megatfm.train.json_connection import JsonConnection
from megatfm.train.rank_monitor_server import RankMonitorServer

PER_NODE = 8
ROUNDS = 5
HEARTBEAT = Heartbeat(1, "step", 1, 0.01, True, "megatfm/engines/native/engine.py:141, in forward_backward").__dict__


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--out", type=common.make_output_folder)
    args = parser.parse_args()
    raise_descriptor_limit(4 * max(args.ranks))
    threading.stack_size(256 * 1024)
    rows = []
    for ranks in args.ranks:
        flat, tree = (
            list(range(ranks)),
            [r if r < PER_NODE else r // PER_NODE * PER_NODE for r in range(ranks)],
        )
        rows.append(
            {
                "ranks": ranks,
                "connection a rank": measure_monitor(ranks, flat),
                "connection a node": measure_monitor(ranks, tree),
                "diagnosis": measure_diagnosis(ranks),
                "start": measure_start(ranks),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    result = {"system": common.describe_system(), "cpu": common.get_cpu_name(), "rows": rows}
    common.write_json(common.make_dated_path(args.out, "control-plane.json"), result)


def measure_monitor(ranks: int, relays: Sequence[int]) -> dict[str, Any]:
    """Connect all, send heartbeats of all ranks round by round, and end."""
    hosts = [f"n{rank // PER_NODE:05d}" for rank in range(ranks)]
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = RankMonitorServer(hosts, 600.0, 60.0, "token", listener, relays)
    server.start()
    clock = time.pthread_getcpuclockid(server.ident or 0)
    start = time.perf_counter()
    lines = {relay: connect(listener, relay) for relay in dict.fromkeys(relays)}
    while server._n_identified < len(lines):
        time.sleep(0.01)
    connect_wall = time.perf_counter() - start
    members: dict[int, list[int]] = {}
    for rank, relay in enumerate(relays):
        members.setdefault(relay, []).append(rank)
    before = time.clock_gettime(clock)
    for number in range(ROUNDS):
        sign = {"heartbeat": {**HEARTBEAT, "ticks": number + 1}}
        for relay, line in lines.items():
            line.send({"relayed": [(rank, sign) for rank in members[relay]]} if len(members[relay]) > 1 else sign)
        while any(rank.heartbeat.ticks <= number for rank in server._detector._ranks):
            time.sleep(0.01)
    round_cpu = (time.clock_gettime(clock) - before) / ROUNDS
    before, idle_start = time.clock_gettime(clock), time.perf_counter()
    time.sleep(2.0)
    idle = (time.clock_gettime(clock) - before) / (time.perf_counter() - idle_start)
    start = time.perf_counter()
    for relay, line in lines.items():
        line.send(
            {"relayed": [(rank, {"bye": True}) for rank in members[relay]]}
            if len(members[relay]) > 1
            else {"bye": True}
        )
    wait_for_bye(list(lines.values()))
    end_wall = time.perf_counter() - start
    for line in lines.values():
        line.close()
    server.join(30)
    return {
        "connections": len(lines),
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
    hosts = [f"n{rank // PER_NODE:05d}" for rank in range(ranks)]
    detector = HangDetector(hosts, 30.0, 3.0, 0.0)
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
    return {
        "meet_cpu_s": round(meet_cpu, 3),
        "name_the_missing": sorted(set(errors)),
        "named_by": len(errors),
    }


def time_meeting(world_size: int, present: Sequence[int], seconds: float) -> tuple[float, list[str]]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    errors: list[str] = []

    def arrive(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60))
        try:
            place = ProcessEnvironment("srun", rank, world_size)
            _wait_for_all_ranks(store, place, timedelta(seconds=seconds), time.monotonic())
        except (MegatfmError, dist.DistError) as error:
            errors.append(str(error))

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in present]
    cpu = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.process_time() - cpu, errors


if __name__ == "__main__":
    main()
