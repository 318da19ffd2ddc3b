"""Files that data_prep reads and writes, its steps, and preparations by several tasks, stopped, held or killed."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from pydantic import TypeAdapter

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.config.prep_steps import StepConfig
from megatfm.corpus.files import AtomicFile
from megatfm.data_prep import pipeline
from megatfm.data_prep.documents import Document
from megatfm.data_prep.execution.executors import LockExecutor
from megatfm.data_prep.execution.workspace import Workspace
from megatfm.data_prep.filters.base import CountingFilter, make_filter
from tests.support.workers import start_fork_server


def write_file(path: Path, data: bytes) -> Path:
    """Write a file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def make_prep_config(folder: Path, corpus: Path, out: str = "out", **settings: Any) -> PrepConfig:
    """A config that prepares a corpus into `folder/out` with a small tokenizer; settings of a section add to it."""
    values: dict[str, Any] = {
        "out": str(folder / out),
        "read": {"folder": str(corpus)},
        "split": {"validation": 0.1},
        "tokenizer": {"vocab_size": 700, "sentinels": 4},
    }
    for name, value in settings.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return PrepConfig.model_validate(values)


def file_hashes(folder: Path) -> dict[str, str]:
    """The BLAKE3 hash of every file below a folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_tasks_in_random_order(
    step: str,
    count: int,
    total: int,
    work: Callable[[int, Callable[[int], None]], dict[str, Any]],
    join: Callable[[Iterable[dict[str, Any]]], dict[str, Any]] = lambda _: {},
) -> dict[str, Any]:
    """All tasks of a step of a search, in an order by chance; every other one is done twice."""
    order = random.Random(step).sample(range(count), count)
    parts = {number: work(number, lambda _: None) for number in [*order, *order[::2]]}
    return join(parts[number] for number in range(count))


def warc_record(kind: str, content: bytes, url: str, type_: str) -> bytes:
    """One record of a WARC file."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\nContent-Type: {type_}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def build_step(name: str, **settings: Any) -> CountingFilter:
    """A step by its name."""
    return make_filter(TypeAdapter(StepConfig).validate_python({"name": name, **settings}))


def apply_step(step: CountingFilter, text: str, url: str = "") -> tuple[str | None, str]:
    """Text that a step leaves, or None, and the reason for that."""
    result = step(Document("x", text, url))
    return (result.text if result else None), next(iter(step.counts.dropped), "")


WORDS = [
    "the", "of", "and", "a", "cat", "sat", "on", "mat", "with", "that", "have", "be", "to", "it's", "über",
    "naïve", "3", "14", "x9", "#tag", "wait…", "so...", "quick", "brown",
]  # fmt: skip
SENTENCE_ENDS = (
    ".", "!", "?", '"', "'", "", "", "...", "…", ",", "。", "؟", "।",
)  # fmt: skip


def random_pages(count: int, seed: int = 0) -> Iterator[str]:
    """Bad texts: repeated words, lines and paragraphs, bullets, fragments, mixed with good ones."""
    rng = random.Random(seed)
    for _ in range(count):
        words = rng.sample(WORDS, rng.randrange(3, len(WORDS)))
        lines: list[str] = []
        for _ in range(rng.randrange(1, 25)):
            if lines and rng.random() < rng.choice((0, 0.2, 0.5)):
                lines.append(rng.choice(lines))
                continue
            line = " ".join(rng.choices(words, k=rng.choice((1, 3, 8, 20))))
            bullet = rng.choice(("", "", "", "• ", "- "))
            lines.append(bullet + line + rng.choice(SENTENCE_ENDS))
        yield "".join(line + rng.choice(("\n", "\n\n")) for line in lines).strip()


SIGNAL_SCRIPT = Path(__file__).with_name("signal_prep.py")
"""A preparation that is hit by a signal on the way."""


PATIENCE = 60


class StoppedError(BaseException):
    """An exit that, as a kill, nothing handles."""


def run_task(config: PrepConfig, number: int, count: int = 2) -> None:
    """Do the part of a task of an array."""
    data_prep.run(config, make_executor=lambda folder: LockExecutor(number, count, folder))


def run_tasks(config: PrepConfig, count: int) -> None:
    """Run all tasks of an array at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def task(number: int) -> None:
        try:
            run_task(config, number, count)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=task, args=(n,), name=f"task-{n}") for n in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]


@contextmanager
def stop_before_commit(stage: str) -> Iterator[None]:
    """Context manager whose preparation is stopped when a stage is done, and is about to be committed."""
    commit = Workspace.commit

    def stop(self: Workspace, name: str, *remaining: Any, **options: Any) -> None:
        if name == stage:
            raise StoppedError
        commit(self, name, *remaining, **options)

    def finish(*_: Any, **__: Any) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "commit", stop)
        if stage == "finish":
            patch.setattr(Workspace, "finish", finish)
        with pytest.raises(StoppedError):
            yield


@contextmanager
def hold_first_task(config: PrepConfig) -> Iterator[None]:
    """Context manager during which the first of two tasks waits with a stage that is done; then it finishes."""
    is_working, may_finish = threading.Event(), threading.Event()
    commit = Workspace.commit

    def wait(self: Workspace, *stage: Any, **options: Any) -> None:
        is_working.set()
        assert may_finish.wait(PATIENCE)
        commit(self, *stage, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "commit", wait)
        first = threading.Thread(target=run_task, args=(config, 1))
        first.start()
        assert is_working.wait(PATIENCE)
        try:
            yield
        finally:
            may_finish.set()
            first.join(PATIENCE)


KILLED = -signal.SIGKILL
NEVER = 10**9


class MomentCounter:
    """Counts the moments, and kills this process without warning when the time has come."""

    def __init__(self, last: int) -> None:
        self.now = 0
        self.last = last

    def count_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def tick(*arguments: Any, **named: Any) -> Any:
            if self.now == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.now += 1
            return call(*arguments, **named)

        return tick


def run_until_moment(config: PrepConfig, last: int, moments: Connection) -> None:
    """Prepare, and be killed at a moment; else send the number of moments."""
    clock = MomentCounter(last)
    os.fsync, os.replace = clock.count_calls(os.fsync), clock.count_calls(os.replace)
    AtomicFile.write = clock.count_calls(AtomicFile.write)  # type: ignore[method-assign]
    pipeline.run(config)
    moments.send(clock.now)


def run_killed_at(config: PrepConfig, last: int) -> int | None:
    """The exit code of a preparation that is killed at a moment, which is KILLED if it lasted so long."""
    return _start(config, last)[0]


def count_moments(config: PrepConfig) -> int:
    """Number of moments of a preparation that nobody kills, in a folder beside `config.out`."""
    _, moments = _start(config.model_copy(update={"out": f"{config.out}-counted"}), NEVER)
    count: int = moments.recv()
    return count


def _start(config: PrepConfig, last: int) -> tuple[int | None, Connection]:
    context = start_fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_until_moment, args=(config, last, sender))
    process.start()
    sender.close()
    process.join()
    return process.exitcode, receiver
