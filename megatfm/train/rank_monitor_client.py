"""The rank monitor, a watchdog: when a rank raises, dies, is stopped or hangs, all others soon end and name it.

On every rank, a thread sends heartbeats with the main thread's progress to a server on rank 0, over connections of its
own. Ranks on other machines send them through a relay in the first rank there. The server's diagnosis ends every rank:
by an exception if the main thread can still raise one, else by exiting the process.
"""

import contextlib
import faulthandler
import linecache
import logging
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch.distributed as dist

from megatfm.errors import EXIT_FAILED, MegatfmError, UsageError
from megatfm.files import open_nofollow
from megatfm.object_collectives import (
    all_gather_object,
    format_error_line,
    get_machine_name,
    run_on_all_ranks,
    run_on_rank_0_raising,
)
from megatfm.parallel.distributed import ProcessInfo
from megatfm.train.hang_detector import CAUSE_WINDOW_SECONDS, ENDED_SILENTLY, Diagnosis, Heartbeat
from megatfm.train.json_connection import JsonConnection
from megatfm.train.profiling import dump_flight_recorder
from megatfm.train.rank_monitor_server import RankMonitorRelay, RankMonitorServer

log = logging.getLogger("megatfm")

EXIT_GRACE_SECONDS = 2.0
"""Time that the main thread has after a diagnosis to end by an exception."""
EXIT_DELAY_OF_OTHERS_SECONDS = 1.0
"""Delay of ranks that did not cause the failure: launchers report the first rank that exits as the cause."""
MAX_TORCH_FRAMES = 3
"""Number of innermost frames that are searched for torch.distributed, where a main thread waits for other ranks."""
WAITING_CALLS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
"""Calls that wait for a collective, or for a device that itself waits in one."""

GLOO_PEER_LOSS = ("/gloo/", "Gloo", "recvBytes", "sendBytes")
"""Texts in errors of gloo and of the store after a peer is gone; these errors have no type of their own."""
NCCL_PEER_LOSS = ("remote error", "ncclRemoteError", "remote process", "remote peer", "aborted", "imeout", "timed out")
"""Texts in errors of NCCL after a peer is gone."""

Report = Callable[[str, int, list[int], list[str], bool], None]
"""Function that records a diagnosis: its text, its step, the ranks to blame with their hosts, and whether an invalid
request is the cause."""


