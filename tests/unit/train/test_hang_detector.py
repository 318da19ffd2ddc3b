"""Whom a detector blames, from heartbeats at times that the test gives; and NCCL's flight recorder."""

import json
import os
from pathlib import Path

import pytest
import torch

from megatfm.train.hang_detector import CAUSE_WINDOW_SECONDS, Diagnosis, HangDetector, Heartbeat
from megatfm.train.profiling import FLIGHT_RECORDER_VARS, dump_flight_recorder, start_flight_recorder

HOSTS = ["n0", "n0", "n1", "n1"]


@pytest.fixture
def detector() -> HangDetector:
    return HangDetector(HOSTS, hang_timeout=10.0, heartbeat_timeout=4.0, start=0.0)


def record_heartbeats(detector: HangDetector, now: float, **heartbeats: Heartbeat) -> None:
    """All ranks say that they are well; those given as r1=… say something else, and r1=None nothing."""
    for rank in range(len(HOSTS)):
        heartbeat = heartbeats.get(f"r{rank}", Heartbeat(7, "step", 8, now % 1, True, "engines/native.py:1"))
        if heartbeat is not None:
            detector.record_heartbeat(rank, heartbeat, now)


def diagnose(detector: HangDetector, now: float) -> Diagnosis:
    diagnosis = detector.diagnose(now)
    assert diagnosis is not None
    return diagnosis


def test_while_all_move_there_is_none(detector: HangDetector) -> None:
    for second in range(30):
        record_heartbeats(detector, float(second))
        assert detector.diagnose(second + 0.5) is None


def test_a_rank_that_is_silent_is_blamed_and_not_those_that_wait_for_it(detector: HangDetector) -> None:
    record_heartbeats(detector, 0.0)
    for second in range(1, 11):
        record_heartbeats(detector, second, r2=None, r0=Heartbeat(7, "step", 8, second, True))  # type: ignore[arg-type]
        if second < 10:
            assert detector.diagnose(second) is None
    diagnosis = diagnose(detector, 10.1)
    facts = diagnosis.ranks, diagnosis.hosts, diagnosis.step, diagnosis.hung, diagnosis.reporter
    assert facts == ([2], ["n1"], 7, True, 0)
    assert (
        diagnosis.text
        == "rank 2 on n1 at step 7, step: no sign of life for 10 s: it was stopped, or its machine is gone"
    )


def test_ranks_that_wait_for_one_that_gets_on_do_not_hang(detector: HangDetector) -> None:
    """Rank 2 reads a checkpoint for minutes, and says so; once it stops to, it is blamed."""
    for second in range(1, 60):
        waits = Heartbeat(7, "save", 8, float(second), True)
        record_heartbeats(detector, second, r0=waits, r1=waits, r3=waits, r2=Heartbeat(7, "save", 8, 0.5, False))
        assert detector.diagnose(second + 0.1) is None
    for second in range(60, 75):
        waits = Heartbeat(7, "save", 8, float(second), True)
        age = second - 59.5
        record_heartbeats(detector, second, r0=waits, r1=waits, r3=waits, r2=Heartbeat(7, "save", 8, age, False))
        if age > 10:
            assert diagnose(detector, second + 0.1).ranks == [2]


def stalled(detector: HangDetector, *heartbeats: Heartbeat) -> Diagnosis:
    for rank, heartbeat in enumerate(heartbeats):
        detector.record_heartbeat(rank, heartbeat, 20.0)
    return diagnose(detector, 20.1)


WAITS = Heartbeat(7, "step", 8, 11.0, True, "megatfm/engines/native/engine.py:50, in step")
WORKS = Heartbeat(7, "step", 8, 11.0, False, "megatfm/data/loader.py:9, in row")
BEHIND, AHEAD = Heartbeat(7, "step", 8, 20.0, True), Heartbeat(7, "step", 9, 0.1, False)
SAVES, STEPS = Heartbeat(7, "save", 9, 11.0, True), Heartbeat(7, "step", 8, 11.5, True)


