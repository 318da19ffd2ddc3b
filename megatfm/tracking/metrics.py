"""The record of a run: `metrics.jsonl`, and the sinks that show the same numbers elsewhere.

`metrics.jsonl` is the truth: one JSON object per step, every step exactly once, also after a resume.
TensorBoard and Weights & Biases are views of it and may lag.
"""

import importlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megatfm.config import Config
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import atomic_write, open_nofollow
from megatfm.registry import Registry

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
MACHINE_DEPENDENT_KEYS = frozenset(
    {
        *("time", "tokens_per_second", "mfu", "mfu_causal", "step_seconds", "data_wait_seconds"),
        *("memory_bytes", "padding", "step_parts", "evaluation_seconds", "save_seconds"),
    }
)
"""Keys of a line that depend on the machine, or on which rows are rank 0's: all others are the same when a step is
done again."""

_log = logging.getLogger("megatfm")


class StepTimes:
    """Measures the seconds of a step by their use: "data", "passes", "optimizer"; the remainder is "other"."""

    def __init__(self) -> None:
        self._start, self._parts = time.perf_counter(), dict[str, float]()

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the seconds of a block as a part."""
        start = time.perf_counter()
        yield
        self._parts[part] = time.perf_counter() - start

    def stop(self, data_wait: float) -> dict[str, Any]:
        """Return the fields of metrics.jsonl. data_wait: seconds of "passes" in which batches were waited for."""
        seconds = time.perf_counter() - self._start
        parts = {"data": data_wait, **self._parts, "passes": self._parts["passes"] - data_wait}
        step_parts = {**parts, "other": seconds - sum(parts.values())}
        return {"data_wait_seconds": data_wait, "step_seconds": seconds, "step_parts": step_parts}


class Sink(Protocol):
    """One more place that shows the metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run for its sinks.

    `first_step` is the step of the restored checkpoint, 0 for a run from the start; `branched` whether that is
    another run's, which has the steps before.
    """

    folder: Path
    first_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    wandb_project: str = "megatfm"
    is_branch: bool = False


SINKS = Registry[Callable[[RunInfo], Sink]]("log sink")


def check_sinks(sinks: Sequence[str]) -> None:
    """Raise UsageError for the name of a sink that there is not."""
    for name in sinks:
        SINKS.get(name)


class MetricsLog:
    """Writes `metrics.jsonl` and the named sinks. Only rank 0 has one.

    Opening it drops the lines of steps that the restored checkpoint has not seen, and a line torn by a kill.
    Raises UsageError for an unknown or uninstalled sink, MegatfmError when a file can't be written.
    """

    def __init__(self, run: RunInfo, sinks: Sequence[str] = ()) -> None:
        makers = [SINKS.get(name) for name in sinks]
        self._path = run.folder / METRICS
        with _naming(self._path):
            run.folder.mkdir(parents=True, exist_ok=True)
            _truncate_after(self._path, run.first_step, expected=not run.is_branch)
        self._last_step = run.first_step or -1  # a run from the start may record a step 0
        self._sinks = [make(run) for make in makers]
        with _naming(self._path):
            self._file = open(self._path, "ab", opener=open_nofollow)  # noqa: SIM115

    @classmethod
    def of_config(cls, config: Config, folder: Path, first_step: int, is_branch: bool) -> Self:
        """Return the log of a run with the sinks of its config."""
        stored = config.model_dump(mode="json")
        run = RunInfo(folder, first_step, stored, config.log.wandb_project, is_branch)
        return cls(run, config.log.sinks)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of one step; a training record holds at least `step`, `tokens` and `loss`.

        Nested tables are allowed. Raises ValueError when `step` does not come after the last one written.
        """
        step = record["step"]
        if step <= self._last_step:
            raise ValueError(f"step {step} was written already: the last one was {self._last_step}")
        with _naming(self._path):
            self._file.write(to_json_line(record))
            self._file.flush()  # a reader sees the step now; the disk sees it at sync()
        self._last_step = step
        for sink in self._sinks:
            sink.write(record)

    def sync(self) -> None:
        """Put everything written so far on the disk. Called before a checkpoint is committed."""
        with _naming(self._path):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for closing in (self.sync, self._file.close, *(sink.close for sink in self._sinks)):
            try:
                closing()
            except Exception as second:  # the first error is the one to report
                _log.warning("the record of the run could not be closed: %s", second)


def log_event(folder: Path, event: str, detail: str, step: int | None = None, **facts: Any) -> None:
    """Append what happened to the run (`resumed`, `stopped`, …) to `events.jsonl`, at once and for good.

    Unlike metrics, events are facts of the clock and not of the step: a resume keeps them all.
    """
    record = {"time": time.time(), "event": event, "detail": detail, **facts}
    if step is not None:
        record["step"] = step
    path = folder / EVENTS
    with _naming(path):
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with open(path, "ab", opener=open_nofollow) as file:
            file.write((b"\n" if torn else b"") + to_json_line(record))
            file.flush()
            os.fsync(file.fileno())


