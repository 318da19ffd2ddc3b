"""The rank monitor: when one rank raises, dies, is stopped or falls behind, all others end soon and name it.

Every rank has a thread that sends its main thread's progress to rank 0's server, over connections that no collective
uses: on rank 0's machine directly, on others through a relay in the first rank there. The server's diagnosis ends every
rank: by an exception where the main thread can still take one, else at once.
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
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from megatfm.errors import EXIT_FAILED, MegatfmError
from megatfm.files import open_nofollow
from megatfm.object_collectives import all_gather, machine, run_on_all_ranks, run_on_rank_0_raising
from megatfm.parallel.distributed import ProcessInfo
from megatfm.train.hang_detector import CAUSE_WINDOW_SECONDS, Diagnosis, Heartbeat
from megatfm.train.json_connection import JsonConnection
from megatfm.train.profiling import dump_flight_recorder
from megatfm.train.rank_monitor_server import RankMonitorRelay, RankMonitorServer

log = logging.getLogger("megatfm")

EXIT_GRACE_SECONDS = 2.0
"""How long a main thread may take after a diagnosis to end in good order."""
EXIT_DELAY_OF_OTHERS_SECONDS = 1.0
"""Ranks that did not cause the failure exit this much later: launchers report the first that exits as the cause."""
MAX_TORCH_FRAMES = 3
"""Frames in which torch.distributed marks a main thread as waiting for others."""
WAITING_CALLS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
"""Calls of an innermost line that waits: for a collective, or for a device that itself waits in one."""

LOST_BY_GLOO = ("/gloo/", "Gloo", "recvBytes", "sendBytes")
"""Words in the errors of gloo and of the store, which have no type of their own."""
LOST_BY_NCCL = (
    "remote error",
    "ncclRemoteError",
    "remote process",
    "remote peer",
    "aborted",
    "imeout",
    "timed out",
)
"""Words in an error of NCCL that comes from another rank's end."""

Report = Callable[[str, int, list[int], list[str]], None]
"""Takes why the run ends, at which step, and which ranks on which hosts are to blame."""


