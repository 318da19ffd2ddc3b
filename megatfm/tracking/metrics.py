"""Metrics and events of a run: `metrics.jsonl`, `events.jsonl`, and sinks such as TensorBoard.

`metrics.jsonl` is authoritative: one JSON object per step, every step exactly once, also after a resume. Sinks show the
same values, and may lag behind.
"""

import contextlib
import importlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import atomic_write, name_disk_errors, open_nofollow, to_strict_json
from megatfm.registry import Registry

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
RESUME_AFTER_REPAIR = "make room or mend the disk, then resume the run"
"""Way out of an error of the disk."""
SNAPSHOT_DIR = "memory"
"""Folder in the run directory for memory snapshots; it exists once a rank has run out of GPU memory."""

_log = logging.getLogger("megatfm")


class StepTimes:
    """Measures the duration of a step's parts: "data", "passes", "optimizer", and "other" for the remainder."""

    def __init__(self) -> None:
        self._start, self._parts = time.perf_counter(), dict[str, float]()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Context manager that measures the seconds of a part."""
        start = time.perf_counter()
        yield
        self._parts[part] = time.perf_counter() - start

    def stop(self, data_wait: float) -> dict[str, Any]:
        """Return the fields for metrics.jsonl. data_wait: seconds within "passes" spent waiting for batches."""
        seconds = time.perf_counter() - self._start
        parts = {"data": data_wait, **self._parts, "passes": self._parts["passes"] - data_wait}
        step_parts = {**parts, "other": seconds - sum(parts.values())}
        return {"data_wait_seconds": data_wait, "step_seconds": seconds, "step_parts": step_parts}


class Sink(Protocol):
    """Interface of destinations for metrics besides metrics.jsonl."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """Properties of a run that its sinks need.

    `first_step`: step of the restored checkpoint, 0 for a new run. `is_branch`: whether that checkpoint is another
    run's, which has the metrics of the earlier steps.
    """

    folder: Path
    first_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    wandb_project: str = "megatfm"
    is_branch: bool = False


SINKS = Registry[Callable[[RunInfo], Sink]]("log sink")


class MetricsLog:
    """Writes metrics to `metrics.jsonl` and the named sinks. Exists on rank 0 only.

    Opening it removes incomplete lines, and the lines of steps after the restored checkpoint. Raises UsageError for a
    sink that is unknown or not installed, MegatfmError if a file can't be written.
    """

    def __init__(self, run: RunInfo, sinks: Sequence[str] = ()) -> None:
        sink_classes = [SINKS.get(name) for name in sinks]
        self._path = run.folder / METRICS
        with name_disk_errors("write", self._path, RESUME_AFTER_REPAIR):
            run.folder.mkdir(parents=True, exist_ok=True)
            _truncate_after(self._path, run.first_step, has_earlier_steps=not run.is_branch)
        self._last_step = run.first_step or -1  # a new run may write a step 0
        self._sinks = [sink_class(run) for sink_class in sink_classes]
        with name_disk_errors("write", self._path, RESUME_AFTER_REPAIR):
            self._file = open(self._path, "ab", opener=open_nofollow)  # noqa: SIM115

    @classmethod
    def from_config(cls, config: Config, folder: Path, first_step: int, is_branch: bool) -> Self:
        """Open the log of a run with the sinks of its config."""
        stored = config.model_dump(mode="json")
        run = RunInfo(folder, first_step, stored, config.log.wandb_project, is_branch)
        return cls(run, config.log.sinks)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of one step, which has at least `step`, `tokens` and `loss`; values may be nested.

        Raises ValueError unless `step` is larger than the last one written.
        """
        step = record["step"]
        if step <= self._last_step:
            raise ValueError(f"step {step} was written already: the last one was {self._last_step}")
        with name_disk_errors("write", self._path, RESUME_AFTER_REPAIR):
            self._file.write(to_json_line(record))
            self._file.flush()  # readers see the step now; it is on disk after sync()
        self._last_step = step
        for sink in self._sinks:
            sink.write(record)

    def sync(self) -> None:
        """Force everything written so far to disk. Called before a checkpoint is saved."""
        with name_disk_errors("write", self._path, RESUME_AFTER_REPAIR):
            os.fsync(self._file.fileno())
        for sink in self._sinks:
            sink.sync()

    def close(self) -> None:
        """Sync and close everything."""
        self.sync()
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        for closing in (self.sync, self._file.close, *(sink.close for sink in self._sinks)):
            try:
                closing()
            except Exception as close_error:  # the error that is being raised matters more
                _log.warning("the metrics could not be closed: %s", close_error)