@pytest.mark.parametrize(("heartbeats", "ranks", "reporter", "text"), [
    ([BEHIND, BEHIND, AHEAD, AHEAD], [0, 1], 2, ""),
    ([WAITS, WAITS, WAITS, WORKS], [3], 0,
     "rank 3 on n1 at step 7, step: has made no progress for 11 s (megatfm/data/loader.py:9, in row)"),
    ([STEPS, SAVES, SAVES, SAVES], [0], 1, ""),
    ([WAITS] * 4, [0, 1, 2, 3], 0, "rank 0 on n0 at step 7, step, rank 1 on n0 at step 7, step, rank 2"),
], ids=["behind one that is ahead", "outside a collective", "behind, although it waits", "alike"])  # fmt: skip
def test_the_rank_that_holds_up_the_others_is_blamed(
    detector: HangDetector, heartbeats: list[Heartbeat], ranks: list[int], reporter: int, text: str
) -> None:
    diagnosis = stalled(detector, *heartbeats)
    assert (diagnosis.ranks, diagnosis.hung, diagnosis.reporter) == (ranks, True, reporter)
    assert text in diagnosis.text


def test_many_ranks_are_not_all_listed() -> None:
    detector = HangDetector(["n"] * 20, hang_timeout=10.0, heartbeat_timeout=4.0, start=0.0)
    diagnosis = stalled(detector, *[Heartbeat(age=11.0)] * 20)
    assert len(diagnosis.ranks) == 20
    assert "rank 7 on n at step 0, start and 12 more: has" in diagnosis.text


def test_the_cause_of_a_failure_beats_its_victims(detector: HangDetector) -> None:
    """A failure is settled before it is told."""
    record_heartbeats(detector, 0.0)
    detector.record_failure(0, "RuntimeError: Connection closed by peer", 1.0, lost_peer=True)
    assert detector.diagnose(1.1) is None
    detector.record_failure(3, None, 1.2)
    detector.record_failure(1, "RuntimeError: Connection closed by peer", 1.3, lost_peer=True)
    diagnosis = diagnose(detector, 1.1 + CAUSE_WINDOW_SECONDS)
    assert (diagnosis.ranks, diagnosis.hosts, diagnosis.hung, diagnosis.reporter) == ([3], ["n1"], False, 0)
    assert (
        diagnosis.text == "rank 3 on n1 at step 7, step: ended without an error message: it was killed, or it crashed"
    )


def test_the_first_of_two_failures_is_blamed(detector: HangDetector) -> None:
    detector.record_failure(2, "ValueError: first", 1.0)
    detector.record_failure(1, None, 1.2)
    assert diagnose(detector, 3.0).text == "rank 2 on n1 at step 0, start: failed: ValueError: first"


def test_a_failure_of_all_ranks_is_blamed_on_none(detector: HangDetector) -> None:
    for rank in range(4):
        detector.record_failure(rank, "run: another process is training", 1.0)
    diagnosis = diagnose(detector, 1.0)
    assert (diagnosis.ranks, diagnosis.text, diagnosis.refused) == ([], "run: another process is training", False)


@pytest.mark.parametrize("ranks", [[2], [0, 1, 2, 3]], ids=["one rank", "all"])
def test_an_invalid_request_is_a_refusal_and_no_failure(detector: HangDetector, ranks: list[int]) -> None:
    for rank in ranks:
        detector.record_failure(rank, "train.seed changed", 1.0, refused=True)
    assert diagnose(detector, 3.0).refused


def test_ranks_that_waited_in_vain_accuse_the_one_that_says_nothing(detector: HangDetector) -> None:
    record_heartbeats(detector, 5.0, r1=Heartbeat(7, "step", 8, 4.0, False, "megatfm/x.py:1, in f"))
    for rank in (0, 2, 3):
        detector.record_failure(rank, "RuntimeError: Timed out", 6.0, lost_peer=True)
    diagnosis = diagnose(detector, 7.0)
    assert (diagnosis.ranks, diagnosis.hung, diagnosis.reporter) == ([1], True, 0)


def test_victims_are_named_if_no_cause_is_found(detector: HangDetector) -> None:
    for rank in range(4):
        detector.record_failure(rank, f"gloo {rank}", 1.0 + rank / 10, lost_peer=True)
    assert diagnose(detector, 2.0).ranks == [0]


