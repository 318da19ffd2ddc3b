"""The hub over real sockets: who may speak, and what everybody hears."""

import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatfm.train import rank_monitor_server
from megatfm.train.json_connection import LINE_BYTES, JsonConnection
from megatfm.train.rank_monitor_server import RankMonitorServer
from tests.support.forked_commands import ForkedCommand, wait_until
from tests.support.rank_processes import MonitorClient

Connect = Callable[..., MonitorClient]
OpenHub = Callable[..., Connect]


@pytest.fixture
def open_hub() -> Iterator[Callable[..., Connect]]:
    """`connect = open_hub(ranks)`, then `connect(rank)` for each: all is closed in the end."""
    hubs: list[RankMonitorServer] = []
    clients: list[MonitorClient] = []

    def open_hub(
        ranks: int,
        limit: float = 60.0,
        interval: float = 0.1,
        hosts: list[str] | None = None,
        relays: list[int] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> Connect:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        thread = RankMonitorServer(hosts or ["n0"] * ranks, limit, interval, "secret", listener, relays, warn)
        thread.start()
        hubs.append(thread)

        def connect(rank: int | None = None) -> MonitorClient:
            clients.append(MonitorClient(listener, rank))
            return clients[-1]

        return connect

    yield open_hub
    for client in clients:
        client.line.close()
    for thread in hubs:
        thread.join(20)
        assert not thread.is_alive()


def test_all_hear_signs_and_in_the_end_goodbye(open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goodbye, for which every run waits at its end, awaits no diagnosis."""
    monkeypatch.setattr(rank_monitor_server, "DIAGNOSE_INTERVAL_SECONDS", 3600.0)
    connect = open_hub(2)
    ranks = [connect(rank) for rank in range(2)]
    for rank in ranks:
        rank.heartbeat()
        rank.hears("heartbeat")
    for rank in ranks:
        rank.send(bye=True)
    for rank in ranks:
        assert rank.hears("bye") is True
        rank.wait_until_closed()


def test_a_closed_connection_is_reported_to_all_ranks(open_hub: OpenHub) -> None:
    connect = open_hub(3)
    ranks = [connect(rank) for rank in range(3)]
    ranks[1].heartbeat(phase="save")
    ranks[1].hears("heartbeat")
    ranks[1].line.close()
    for rank in (ranks[0], ranks[2]):
        diagnosis = rank.hears("diagnosis")
        assert diagnosis["ranks"] == [[1, 1]]
        assert diagnosis["text"].startswith("rank 1 on n0 at step 3, save: ended without an error message")


def test_a_missing_rank_is_named(open_hub: OpenHub) -> None:
    local = open_hub(2, limit=0.5, interval=0.05)(0)

    def hears_a_diagnosis() -> bool:
        local.heartbeat(0, "start")
        return any("diagnosis" in message for message in local.listen())

    wait_until(hears_a_diagnosis)
    assert local.hears("diagnosis")["ranks"] == [[1, 1]]


@pytest.mark.parametrize("sent_bytes", [
    json.dumps({"rank": 1, "token": "guess"}).encode() + b"\n", b'{"bye": true}\n', b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n", b"x" * (LINE_BYTES + 1), b'{"token": "\\ud800"}\n', b'{"token": "secret", "rank": 1}\n',
    b'{"token": "secret", "rank": "x"}\n', b'{"token": "secret"}\n',
], ids=["token", "none", "http", "list", "endless", "surrogate", "too high", "no number", "no rank"])  # fmt: skip
def test_strangers_are_shown_the_door_and_change_nothing(open_hub: OpenHub, sent_bytes: bytes) -> None:
    connect = open_hub(1)
    rank = connect(0)
    stranger = connect()
    stranger.line.connection.sendall(sent_bytes)
    stranger.wait_until_closed()
    rank.send(bye=True)
    assert rank.hears("bye")
    assert not any("diagnosis" in message for message in rank.heard)


def test_a_stranger_that_stays_silent_is_shown_the_door_and_too_many_are(
    open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_monitor_server, "TOKEN_SECONDS", 0.3)
    monkeypatch.setattr(rank_monitor_server, "MAX_UNIDENTIFIED", 2)
    connect = open_hub(1)
    rank = connect(0)
    rank.hears("heartbeat")
    begun = time.monotonic()
    first, *remaining = [connect() for _ in range(5)]
    first.wait_until_closed()
    assert time.monotonic() - begun < 10, "as one too many, or for its silence"
    for stranger in remaining:
        stranger.wait_until_closed()
    rank.send(bye=True)
    assert rank.hears("bye")


def test_a_rank_that_talks_nonsense_has_failed(open_hub: OpenHub) -> None:
    connect = open_hub(2)
    ranks = [connect(rank) for rank in range(2)]
    ranks[1].send(heartbeat=3)
    assert ranks[0].hears("diagnosis")["ranks"] == [[1, 1]]


def test_a_message_that_is_sent_in_part_is_ended_before_the_next() -> None:
    """Whole messages are dropped where the other side doesn't read; what arrives is a sequence of whole ones."""
    actual, expected = socket.socketpair()
    actual.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = JsonConnection(actual), JsonConnection(expected)
    heard: list[dict[str, Any]] = []
    for number in range(400):
        sender.send({"number": number, "text": "x" * (number * 37 % 900)})
        if number % 40 == 39:
            for _ in range(3):
                messages = receiver.receive()
                assert messages is not None, "glued together"
                heard += messages
    while messages := receiver.receive():
        heard += messages
    numbers = [message["number"] for message in heard]
    assert numbers == sorted(set(numbers))
    assert 50 < len(numbers) < 400
    sender.close()
    receiver.close()


def test_a_diagnosis_of_any_length_arrives(open_hub: OpenHub) -> None:
    """6,000 silent ranks on as many hosts: more than a socket's buffer takes at once from a slow reader."""
    hosts = [f"node-with-a-long-name-{number:06d}.cluster.example" for number in range(6000)]
    connect = open_hub(6000, limit=1.0, interval=0.1, hosts=hosts)
    client = connect(0)
    for _ in range(30):
        client.heartbeat(age=5.0)
        time.sleep(0.05)
    diagnosis = client.hears("diagnosis")
    assert len(json.dumps(diagnosis)) > 4 * LINE_BYTES
    assert diagnosis["ranks"] == [[1, 5999]]
    assert [host for host, _ in diagnosis["hosts"]] == hosts[1:]


def test_ranks_never_heard_are_named(open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_monitor_server, "FIRST_MESSAGE_SECONDS", 0.3)
    warnings: list[str] = []
    connect = open_hub(4, warn=warnings.append, interval=0.05)
    for rank in (0, 2):
        connect(rank).heartbeat()
    wait_until(lambda: warnings)
    assert warnings == ["the rank monitor has had no message from 2 of 4 ranks since the start: 1, 3"]
    for rank in (1, 3):
        connect(rank).send(failed="enough", lost_peer=False)


def test_connections_that_can_not_be_accepted_are_logged_and_accepted_later(
    open_hub: OpenHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_monitor_server, "ACCEPT_PAUSE_SECONDS", 0.2)
    real, refusals = socket.socket.accept, [errno.EMFILE] * 3

    def accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        if refusals:
            raise OSError(refusals.pop(), "Too many open files")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    warnings: list[str] = []
    connect = open_hub(2, warn=warnings.append)
    ranks = [connect(rank) for rank in range(2)]
    for rank in ranks:
        assert rank.hears("heartbeat")
        rank.send(bye=True)
    for rank in ranks:
        assert rank.hears("bye")
    assert len(warnings) == 1
    assert "can't accept a connection (Too many open files): 0 of 2" in warnings[0]


def test_the_limit_of_descriptors_is_raised_as_far_as_it_goes(tmp_path: Path) -> None:
    """In a process of its own, whose limits can't be raised back."""
    code = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 700))
from megatfm.train.rank_monitor_server import RankMonitorServer
heard = []
RankMonitorServer(["n"] * 100, 9.0, 1.0, "t", None, warn=heard.append)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 356, heard)
RankMonitorServer(["n"] * 1000, 9.0, 1.0, "t", None, warn=heard.append)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], heard)
"""
    program = tmp_path / "limits.py"
    program.write_text(code)
    limited = ForkedCommand([], tmp_path / "output", program=str(program))
    assert limited.wait(60) == 0, limited.output
    first, second = limited.output.splitlines()
    assert first == "True []"
    assert second.startswith("700 [")
    assert "too low for 1000 connections of the rank monitor" in second
    assert "ulimit -Hn" in second