class RankMonitor:
    """Context manager: while it is active, the ranks watch each other. Entering it is a collective.

    hang_timeout: seconds without progress after which a rank counts as hung. Leaving it with an error notifies the
    other ranks. If the error only reports a lost peer, a MegatfmError that names the cause replaces it.
    """

    def __init__(self, process: ProcessInfo, hang_timeout: float) -> None:
        self._process, self._hang_timeout = process, hang_timeout
        self._heartbeat_interval = min(5.0, max(0.1, hang_timeout / 10))
        # Grows with the number of ranks, since rank 0 receives the heartbeats of all.
        self._min_heartbeat_gap = max(0.1, 0.002 * process.world_size)
        self._step, self._phase, self._ticks = 0, "start", 0
        self._last_progress = self._last_heartbeat = time.monotonic()
        self._main = threading.get_ident()
        self._log: int | None = None
        self._report: Report | None = None
        self.progress: Callable[[], int] = lambda: 0
        """Function that returns a counter of progress within a phase, such as bytes of a checkpoint. While the counter
        grows, the rank isn't hung."""
        self._progress = 0
        self.save_thread_id: Callable[[], int | None] = lambda: None
        """Function that returns the id of the background save thread, whose stack matters during a save."""
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._finished = threading.Event()  # set after a diagnosis, or when all ranks have exited
        self._diagnosis: Diagnosis | None = None
        self._hub: RankMonitorServer | RankMonitorRelay | None = None  # that in this process, if any

    def __enter__(self) -> Self:
        self._connect()
        self._rearm_gil_watchdog()
        self._thread = threading.Thread(target=self._watch, name="megatfm-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        lost_peer = error is not None and is_peer_loss(error)
        self._leaving.set()
        self._send({"heartbeat": self._make_heartbeat(time.monotonic()).__dict__})
        self._send({"bye": True} if error is None else _describe_error(error, lost_peer))
        if self._hub and error is None:  # others still send their messages through this process
            self._finished.wait()
        elif self._hub or lost_peer:
            self._finished.wait(CAUSE_WINDOW_SECONDS + EXIT_GRACE_SECONDS)
        self._finished.set()
        self._connection.shutdown()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._log is not None:
            os.close(self._log)
        if self._diagnosis and self._process.rank not in self._diagnosis.ranks and (error is None or lost_peer):
            time.sleep(EXIT_DELAY_OF_OTHERS_SECONDS)
            raise MegatfmError(self._diagnosis.text) from error

    def tick(self, step: int, phase: str) -> None:
        """Record progress of the main thread. All ranks must call this in the same order."""
        is_new_phase = phase != self._phase
        self._step, self._phase, self._last_progress = step, phase, time.monotonic()
        self._ticks += 1
        # At once, so that a sudden death is reported with the right phase.
        if is_new_phase or self._last_progress - self._last_heartbeat > self._min_heartbeat_gap:
            self._send({"heartbeat": self._make_heartbeat(self._last_progress).__dict__})

    def attach_run_log(self, path: Path, report: Report) -> None:
        """Write stacks to this file from now on. After a diagnosis, one of the remaining ranks calls `report`."""
        self._log = open_nofollow(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._report = report
        self._rearm_gil_watchdog()

    # ---------------------------------------------------------------------------------------- connecting

    def _connect(self) -> None:
        """Start the server on rank 0 and relays on other nodes, and connect to the nearest. A collective."""
        own_rank = self._process.rank
        host_names = all_gather_object((socket.gethostname(), get_machine_name()))
        self._hosts, machines = [host for host, _ in host_names], [name for _, name in host_names]
        self._relays = find_relays(machines)
        single_host = len(set(machines)) == 1
        endpoint, hub_endpoint = socket.socketpair()

        def start_server() -> tuple[str, int]:
            token, listener = secrets.token_hex(16), _listen(single_host) if len(machines) > 1 else None
            self._hub = RankMonitorServer(
                self._hosts, self._hang_timeout, self._heartbeat_interval, token, listener, self._relays, self._warn
            )
            return token, listener.getsockname()[1] if listener else 0

        token, port = run_on_rank_0_raising(start_server)
        server = "127.0.0.1" if single_host else self._process.address or self._hosts[0], port
        addresses = {0: server}
        if any(relay not in (0, rank) for rank, relay in enumerate(self._relays)):
            addresses |= self._start_relays(token, server)
        if self._hub:
            self._hub.add(hub_endpoint)
            self._hub.start()
        else:
            endpoint.close()
            hub_endpoint.close()
            relay = self._relays[own_rank]
            endpoint = self._open_socket(*addresses[0 if relay == own_rank else relay])
        self._connection = JsonConnection(endpoint)
        self._connection.send({"rank": own_rank, "token": token})

    def _start_relays(self, token: str, server: tuple[str, int]) -> dict[int, tuple[str, int]]:
        """Start a relay if this rank is one; return all relays' addresses, rank → (address, port). A collective."""
        own_rank = self._process.rank
        ranks = [rank for rank, relay in enumerate(self._relays) if relay == own_rank]

        def start() -> int:
            if own_rank == 0 or len(ranks) < 2:
                return 0
            upstream = JsonConnection(self._open_socket(*server))
            upstream.send({"rank": own_rank, "token": token})
            listener = _listen(single_host=True)
            self._hub = RankMonitorRelay(
                ranks, self._hang_timeout, self._heartbeat_interval, token, listener, upstream, self._warn
            )
            return int(listener.getsockname()[1])

        ports = all_gather_object(run_on_all_ranks("the rank monitor can't start", start))
        return {rank: ("127.0.0.1", port) for rank, port in enumerate(ports) if port}

    def _open_socket(self, address: str, port: int) -> socket.socket:
        try:
            return socket.create_connection((address, port), timeout=max(self._hang_timeout, 10.0))
        except OSError as error:
            raise MegatfmError(
                f"rank {self._process.rank} on {socket.gethostname()} can't reach the rank monitor at {address}:{port} "
                f"({error.strerror or error}): all ports of rank 0's machine must be open to the other nodes"
            ) from error

    # ------------------------------------------------------------------------------------------ in the thread

    def _watch(self) -> None:
        last_message = last = next_heartbeat = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        while self._diagnosis is None and not self._finished.is_set():
            readable = selector.select(self._heartbeat_interval / 2)
            now = time.monotonic()
            if now - last > 2 * self._heartbeat_interval + 1:
                last_message += now - last  # this process was paused
            last = now
            if self._finished.is_set():
                break
            if readable:
                last_message = now
                self._receive()
            elif now - last_message > self._hang_timeout + 3 * self._heartbeat_interval:
                self._diagnose_loss(self._nearest, f"no sign of life for {now - last_message:.0f} s", hung=True)
            if now >= next_heartbeat:
                next_heartbeat = now + self._heartbeat_interval
                self._send({"heartbeat": self._make_heartbeat(now).__dict__})
                self._rearm_gil_watchdog()
        faulthandler.cancel_dump_traceback_later()
        if self._diagnosis:
            self._terminate(self._diagnosis)
        selector.close()
        self._connection.close()

    def _receive(self) -> None:
        messages = self._connection.receive()
        if messages is None:
            self._diagnose_loss(self._nearest, ENDED_SILENTLY, hung=False)
        for message in messages or ():
            if "diagnosis" in message:
                self._diagnosis = Diagnosis.from_dict(message["diagnosis"])
            elif "server_lost" in message:
                self._diagnose_loss(0, message["server_lost"], message["hung"])
            elif "bye" in message:
                self._finished.set()

    @property
    def _nearest(self) -> int:
        """Rank to which this one is connected: its node's relay, or rank 0."""
        relay = self._relays[self._process.rank]
        return 0 if relay == self._process.rank else relay

    def _diagnose_loss(self, rank: int, reason: str, hung: bool) -> None:
        """Blame the lost server or relay, rank `rank`. If it is a relay, rank 0 notices, too, and reports it."""
        text = f"rank {rank} on {self._hosts[rank]} at step {self._step}, {self._phase}: {reason}"
        self._diagnosis = self._diagnosis or Diagnosis(
            [rank], [self._hosts[rank]], self._step, text, hung, reporter=0 if rank else 1
        )

    def _terminate(self, diagnosis: Diagnosis) -> None:
        """Log stacks and report the diagnosis, then end this process if its main thread doesn't."""
        own_rank = self._process.rank
        if diagnosis.hung:
            self._write(f"\n{diagnosis.text}\nThe stacks of rank {own_rank}, at step {self._step}, {self._phase}:\n")
            faulthandler.dump_traceback(self._get_log_file(), all_threads=True)
            dump_flight_recorder(self._get_log_file(), own_rank)
        if own_rank == diagnosis.reporter and self._report:
            with contextlib.suppress(MegatfmError, OSError):  # a full disk must not prevent the exit
                self._report(diagnosis.text, diagnosis.step, diagnosis.ranks, diagnosis.hosts, diagnosis.refused)
        self._finished.set()
        if self._leaving.wait(EXIT_GRACE_SECONDS / 4 if diagnosis.hung else EXIT_GRACE_SECONDS):
            return
        if own_rank not in diagnosis.ranks:
            time.sleep(EXIT_DELAY_OF_OTHERS_SECONDS)
        self._write(f"{diagnosis.text}\n")
        os.write(2, f"error: {diagnosis.text}\n".encode())
        os._exit(EXIT_FAILED)

    def _make_heartbeat(self, now: float) -> Heartbeat:
        self._last_heartbeat = now
        if (progress := self.progress()) != self._progress:
            self._progress, self._last_progress = progress, now
        save_thread = self.save_thread_id() if self._phase == "save" else None
        frames = sys._current_frames()
        is_waiting, location = _describe_thread(frames.get(save_thread or self._main) or frames.get(self._main))
        return Heartbeat(self._step, self._phase, self._ticks, now - self._last_progress, is_waiting, location)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send(message)

    def _rearm_gil_watchdog(self) -> None:
        """Restart faulthandler's timer, which dumps all stacks and exits if a call never releases the GIL.

        It fires later than the hang timeout, after the server has diagnosed the silence.
        """
        faulthandler.dump_traceback_later(1.2 * self._hang_timeout + 1, exit=True, file=self._get_log_file())

    def _get_log_file(self) -> int:
        return 2 if self._log is None else self._log

    def _warn(self, text: str) -> None:
        """Print a warning without `logging`, whose lock the stuck main thread may hold."""
        os.write(2, f"warning: {text}\n".encode())
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        """Write to the log file without `logging`, whose lock the stuck main thread may hold."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.write(self._log, text.encode())


def find_relays(machines: Sequence[str]) -> list[int]:
    """Return each rank's relay: the first rank on its machine; on rank 0's machine, the rank itself (no relay)."""
    return [
        rank if machine_of_rank == machines[0] else machines.index(machine_of_rank)
        for rank, machine_of_rank in enumerate(machines)
    ]


def _listen(single_host: bool) -> socket.socket:
    """Return a listening socket; if all ranks are on one machine, on its loopback address."""
    if single_host:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _describe_thread(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread waits in torch.distributed or for its device, and its innermost line in megatfm."""
    is_waiting, depth = False, 0
    if frame is not None:
        # Between two lines, f_lineno may be None.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        is_waiting = WAITING_CALLS.search(line) is not None
    while frame is not None:
        name, depth = frame.f_globals.get("__name__", ""), depth + 1
        is_waiting = is_waiting or (depth <= MAX_TORCH_FRAMES and name.startswith("torch.distributed"))
        if name.startswith("megatfm."):
            location = f"{name.replace('.', '/')}.py:{frame.f_lineno or '?'}, in {frame.f_code.co_name}"
            return is_waiting, location
        frame = frame.f_back
    return is_waiting, ""


def is_peer_loss(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that a collective lost a peer, so that another rank has failed.

    Errors of this rank's own GPU that NCCL reports, and errors of plugins that mention connections, don't count.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, RuntimeError):
            texts = NCCL_PEER_LOSS if "NCCL error" in text else GLOO_PEER_LOSS
            is_dist_error = isinstance(error, dist.DistError) and "NCCL error" not in text
            if is_dist_error or any(peer_loss in text for peer_loss in texts):
                return True
        error = error.__cause__ or error.__context__
    return False


def _describe_error(error: BaseException, lost_peer: bool) -> dict[str, Any]:
    """Return the last message of a rank that ends with an error."""
    return {"failed": format_error_line(error)[:2000], "lost_peer": lost_peer, "refused": isinstance(error, UsageError)}