def to_json_line(record: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. NaN and the infinities, which JSON lacks, become the strings that `float` reads."""
    text = json.dumps(_finite(record), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"  # of half a character, JSON's own escape


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _truncate_after(path: Path, first_step: int, *, expected: bool) -> None:
    """Keep the lines of steps 1 … first_step, by an atomic rewrite if any other is there. expected: that some are."""
    if not path.exists():
        if first_step and expected:
            _log.warning("%s is missing: the steps up to %d are not in the record", path, first_step)
        return
    old = path.read_bytes()
    lines, damaged = [], 0
    for line in old.splitlines(keepends=True):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
            continue
        if not line.endswith(b"\n"):
            damaged += 1
        elif first_step and step <= first_step:
            lines.append(line)
    if damaged:
        _log.warning("%s: dropped %d damaged line(s)", path, damaged)
    last = int(json.loads(lines[-1])["step"]) if lines else 0
    if last < first_step and expected:
        _log.warning("%s ends at step %d: those up to %d are not in the record", path, last, first_step)
    new = b"".join(lines)
    if new == old:
        return
    atomic_write(path, new)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn an operating system error into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise MegatfmError(f"can't write {path}: {error.strerror}; mend that and resume the run") from error


def _flatten_scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record under slash-joined names: `train/loss`, `evaluation/validation/loss`; those of
    a list by their places."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flatten_scalars(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _flatten_scalars(
                dict(zip(map(str, range(len(value))), value, strict=True)), f"{prefix}{key}/"
            )
        elif isinstance(value, int | float) and key not in ("step", "time"):
            yield (prefix or "train/") + key, value


@SINKS.register("tensorboard")
class TensorBoard:
    """TensorBoard event files under RUN/tensorboard; on resume the steps after the checkpoint are purged.

    Written in the caller's thread: with tensorboardX's SummaryWriter, a writer thread that dies of a full disk
    leaves a queue that fills up and blocks training.
    """

    def __init__(self, run: RunInfo) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        folder = run.folder / "tensorboard"
        self._event = event_pb2.Event
        with _naming(folder):
            folder.mkdir(exist_ok=True)
            self._folder = folder
            self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{time.time_ns()}")
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            purge = run.first_step + 1 if run.first_step else 0
            self._writer.write_event(self._event(wall_time=time.time(), step=purge, session_log=start))

    def write(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=record.get("time", time.time()), step=record["step"])
        for name, value in _flatten_scalars(record):
            event.summary.value.add(tag=name, simple_value=value)
        with _naming(self._folder):
            self._writer.write_event(event)

    def sync(self) -> None:
        with _naming(self._folder):
            self._writer.flush()

    def close(self) -> None:
        with _naming(self._folder):
            self._writer.close()


@SINKS.register("wandb")
class WeightsAndBiases:
    """One W&B run per run directory, under an id that is kept there, so that a resume goes on in it.

    WANDB_MODE=offline and the like are respected. W&B can't remove logged steps: steps repeated after
    a resume appear twice, at the same place of the step axis. While it can't be reached, the run goes on offline.
    """

    is_away = False
    """Set once W&B could not be reached: this process doesn't ask it again at each rollback."""

    def __init__(self, run: RunInfo) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise UsageError(
                "log.sinks asks for 'wandb', which is not installed: pip install 'megatfm[wandb]'"
            ) from error
        options: dict[str, Any] = {
            "project": run.wandb_project,
            "name": run.folder.name,
            "id": _wandb_run_id(run.folder / "wandb-id"),
            "resume": "allow",
            "dir": str(run.folder),
            "config": dict(run.config),
            "settings": wandb.Settings(console="off"),  # the terminal belongs to the progress bar
        }
        try:
            self._run = wandb.init(**options, **({"mode": "offline"} if self.is_away else {}))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"W&B: {reason}; run `wandb login`, or set WANDB_MODE=offline") from error
        except wandb.Error as error:
            _log.warning(
                "W&B can't be reached (%s): its metrics are kept in %s until `wandb sync` sends them",
                " ".join(str(error).split()), run.folder / "wandb",
            )  # fmt: skip
            WeightsAndBiases.is_away = True
            self._run = wandb.init(**options, mode="offline")
        # Our steps are the axis: W&B's own would drop, with a mere warning, every step repeated after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log({"step": record["step"], **dict(_flatten_scalars(record))})

    def sync(self) -> None:
        """W&B writes in its own process, as it comes."""

    def close(self) -> None:
        self._run.finish()


def _wandb_run_id(path: Path) -> str:
    with _naming(path):
        if not path.exists():
            atomic_write(path, secrets.token_hex(4))
        return path.read_text().strip()