def test_ranks_that_left_are_neither_awaited_nor_blamed(detector: HangDetector) -> None:
    for rank in range(3):
        detector.record_exit(rank)
        detector.record_failure(rank, None, 1.0)  # its connection closes, as it should
    record_heartbeats(detector, 5.0)
    assert detector.diagnose(6.0) is None
    detector.record_exit(3)
    assert detector.all_gone
    assert detector.diagnose(100.0) is None


def test_a_monitor_that_was_stopped_itself_blames_no_rank(detector: HangDetector) -> None:
    record_heartbeats(detector, 0.0)
    detector.exclude_pause(60.0)
    assert detector.diagnose(61.0) is None
    assert detector.diagnose(75.0) is not None


def test_the_relaying_rank_of_a_silent_node_is_blamed() -> None:
    detector = HangDetector(HOSTS, 10.0, 4.0, 0.0, relays=[0, 1, 2, 2])
    for second in range(11):
        record_heartbeats(
            detector, second, r0=Heartbeat(7, "step", 8, second, True), **({"r2": None, "r3": None} if second else {})
        )
    diagnosis = diagnose(detector, 10.1)
    assert (diagnosis.ranks, diagnosis.hosts) == ([2], ["n1"])
    detector.record_heartbeat(2, Heartbeat(7, "step", 8, 10.0, True), 10.1)
    assert diagnose(detector, 10.2).ranks == [3], "only the one behind it"


@pytest.mark.parametrize("ranks", [[], [0], [3], [0, 1, 2, 3], [1, 3, 4, 5, 9], [5, 4, 3], [7, 7, 8]], ids=str)
def test_a_diagnosis_is_read_back_from_json(ranks: list[int]) -> None:
    diagnosis = Diagnosis(ranks, [f"n{rank // 4}" for rank in ranks], 3, "they hang", True, 2)
    assert Diagnosis.from_dict(json.loads(json.dumps(diagnosis.to_dict()))) == diagnosis


def test_many_neighbours_make_a_short_diagnosis() -> None:
    """All of 10,000 ranks are silent; the connection takes lines of 64 KiB from those it doesn't know."""
    detector = HangDetector([f"gpu{rank // 8:05d}" for rank in range(10_000)], 10.0, 4.0, 0.0)
    diagnosis = diagnose(detector, 20.0)
    assert len(diagnosis.ranks) == 10_000
    assert len(json.dumps(diagnosis.to_dict())) < 32_000
    assert "and 9,992 more" in diagnosis.text


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (old_name, _) in FLIGHT_RECORDER_VARS.items():
        for item in (name, old_name or name):
            monkeypatch.setenv(item, "")  # so that it is put back afterwards
            monkeypatch.delenv(item)


def recorded() -> dict[str, str]:
    return {name: os.environ[name] for name in FLIGHT_RECORDER_VARS if name in os.environ}


def test_on_gpus_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_flight_recorder(Path("/runs/a"), "auto")
    assert recorded() == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/logs/nccl-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_flight_recorder_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(name, "7")
    start_flight_recorder(Path("/runs/a"), "cuda")
    assert os.environ[name] == "7"
    assert recorded().get("TORCH_FR_BUFFER_SIZE", "7") == "7"


def test_on_a_cpu_there_is_nothing_to_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_flight_recorder(tmp_path, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start_flight_recorder(tmp_path, "auto")
    assert recorded() == {}
    with (tmp_path / "log").open("wb") as file:
        dump_flight_recorder(file.fileno(), 0)
    assert (tmp_path / "log").read_bytes() == b""


def test_nccl_s_records_are_read_from_its_own_recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The recorder of other backends, which every build of torch has, does not hold NCCL's collectives."""
    requested: list[dict[str, bool]] = []

    def dump(**options: bool) -> bytes:
        requested.append(options)
        return b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'

    for name, value in (("is_initialized", True), ("is_nccl_available", True), ("get_backend_config", "cuda:nccl")):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    with (tmp_path / "log").open("wb") as file:
        dump_flight_recorder(file.fileno(), 3)
    written = (tmp_path / "log").read_text()
    assert written.startswith("Unfinished collectives of rank 3: ")
    assert json.loads(written.partition(": ")[2])["entries"][0]["profiling_name"] == "nccl:all_reduce"
    assert requested == [{"includeCollectives": True, "onlyActive": True}]
