"""Ranks of two nodes, one through a relay, over real sockets; and what the watch sees of a main thread."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.parallel.distributed import ProcessInfo
from megatfm.train.json_connection import JsonConnection
from megatfm.train.rank_monitor_client import RankMonitor, _describe_thread, find_relays, is_peer_loss
from megatfm.train.rank_monitor_server import RankMonitorRelay, RankMonitorServer
from tests.support.forked_commands import wait_until
from tests.support.rank_processes import MonitorClient, connect, make_heartbeat

HOSTS = ["n0", "n0", "n1", "n1", "n1"]
RELAYS = [0, 1, 2, 2, 2]


class Cluster:
    """A server, a relay, and the connections of ranks."""

    def __init__(self) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.server = RankMonitorServer(HOSTS, 60.0, 0.1, "secret", self.listeners[0], RELAYS)
        self.server.start()
        self.upstream = connect(self.listeners[0])
        self.upstream.send({"rank": 2, "token": "secret"})
        self.relay = RankMonitorRelay([2, 3, 4], 60.0, 0.1, "secret", self.listeners[1], self.upstream)
        self.relay.start()
        self.ranks = [MonitorClient(self.listeners[rank >= 2], rank) for rank in range(len(HOSTS))]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for rank in cluster.ranks:
        rank.line.close()
    for thread in (cluster.server, cluster.relay):
        thread.join(20)
        assert not thread.is_alive()


def test_the_server_has_one_connection_for_a_node(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.heartbeat()
        rank.hears("heartbeat")
    assert sorted(rank for rank in cluster.server._connections.values() if rank is not None) == [0, 1, 2]


def test_all_say_goodbye(cluster: Cluster) -> None:
    for rank in (3, 0, 4, 2):
        cluster.ranks[rank].send(bye=True)
    time.sleep(0.3)
    assert cluster.server.is_alive(), "rank 1 has not left"
    cluster.ranks[1].send(bye=True)
    assert [rank.hears("bye") for rank in cluster.ranks] == [True] * 5


@pytest.mark.parametrize("dead", [1, 2, 3])
def test_a_death_on_either_node_is_heard_on_both(cluster: Cluster, dead: int) -> None:
    cluster.ranks[dead].heartbeat(7, "save")
    time.sleep(0.3)
    cluster.ranks[dead].line.close()
    for rank in set(range(5)) - {dead}:
        diagnosis = cluster.ranks[rank].hears("diagnosis")
        assert diagnosis["ranks"] == [[dead, 1]]
        assert diagnosis["text"].startswith(f"rank {dead} on {HOSTS[dead]} at step 7, save: ended without")


def test_the_last_message_of_a_rank_is_heard_before_its_end(cluster: Cluster) -> None:
    last = cluster.ranks[4]
    last.heartbeat(9, "evaluate")
    last.send(failed="ValueError: no", lost_peer=False)
    last.line.close()
    text = cluster.ranks[0].hears("diagnosis")["text"]
    assert text == "rank 4 on n1 at step 9, evaluate: failed: ValueError: no"


def test_rank_0_and_its_ranks_notice_a_lost_relay(cluster: Cluster) -> None:
    for rank in (0, 3):  # their tokens have arrived
        cluster.ranks[rank].hears("heartbeat")
    cluster.upstream.shutdown()
    assert cluster.ranks[0].hears("diagnosis")["ranks"] == [[2, 1]]
    cluster.ranks[3].hears("server_lost")
    assert cluster.ranks[3].hears("hung") is False


def test_ranks_behind_a_relay_notice_a_lost_server(cluster: Cluster) -> None:
    for rank in (0, 1):
        cluster.ranks[rank].line.close()
    assert cluster.ranks[3].hears("diagnosis")["ranks"] == [[0, 1]]


def test_a_silent_server_is_reported() -> None:
    """A listener that accepts no one takes connections, and says nothing."""
    silent, listener = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    relay = RankMonitorRelay([2, 3], 0.5, 0.1, "secret", listener, connect(silent))
    relay.start()
    rank = MonitorClient(listener, 3)
    assert rank.hears("server_lost").startswith("no sign of life for")
    assert rank.hears("hung") is True
    assert {"heartbeat": True} in rank.heard, "the relay itself is well"
    rank.line.close()  # as long as a rank is there, the relay waits for its last message
    relay.join(20)
    assert not relay.is_alive()
    silent.close()


def test_a_relay_speaks_for_its_own_ranks_only(cluster: Cluster) -> None:
    cluster.upstream.send({"relayed": [(1, make_heartbeat())]})
    assert cluster.ranks[0].hears("diagnosis")["ranks"] == [[2, 1]]


def test_ranks_behind_a_relay_show_the_token_and_are_of_its_node(cluster: Cluster) -> None:
    greetings: list[dict[str, Any]] = [{"rank": 3, "token": "guess"}, {"rank": 1, "token": "secret"}, {"relayed": []}]
    for hello in greetings:
        stranger = MonitorClient(cluster.listeners[1])
        stranger.send(**hello)
        stranger.wait_until_closed()
        stranger.line.close()
    cluster.ranks[3].heartbeat()
    cluster.ranks[3].hears("heartbeat")


def test_age_counts_on_while_a_heartbeat_waits_in_the_relay() -> None:
    """The period is minutes: a batch is sent for a new phase, with the other ranks' older heartbeats."""
    client_end, server = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    relay = RankMonitorRelay([2, 3], 600.0, 100.0, "secret", listener, JsonConnection(client_end))
    relay.start()
    upstream = JsonConnection(server)
    ages: dict[int, list[float]] = {2: [], 3: []}

    def is_relayed(rank: int, count: int) -> bool:
        for message in upstream.receive() or ():
            for sender, relayed in message["relayed"]:
                ages[sender].append(relayed["heartbeat"]["age"])
        return len(ages[rank]) >= count

    ranks = {rank: MonitorClient(listener, rank) for rank in (2, 3)}
    for rank, client in ranks.items():
        client.heartbeat(1, "start", age=0.5)
        wait_until(lambda rank=rank: is_relayed(rank, 1))  # type: ignore[misc]
    ranks[2].heartbeat(1, "start", age=0.5)
    wait_until(lambda: 2 in relay._heartbeats)
    time.sleep(0.6)
    ranks[3].heartbeat(1, "step", age=0.5)
    wait_until(lambda: is_relayed(2, 2) and is_relayed(3, 2))
    assert ages[2][1] > 1.0 > ages[3][1]
    upstream.close()
    for client in ranks.values():
        client.line.close()
    relay.join(20)
    assert not relay.is_alive()


