"""Metrics, events and sinks of a run; and files that grow are not written through symbolic links."""

import json
import os
import re
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboardX.proto import event_pb2

from megatfm.commands import generation
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers.supervisor import Child, supervise
from megatfm.parallel.distributed import ProcessInfo
from megatfm.tracking.console import RunLog
from megatfm.tracking.metrics import MetricsLog, RunInfo, TensorBoard, log_event
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.decision_log import DecisionLog
from megatfm.train.rank_monitor_client import RankMonitor


def training_record(step: int, loss: float = 2.5) -> dict[str, object]:
    return {"step": step, "tokens": step * 100, "loss": loss, "lr": 1e-3, "time": 1_700_000_000.0 + step}


def read_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_steps(run: RunInfo, first: int, last: int, sinks: tuple[str, ...] = ()) -> None:
    log = MetricsLog(run, sinks)
    for step in range(first, last + 1):
        log.write(training_record(step, loss=float(step)))
    log.close()


def test_a_record_can_be_read_before_the_log_is_closed(tmp_path: Path) -> None:
    log = MetricsLog(RunInfo(tmp_path / "runs" / "a"))
    record = training_record(1) | {"evaluation": {"code": {"loss": 1.25, "tokens": 7}}, "note": "ä\n"}
    log.write(record)
    assert json.loads((tmp_path / "runs/a/metrics.jsonl").read_text()) == record
    log.close()


def test_a_resume_leaves_every_step_exactly_once_and_a_new_run_its_own(tmp_path: Path) -> None:
    write_steps(RunInfo(tmp_path), 1, 9)
    write_steps(RunInfo(tmp_path, first_step=6), 7, 12)
    assert read_steps(tmp_path) == list(range(1, 13))
    write_steps(RunInfo(tmp_path), 0, 2)
    assert read_steps(tmp_path) == [0, 1, 2]


def test_incomplete_lines_are_dropped_at_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(RunInfo(tmp_path), 1, 6)
    path = tmp_path / "metrics.jsonl"
    # cut; whole but for its end; a hole; a step that is no number
    for torn in (b'{"step":7,"los', b'{"step":6}', b"\0" * 40, b'{"step":Infinity}\n'):
        full = path.read_bytes()
        path.write_bytes(full + torn)
        MetricsLog(RunInfo(tmp_path, first_step=6)).close()
        assert path.read_bytes() == full
        assert caplog.messages.pop() == f"{path}: dropped 1 damaged line(s)"


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    log = MetricsLog(RunInfo(tmp_path, first_step=4))
    with pytest.raises(ValueError, match="step 4 was written already"):
        log.write(training_record(4))
    log.close()


def test_nan_and_infinity_are_strict_json(tmp_path: Path) -> None:
    log = MetricsLog(RunInfo(tmp_path))
    log.write(training_record(1, float("nan")) | {"evaluation": {"a": {"loss": float("inf")}}, "x": [-float("inf")]})
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert str(float(record["loss"])) == "nan"
    assert float(record["evaluation"]["a"]["loss"]) == float("inf")
    assert float(record["x"][0]) == -float("inf")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(MegatfmError, match=r"can't write .*metrics.jsonl: Is a directory"):
        MetricsLog(RunInfo(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = MetricsLog(RunInfo(tmp_path))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file.fileno())
    os.close(full)
    with pytest.raises(
        MegatfmError, match=r"metrics.jsonl: No space left on device: make room or mend the disk, then resume"
    ):
        log.write(training_record(1))
    log._file.raw.close()  # the unwritten line must not be tried again at exit


def test_events_are_kept_after_an_incomplete_line(tmp_path: Path) -> None:
    log_event(tmp_path, "stopped", "by SIGTERM", step=7)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time":1')
    log_event(tmp_path, "resumed", "on 2 processes")
    first, torn, second = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first) | {"time": 0} == {"time": 0, "event": "stopped", "detail": "by SIGTERM", "step": 7}
    assert torn == '{"time":1'
    assert json.loads(second)["event"] == "resumed"


def tensorboard_events(folder: Path) -> list[event_pb2.Event]:
    """The events as TensorBoard reads them: TFRecord frames of length, checksum, payload, checksum."""
    events = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            (size,) = struct.unpack_from("<Q", content, offset)
            events.append(event_pb2.Event.FromString(content[offset + 12 : offset + 12 + size]))
            offset += 12 + size + 4
    return events


