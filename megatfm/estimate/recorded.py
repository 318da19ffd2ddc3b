"""Reads the memory and speed that a run recorded, and estimates the same run."""

import math
import pickle
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatfm.config import Config, load_config
from megatfm.errors import UsageError
from megatfm.estimate.devices import GIB, NODE, list_device_names, load_cluster
from megatfm.report.run import Run, parse_count
from megatfm.tracking.metrics import SNAPSHOT_DIR

if TYPE_CHECKING:
    from megatfm.estimate.estimator import Estimator

FIRST_STEPS = 10
"""First steps of a run, left out of its median speed: they compile and fill caches."""
OUT_OF_MEMORY = re.compile(r"rank (\d+) is out of memory: it held ([\d.e+]+) GiB(?: and asked for ([\d.]+ \w+) more)?")
LOG_BYTES = 2**22
"""Bytes at the end of a log that are searched for the message."""


@dataclass(frozen=True)
class Recorded:
    """Facts of a run. peak: most bytes that rank 0 reported, in `peak_step`; failures: (rank, GiB allocated, request)
    of ranks that ran out of memory; owners: bytes in `snapshot` by the line of megatfm that allocated them."""

    gpu: str
    processes: int
    machines: int
    peak: int = 0
    peak_step: int = 0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    failures: list[tuple[int, float, str]] = field(default_factory=list)
    snapshot: Path | None = None
    owners: Counter[str] = field(default_factory=Counter)

    @property
    def is_gpu(self) -> bool:
        """Whether the run used GPUs."""
        return self.gpu not in ("", "none")


def read_recorded(folder: Path) -> Recorded:
    """Read the facts of a run directory. Raises UsageError for another folder."""
    run = Run(folder)
    memory, environment = run.get_curve("memory_bytes"), run.environment
    finite = [(n_bytes, step) for n_bytes, step in zip(memory.values, memory.steps, strict=True) if n_bytes < math.inf]
    peak, peak_step = max(finite, default=(0, 0))
    snapshots = sorted((folder / SNAPSHOT_DIR).glob("rank-*.pickle"))
    return Recorded(
        gpu=str(environment.get("gpu", "")),
        processes=parse_count(environment.get("processes")) or 1,
        machines=parse_count(environment.get("machines")) or 1,
        peak=int(peak),
        peak_step=int(peak_step),
        step_seconds=_compute_median(run, "step_seconds"),
        tokens_per_second=_compute_median(run, "tokens_per_second"),
        failures=sorted(set(_find_failures(folder))),
        snapshot=snapshots[0] if snapshots else None,
        owners=read_snapshot_owners(snapshots[0]) if snapshots else Counter(),
    )


def _compute_median(run: Run, key: str) -> float | None:
    curve = run.get_curve(key)
    values = [value for step, value in zip(curve.steps, curve.values, strict=True) if step > FIRST_STEPS]
    values = values or list(curve.values)
    return statistics.median(values) if values else None


def _find_failures(folder: Path) -> Iterator[tuple[int, float, str]]:
    """Find the messages of ranks that ran out of memory, in logs and events."""
    paths = [path for path in (folder / "logs").rglob("*") if path.is_file()] + [folder / "events.jsonl"]
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            continue
        for rank, allocated, requested in OUT_OF_MEMORY.findall(text):
            yield int(rank), float(allocated), requested


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, tables, texts and numbers; a file that names a class or function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_snapshot_owners(path: Path) -> Counter[str]:
    """Add up the bytes of a GPU's memory snapshot by the line of megatfm that allocated them.

    Raises UsageError for a file that is not a snapshot.
    """
    owners: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            snapshot: Any = _PlainUnpickler(file).load()
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if str(block["state"]).startswith("active"):
                    owners[_find_owner(block.get("frames") or [])] += int(block["size"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path}: not a memory snapshot of torch: {error}") from error
    return owners


def _find_owner(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        name = str(frame["filename"])
        if "/megatfm/" in name:
            return f"{name.rpartition('/megatfm/')[2]}:{int(frame['line'])}"
    return "allocated before it was recorded, or by torch"


def find_device(recorded: Recorded, hardware: Path | None = None) -> str | None:
    """Return the name of a run's device in the tables: of a GPU by its name, of a CPU the calibrated machine; None for
    an unknown one."""
    if not recorded.is_gpu:
        return NODE if NODE in list_device_names(hardware) else None
    words = re.sub(r"[^a-z0-9]+", " ", recorded.gpu.lower()).split()
    matching = [name for name in list_device_names(hardware) if name.partition("-")[0] in words]
    by_size = [name for name in matching if name.partition("-")[2] in words]
    return next(iter(by_size or sorted(matching, key=len)), None)


def compare_with_estimate(folder: Path, hardware: Path | None = None) -> list[tuple[str, str, str, str]]:
    """Return rows (quantity, recorded, estimated, difference); none for a run on a device that is in no table.

    Raises UsageError for a run that can't be estimated.
    """
    recorded = read_recorded(folder)
    if find_device(recorded, hardware) is None:
        return []
    with run_estimator(folder, recorded, None, hardware) as opened:
        estimate = opened.estimate(opened.base)
    memory = estimate.memory[0].total - estimate.memory[0].reserved
    pairs = (
        ("step, s", recorded.step_seconds, estimate.time.step),
        ("tokens a second", recorded.tokens_per_second, estimate.tokens_per_second),
        ("memory of rank 0, GiB", recorded.peak / GIB or None, memory / GIB),
    )
    return [
        (name, f"{measured:,.4g}", f"{modelled:,.4g}", f"{100 * (modelled / measured - 1):+.1f} %")
        for name, measured, modelled in pairs
        if measured
    ]


@contextmanager
def run_estimator(
    folder: Path, recorded: Recorded, device: str | None = None, hardware: Path | None = None
) -> Iterator["Estimator"]:
    """Open an estimator for a run's config on as many devices as it had. Raises UsageError for an unknown device."""
    config: Config = load_config(str(folder / "config.toml"), [])
    device = device or find_device(recorded, hardware)
    if device is None:
        raise UsageError(
            f"{folder}: ran on {recorded.gpu if recorded.is_gpu else 'a CPU'}, which is in no table of devices: name "
            f"one with --device ({', '.join(list_device_names(hardware))}), or measure this machine with "
            "megatfm estimate --calibrate FILE and give --hardware FILE --device here"
        )
    per_node = -(-recorded.processes // recorded.machines)
    cluster = load_cluster(device, recorded.processes, None, per_node, hardware)
    from megatfm.estimate.estimator import open_estimator  # torch, seconds that the report of a run on a CPU is without

    with open_estimator(config, cluster) as opened:
        yield opened