def test_relays_of_nodes() -> None:
    assert find_relays(["a", "a", "a"]) == [0, 1, 2]
    assert find_relays(["a", "a", "b", "b", "c"]) == [0, 1, 2, 2, 4]
    assert find_relays(["a", "b", "c", "a", "b", "c"]) == [0, 1, 2, 3, 1, 2]
    assert find_relays(["a"]) == [0]


def waits(value: SimpleNamespace) -> None:
    value.item()


def works(value: SimpleNamespace) -> None:
    value.read()


@pytest.mark.parametrize(("run", "waiting"), [(waits, True), (works, False)])
def test_a_rank_that_reads_from_the_device_counts_as_waiting(run: FunctionType, waiting: bool) -> None:
    actual, expected = os.pipe()
    blocking = partial(os.read, actual, 1)  # as a tensor's method: no frame of Python's
    thread = threading.Thread(target=run, args=[SimpleNamespace(item=blocking, read=blocking)])
    thread.start()
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame and frame.f_code is run.__code__ and frame.f_lineno > frame.f_code.co_firstlineno:
            break
        time.sleep(0.001)
    seen = _describe_thread(frame)
    os.write(expected, b"!")
    thread.join()
    assert seen == (waiting, "")


def test_a_thread_between_two_lines_is_no_trouble() -> None:
    """Python says None for its line then (seen in 3.11); the watch must live on."""
    code = SimpleNamespace(co_filename=__file__, co_name="run")
    frame = SimpleNamespace(f_code=code, f_lineno=None, f_globals={"__name__": "megatfm.run"}, f_back=None)
    assert _describe_thread(frame) == (False, "megatfm/run.py:?, in run")  # type: ignore[arg-type]


def chained(error: BaseException) -> BaseException:
    above = ValueError("a plugin's, on the way up")
    above.__cause__ = error
    return above


@pytest.mark.parametrize(("error", "lost"), [
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer"), True),
    (RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv"), True),
    (dist.DistNetworkError("recvValue failed"), True),
    (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"), True),
    (dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.27"), False),
    (dist.DistBackendError("NCCL error in: x.cpp:1, unhandled system error"), False),
    (RuntimeError("Connection refused by http://metrics.example"), False),
    (RuntimeError("Timed out: the tokenizer service"), False),
    (ConnectionResetError("Connection reset by peer"), False),
], ids=range(9))  # fmt: skip
def test_whose_failure_an_error_is(error: BaseException, lost: bool) -> None:
    assert is_peer_loss(error) is lost
    assert is_peer_loss(chained(error)) is lost


def test_progress_between_ticks_is_a_sign_of_life() -> None:
    watch = RankMonitor(ProcessInfo(0, 1, 0, "none", torch.device("cpu")), 60.0)
    steps_done = 0
    watch.progress = lambda: steps_done
    watch._last_progress = 0.0
    assert watch._make_heartbeat(50.0).age == 50.0
    steps_done = 1
    assert watch._make_heartbeat(55.0).age == 0.0
    assert watch._make_heartbeat(58.0).age == 3.0