class RankMonitor:
    """While entered, this rank is watched by the others. Entering is a collective.

    hang_timeout: seconds without progress after which a rank counts as hung. Leaving with an error notifies the other
    ranks; where that error only comes from a lost peer, a MegatfmError that names the cause replaces it."""

    def __init__(self, rank: ProcessInfo, hang_timeout: float) -> None:
        self._rank, self._hang_timeout = rank, hang_timeout
        self._heartbeat_interval = min(5.0, max(0.1, hang_timeout / 10))
        self._min_heartbeat_gap = max(
            0.1, 0.002 * rank.world_size
        )  # between heartbeats at steps: rank 0 hears all of them
        self._step, self._phase, self._ticks = 0, "start", 0
        self._last_progress = self._last_heartbeat = time.monotonic()
        self._main = threading.get_ident()
        self._log: int | None = None
        self._report: Report | None = None
        self.progress: Callable[[], int] = lambda: 0
        """Counts what the process gets done between two ticks, such as bytes of a checkpoint: while it grows, the rank
        isn't hung."""
        self._progress = 0
        self.save_thread_id: Callable[[], int | None] = lambda: None
        """Returns the background save thread, whose stack shows during a save where the work is done."""
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._finished = threading.Event()  # a diagnosis, or the end of all ranks
        self._diagnosis: Diagnosis | None = None
        self._hub: RankMonitorServer | RankMonitorRelay | None = (
            None  # that others reach through this process
        )

    def __enter__(self) -> Self:
        self._connect()
        self._rearm_gil_watchdog()
        self._thread = threading.Thread(target=self._watch, name="megatfm-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lost_peer = error is not None and is_peer_loss(error)
        self._leaving.set()
        self._send({"heartbeat": self._heartbeat(time.monotonic()).__dict__})
        self._send({"bye": True} if error is None else {"failed": _one_line(error), "lost_peer": lost_peer})
        if (
            self._hub and error is None
        ):  # the others may still have something to do, and are heard through this process
            self._finished.wait()
        elif self._hub or lost_peer:
            self._finished.wait(CAUSE_WINDOW_SECONDS + EXIT_GRACE_SECONDS)
        self._finished.set()
        self._connection.shutdown()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._log is not None:
            os.close(self._log)
        if self._diagnosis and self._rank.rank not in self._diagnosis.ranks and (error is None or lost_peer):
            time.sleep(EXIT_DELAY_OF_OTHERS_SECONDS)
            raise MegatfmError(self._diagnosis.text) from error

    def tick(self, step: int, phase: str) -> None:
        """Record that the main thread moved on; called alike on all ranks."""
        new = phase != self._phase
        self._step, self._phase, self._last_progress = step, phase, time.monotonic()
        self._ticks += 1
        if (
            new or self._last_progress - self._last_heartbeat > self._min_heartbeat_gap
        ):  # so that a sudden death is placed rightly
            self._send({"heartbeat": self._heartbeat(self._last_progress).__dict__})

    def attach_run_log(self, path: Path, report: Report) -> None:
        """Write stacks to this file from now on; one of the ranks that are left calls `report`."""
        self._log = open_nofollow(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._report = report
        self._rearm_gil_watchdog()

    # ---------------------------------------------------------------------------------------- connecting

    def _connect(self) -> None:
        """Start the server on rank 0 and relays on other nodes, and connect to the nearest. A collective."""
        me, places = self._rank.rank, all_gather((socket.gethostname(), machine()))
        self._hosts = [host for host, _ in places]
        self._relays = find_relays([place for _, place in places])
        single_host = len({place for _, place in places}) == 1
        endpoint, hub_endpoint = socket.socketpair()

        def start_server() -> tuple[str, int]:
            token, listener = secrets.token_hex(16), _listen(single_host) if len(places) > 1 else None
            self._hub = RankMonitorServer(
                self._hosts,
                self._hang_timeout,
                self._heartbeat_interval,
                token,
                listener,
                self._relays,
                self._warn,
            )
            return token, listener.getsockname()[1] if listener else 0

        token, port = run_on_rank_0_raising(start_server)
        server = "127.0.0.1" if single_host else self._rank.address or self._hosts[0], port
        addresses = {0: server}
        if any(relay not in (0, rank) for rank, relay in enumerate(self._relays)):
            addresses |= self._start_relays(token, server)
        if self._hub:
            self._hub.add(hub_endpoint)
            self._hub.start()
        else:
            endpoint.close()
            hub_endpoint.close()
            relay = self._relays[me]
            endpoint = self._dial(*addresses[0 if relay == me else relay])
        self._connection = JsonConnection(endpoint)
        self._connection.send({"rank": me, "token": token})

    def _start_relays(self, token: str, server: tuple[str, int]) -> dict[int, tuple[str, int]]:
        """Start a relay where others are heard through this rank; returns where they are. A collective."""
        me = self._rank.rank
        ranks = [rank for rank, relay in enumerate(self._relays) if relay == me]

        def start() -> int:
            if me == 0 or len(ranks) < 2:
                return 0
            upstream = JsonConnection(self._dial(*server))
            upstream.send({"rank": me, "token": token})
            listener = _listen(single_host=True)
            self._hub = RankMonitorRelay(
                ranks, self._hang_timeout, self._heartbeat_interval, token, listener, upstream, self._warn
            )
            return int(listener.getsockname()[1])

        ports = all_gather(run_on_all_ranks("the rank monitor can't start", start))
        return {rank: ("127.0.0.1", port) for rank, port in enumerate(ports) if port}

    def _dial(self, address: str, port: int) -> socket.socket:
        try:
            return socket.create_connection((address, port), timeout=max(self._hang_timeout, 10.0))
        except OSError as error:
            raise MegatfmError(
                f"rank {self._rank.rank} on {socket.gethostname()} can't reach the rank monitor at {address}:{port} "
                f"({error.strerror or error}): it needs any port of rank 0's machine"
            ) from error

    # ------------------------------------------------------------------------------------------ in the thread

    def _watch(self) -> None:
        heard = last = next_heartbeat = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        while self._diagnosis is None and not self._finished.is_set():
            readable = selector.select(self._heartbeat_interval / 2)
            now = time.monotonic()
            if now - last > 2 * self._heartbeat_interval + 1:
                heard += now - last  # we were stopped ourselves
            last = now
            if self._finished.is_set():
                break
            if readable:
                heard = now
                self._receive()
            elif now - heard > self._hang_timeout + 3 * self._heartbeat_interval:
                self._diagnose_loss(self._nearest, f"no sign of life for {now - heard:.0f} s", hung=True)
            if now >= next_heartbeat:
                next_heartbeat = now + self._heartbeat_interval
                self._send({"heartbeat": self._heartbeat(now).__dict__})
                self._rearm_gil_watchdog()
        faulthandler.cancel_dump_traceback_later()
        if self._diagnosis:
            self._terminate(self._diagnosis)
        selector.close()
        self._connection.close()

    def _receive(self) -> None:
        messages = self._connection.receive()
        if messages is None:
            self._diagnose_loss(
                self._nearest, "ended without a word: it was killed, or it crashed", hung=False
            )
        for message in messages or ():
            if "diagnosis" in message:
                self._diagnosis = Diagnosis.from_dict(message["diagnosis"])
            elif "server_lost" in message:
                self._diagnose_loss(0, message["server_lost"], message["hung"])
            elif "bye" in message:
                self._finished.set()

    @property
    def _nearest(self) -> int:
        """The rank whose process this one is heard through: its node's relay, or rank 0."""
        relay = self._relays[self._rank.rank]
        return 0 if relay == self._rank.rank else relay

    def _diagnose_loss(self, rank: int, what: str, hung: bool) -> None:
        """Blame a rank through which this one is heard. Rank 0 hears of a relay's loss as well, and reports it."""
        text = f"rank {rank} on {self._hosts[rank]} at step {self._step}, {self._phase}: {what}"
        self._diagnosis = self._diagnosis or Diagnosis(
            [rank], [self._hosts[rank]], self._step, text, hung, reporter=0 if rank else 1
        )

    def _terminate(self, diagnosis: Diagnosis) -> None:
        """Log stacks and report the diagnosis, then end this process if its main thread doesn't."""
        own_rank = self._rank.rank
        if diagnosis.hung:
            self._write(
                f"\n{diagnosis.text}\nThe stacks of rank {own_rank}, at step {self._step}, {self._phase}:\n"
            )
            faulthandler.dump_traceback(self._file(), all_threads=True)
            dump_flight_recorder(self._file(), own_rank)
        if own_rank == diagnosis.reporter and self._report:
            with contextlib.suppress(MegatfmError, OSError):  # a full disk must not keep us from ending
                self._report(diagnosis.text, diagnosis.step, diagnosis.ranks, diagnosis.hosts)
        self._finished.set()
        if self._leaving.wait(EXIT_GRACE_SECONDS / 4 if diagnosis.hung else EXIT_GRACE_SECONDS):
            return
        if own_rank not in diagnosis.ranks:
            time.sleep(EXIT_DELAY_OF_OTHERS_SECONDS)
        self._write(f"{diagnosis.text}\n")
        os.write(2, f"error: {diagnosis.text}\n".encode())
        os._exit(EXIT_FAILED)

    def _heartbeat(self, now: float) -> Heartbeat:
        self._last_heartbeat = now
        if (progress := self.progress()) != self._progress:
            self._progress, self._last_progress = progress, now
        working = self.save_thread_id() if self._phase == "save" else None
        frames = sys._current_frames()
        is_waiting, place = _describe_thread(frames.get(working or self._main) or frames.get(self._main))
        return Heartbeat(self._step, self._phase, self._ticks, now - self._last_progress, is_waiting, place)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send(message)

    def _rearm_gil_watchdog(self) -> None:
        """Arm faulthandler's timer anew, which dumps all stacks and exits if a call never releases the GIL.

        It fires after the hang timeout, so that the server has diagnosed the silence by then.
        """
        faulthandler.dump_traceback_later(1.2 * self._hang_timeout + 1, exit=True, file=self._file())

    def _file(self) -> int:
        return 2 if self._log is None else self._log

    def _warn(self, text: str) -> None:
        """Tell the people who run it, past logging."""
        os.write(2, f"warning: {text}\n".encode())
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        """Write to the log past logging, whose lock the stuck main thread may hold."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.write(self._log, text.encode())


def find_relays(machines: Sequence[str]) -> list[int]:
    """Return by rank the rank through which the server hears it: itself on rank 0's machine, else the first there."""
    first: dict[str, int] = {}
    for rank, machine_of_rank in enumerate(machines):
        first.setdefault(machine_of_rank, rank)
    return [
        rank if machine_of_rank == machines[0] else first[machine_of_rank]
        for rank, machine_of_rank in enumerate(machines)
    ]


def _listen(single_host: bool) -> socket.socket:
    """A listening socket: for this machine's own ranks only where there are no others."""
    if single_host:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _describe_thread(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread waits in torch.distributed or for its device, and the innermost line of megatfm."""
    is_waiting, depth = False, 0
    if frame is not None:
        # Between two lines Python may not know which one a thread is at.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        is_waiting = WAITING_CALLS.search(line) is not None
    while frame is not None:
        name, depth = frame.f_globals.get("__name__", ""), depth + 1
        is_waiting = is_waiting or (depth <= MAX_TORCH_FRAMES and name.startswith("torch.distributed"))
        if name.startswith("megatfm."):
            return (
                is_waiting,
                f"{name.replace('.', '/')}.py:{frame.f_lineno or '?'}, in {frame.f_code.co_name}",
            )
        frame = frame.f_back
    return is_waiting, ""


def is_peer_loss(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is a collective's that broke off: the failure of another rank, then.

    An error of this rank's own GPU comes out of NCCL as well, and a plugin's may speak of connections: neither is one.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, RuntimeError) and "NCCL error" in text:
            is_connection_lost = any(word in text for word in LOST_BY_NCCL)
        elif isinstance(error, RuntimeError):  # as dist.DistError is
            is_connection_lost = isinstance(error, dist.DistError) or any(
                word in text for word in LOST_BY_GLOO
            )
        else:
            is_connection_lost = False
        if is_connection_lost:
            return True
        error = error.__cause__ or error.__context__
    return False


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0][:2000]
    return text if isinstance(error, MegatfmError) else f"{type(error).__name__}: {text}".rstrip(": ")