def log_event(folder: Path, event: str, detail: str, step: int | None = None, **fields: Any) -> None:
    """Append an event of the run (`resumed`, `stopped`, …) to `events.jsonl`, and force it to disk.

    Unlike metrics, events belong to a time and not to a step: a resume keeps them all.
    """
    record = {"time": time.time(), "event": event, "detail": detail, **fields}
    if step is not None:
        record["step"] = step
    path = folder / EVENTS
    with name_disk_errors("write", path, RESUME_AFTER_REPAIR):
        has_unfinished_line = path.exists() and not path.read_bytes().endswith(b"\n")
        with open(path, "ab", opener=open_nofollow) as file:
            file.write((b"\n" if has_unfinished_line else b"") + to_json_line(record))
            file.flush()
            os.fsync(file.fileno())


def to_json_line(record: Mapping[str, Any]) -> bytes:
    """Return a line of strict JSON. NaN and infinities, which JSON lacks, become strings that `float` can read."""
    text = to_strict_json(record, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"  # JSON's own escape for lone surrogates


def _truncate_after(path: Path, first_step: int, *, has_earlier_steps: bool) -> None:
    """Remove all lines except those of steps 1 … first_step, by an atomic rewrite.

    has_earlier_steps: warn if lines up to first_step are missing.
    """
    if not path.exists():
        if first_step and has_earlier_steps:
            _log.warning("%s is missing: it will lack the steps up to %d", path, first_step)
        return
    old = path.read_bytes()
    lines, n_damaged, last_step = list[bytes](), 0, 0
    for line in old.splitlines(keepends=True):
        step = _read_step(line)
        if step is None:
            n_damaged += 1
        elif first_step and step <= first_step:
            lines.append(line)
            last_step = step
    if n_damaged:
        _log.warning("%s: dropped %d damaged line(s)", path, n_damaged)
    if last_step < first_step and has_earlier_steps:
        _log.warning("%s ends at step %d: it will lack the steps up to %d", path, last_step, first_step)
    new = b"".join(lines)
    if new != old:
        atomic_write(path, new)


def _read_step(line: bytes) -> int | None:
    """Return the step of a line of metrics.jsonl; None if the line is damaged or has no end."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _flatten_scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record under slash-joined names: `train/loss`, `evaluation/validation/loss`.

    List items are named by their index.
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flatten_scalars(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _flatten_scalars(dict(zip(map(str, range(len(value))), value, strict=True)), f"{prefix}{key}/")
        elif isinstance(value, int | float) and key not in ("step", "time"):
            yield (prefix or "train/") + key, value


class FailureGuard:
    """Calls a sink until it fails once, and turns that error into a warning: training needs no sink."""

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self.has_failed = False

    def attempt(self, call: Callable[[], object], part: str) -> None:
        """Call the sink, unless it has failed before. part: of the metrics that it lacks if this fails."""
        if self.has_failed:
            return
        try:
            call()
        except Exception as error:  # of a disk, another process or a connection
            self.has_failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _log.warning("%s has stopped (%s): it lacks the metrics %s; %s has all", self._sink, reason, part, METRICS)


@SINKS.register("tensorboard")
class TensorBoard:
    """Writes TensorBoard event files under RUN/tensorboard; a resume purges the steps after the checkpoint.

    Writes in the caller's thread. tensorboardX's SummaryWriter has a writer thread; if a full disk kills it, its queue
    fills up and blocks training. If the files can't be written, the run goes on without them.
    """

    def __init__(self, run: RunInfo) -> None:
        self._guard = FailureGuard("TensorBoard")
        self._guard.attempt(lambda: self._open(run), f"from step {run.first_step + 1} on")

    def _open(self, run: RunInfo) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder = run.folder / "tensorboard"
        self._event = event_pb2.Event
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{time.time_ns()}")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        purge = run.first_step + 1 if run.first_step else 0
        self._writer.write_event(self._event(wall_time=time.time(), step=purge, session_log=start))

    def write(self, record: Mapping[str, Any]) -> None:
        self._attempt(lambda: self._write(record), f"from step {record['step']} on")

    def _write(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=record.get("time", time.time()), step=record["step"])
        for name, value in _flatten_scalars(record):
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.write_event(event)

    def sync(self) -> None:
        self._attempt(lambda: self._writer.flush(), "that were not on disk yet, and later ones")

    def close(self) -> None:
        self._attempt(lambda: self._writer.close(), "that were not on disk yet")

    def _attempt(self, call: Callable[[], object], part: str) -> None:
        """Call `call`; close the file if it fails, since Python would write the rest again at its end."""
        had_failed = self._guard.has_failed
        self._guard.attempt(call, part)
        if self._guard.has_failed and not had_failed:
            with contextlib.suppress(OSError):
                self._writer._py_recordio_writer.close()


@SINKS.register("wandb")
class WeightsAndBiases:
    """Writes to a W&B run whose id is stored in the run directory, so that a resume continues it.

    Respects WANDB_MODE and W&B's other variables. W&B can't remove logged steps: steps that a resume repeats appear
    twice. If W&B can't be reached, logs offline. If its process ends, the run goes on without it.
    """

    FINISH_SECONDS = 30.0
    """Time for sending the rest at the end. W&B would wait for its server without end, and the job for the run.
    W&B's own process then takes some 30 seconds to give up (0.31)."""
    is_unreachable = False
    """Set for the whole process once W&B could not be reached, so that a rollback doesn't wait for it again."""

    def __init__(self, run: RunInfo) -> None:
        self._guard = FailureGuard("W&B")
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UsageError(
                "log.sinks asks for 'wandb', which is not installed: pip install 'megatfm[wandb]'"
            ) from error
        options: dict[str, Any] = {
            "project": run.wandb_project,
            "name": run.folder.name,
            "id": _get_wandb_run_id(run.folder / "wandb-id"),
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.config),
            "settings": self._make_settings(wandb.Settings),
        }
        try:
            self._run = wandb.init(**options, **({"mode": "offline"} if self.is_unreachable else {}))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            advice = "or" if "wandb login" in reason else "run `wandb login`, or"
            raise UsageError(f"W&B: {reason}, {advice} set WANDB_MODE=offline") from error
        except wandb.Error as error:
            _log.warning(
                "W&B can't be reached (%s): metrics are stored in %s until `wandb sync` sends them",
                " ".join(str(error).split()), run.folder / "wandb",
            )  # fmt: skip
            WeightsAndBiases.is_unreachable = True
            self._run = wandb.init(**options, mode="offline")
        # Use our own step axis: on W&B's, steps that a resume repeats would be dropped with only a warning.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _make_settings(self, settings_class: Any) -> Any:
        settings: dict[str, Any] = {"console": "off"}  # the terminal belongs to the progress bar
        if "WANDB_FINISH_TIMEOUT" not in os.environ and hasattr(settings_class(), "finish_timeout"):
            settings |= {"finish_timeout": self.FINISH_SECONDS, "finish_timeout_raises": True}
        return settings_class(**settings)

    def write(self, record: Mapping[str, Any]) -> None:
        values = {"step": record["step"], **dict(_flatten_scalars(record))}
        self._guard.attempt(lambda: self._run.log(values), f"from step {record['step']} on")

    def sync(self) -> None:
        """Do nothing: W&B writes in its own process."""

    def close(self) -> None:
        folder = getattr(self._run, "dir", None)  # RUN/wandb/run-…/files
        remedy = f" (`wandb sync {Path(folder).parent}` sends them)" if folder else ""
        self._guard.attempt(self._run.finish, f"that it had not sent{remedy}")


_WANDB_ID = re.compile(rb"[^\s/\\#?%:]{1,128}")
"""A run id that W&B takes."""


def _get_wandb_run_id(path: Path) -> str:
    with name_disk_errors("write", path, RESUME_AFTER_REPAIR):
        if not path.exists():
            atomic_write(path, secrets.token_hex(4))
        content = path.read_bytes().strip()
    if not content.isascii() or not _WANDB_ID.fullmatch(content):
        raise MegatfmError(
            f"{path}: not the id of a W&B run: write its id there, or delete the file to begin a new run"
        )
    return content.decode()