def test_tensorboard_gets_every_number_and_purges_on_resume(tmp_path: Path) -> None:
    log = MetricsLog(RunInfo(tmp_path), ["tensorboard"])
    actual = {"code": {"loss": 1.5, "load": [0.5, 2.0]}}
    log.write(training_record(1, loss=3.0) | {"evaluation": actual, "note": "text"})
    log.write(training_record(2, loss=2.0))
    log.close()
    write_steps(RunInfo(tmp_path, first_step=1), 2, 3, ("tensorboard",))

    events = tensorboard_events(tmp_path)
    scalars = [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events if e.summary.value]
    assert scalars[0] == (
        1,
        {"train/tokens": 100, "train/loss": 3.0, "train/lr": pytest.approx(1e-3), "evaluation/code/loss": 1.5,
         "evaluation/code/load/0": 0.5, "evaluation/code/load/1": 2.0},
    )  # fmt: skip
    assert [(step, values["train/loss"]) for step, values in scalars] == [(1, 3.0), (2, 2.0), (2, 2.0), (3, 3.0)]
    assert events[1].wall_time > 0
    starts = [e.step for e in events if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [0, 2]  # TensorBoard forgets what came before from that step on


def test_training_goes_on_without_tensorboard_s_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    write_steps(RunInfo(tmp_path), 1, 3, ("tensorboard",))
    assert read_steps(tmp_path) == [1, 2, 3]
    (message,) = caplog.messages
    assert message.startswith(f"TensorBoard has stopped (FileExistsError: [Errno 17] File exists: '{tmp_path}")
    assert message.endswith("it lacks the metrics from step 1 on; metrics.jsonl has all")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize("is_synced", [False, True])
def test_training_goes_on_when_tensorboard_s_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_synced: bool
) -> None:
    """A sink fails at a checkpoint, or at the end; a resume gives TensorBoard another file."""
    log = MetricsLog(RunInfo(tmp_path), ["tensorboard"])
    log.write(training_record(1))
    log.sync()
    (sink,) = log._sinks
    assert isinstance(sink, TensorBoard)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._writer._py_recordio_writer._writer.fileno())
    os.close(full)
    for step in (2, 3):
        log.write(training_record(step))
        if is_synced:
            log.sync()
    log.close()
    (message,) = caplog.messages
    assert re.fullmatch(r"TensorBoard has stopped \(OSError: .*No space left .*; metrics.jsonl has all", message)
    write_steps(RunInfo(tmp_path, first_step=3), 4, 4, ("tensorboard",))
    assert read_steps(tmp_path) == [1, 2, 3, 4]
    assert [event.step for event in tensorboard_events(tmp_path) if event.summary.value] == [1, 4]


def test_an_unknown_sink_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown log sink 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        MetricsLog(RunInfo(tmp_path / "run"), ["tensorbord"])
    assert not (tmp_path / "run").exists()


def test_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    log_event(tmp_path, "started", "a prompt of \udcff")
    line = (tmp_path / "events.jsonl").read_bytes()
    assert b"\\udcff" in line
    assert json.loads(line)["detail"] == "a prompt of \udcff"


def test_missing_steps_are_a_warning_at_a_resume_but_not_in_a_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MetricsLog(RunInfo(tmp_path / "branch", first_step=5, is_branch=True)).close()
    assert not caplog.messages
    MetricsLog(RunInfo(tmp_path / "no file", first_step=5)).close()
    write_steps(RunInfo(tmp_path), 1, 3)
    MetricsLog(RunInfo(tmp_path, first_step=5)).close()
    MetricsLog(RunInfo(tmp_path, first_step=3)).close()
    MetricsLog(RunInfo(tmp_path, first_step=5, is_branch=True)).close()
    missing, short = caplog.messages
    assert missing.endswith("no file/metrics.jsonl is missing: it will lack the steps up to 5")
    assert short == f"{tmp_path / 'metrics.jsonl'} ends at step 3: it will lack the steps up to 5"


def test_an_error_in_a_step_closes_the_sinks(tmp_path: Path) -> None:
    closed = []

    class FailingSink:
        def write(self, record: object) -> None: ...
        def sync(self) -> None:
            raise OSError("full")

        def close(self) -> None:
            closed.append(True)

    log = MetricsLog(RunInfo(tmp_path))
    log._sinks = [FailingSink()]
    with pytest.raises(ZeroDivisionError), log:
        raise ZeroDivisionError
    assert closed == [True]
    assert log._file.closed


ONE_PROCESS = ProcessInfo(0, 1, 0, "none", torch.device("cpu"))


def append_samples(run: RunDirectory) -> None:
    loaded: Any = SimpleNamespace(run_dir=run.folder, step=1)
    generation._append_samples(loaded, "a prompt", ["text"])


APPENDED_FILES: dict[str, Callable[[RunDirectory], object]] = {
    "metrics.jsonl": lambda run: MetricsLog(RunInfo(run.folder)),
    "events.jsonl": lambda run: log_event(run.folder, "started", "seed 1"),
    "decisions.jsonl": lambda run: DecisionLog.from_run(run).skip(3),
    "logs/rank-0.log": lambda run: RunLog(run, 9).__enter__(),
    "logs/watch.log": lambda run: RankMonitor(ONE_PROCESS, 9.0).attach_run_log(
        run.folder / "logs/watch.log", lambda *_: None
    ),
    "samples.jsonl": append_samples,
    "logs/rank-1.log": lambda run: supervise([Child("rank 1", ["true"], log=run.folder / "logs/rank-1.log")]),
}


@pytest.mark.parametrize("name", APPENDED_FILES)
def test_appended_files_are_never_symbolic_links(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is named and left alone; samples are only for the report, so that a note suffices."""
    (tmp_path / "precious").touch()
    with RunDirectory(tmp_path / "run", 0) as run:
        (run.folder / "logs").mkdir(exist_ok=True)
        (run.folder / name).symlink_to(tmp_path / "precious")
        with nullcontext() if name == "samples.jsonl" else pytest.raises((MegatfmError, OSError)) as raised:
            APPENDED_FILES[name](run)
        output = str(raised.value) if raised else capsys.readouterr().err
        assert "it is a symbolic link, whose target would be overwritten: remove it" in output
        assert Path(name).name in output
    assert (tmp_path / "precious").read_bytes() == b""
