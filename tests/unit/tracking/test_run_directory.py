"""The run directory: its lock, its files, and what a failed run leaves."""

import errno
import json
import multiprocessing
import os
import secrets
import shutil
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megatfm import tokenizers
from megatfm.config import Config, load_config
from megatfm.errors import LockedError, MegatfmError, UsageError
from megatfm.files import temporary_path
from megatfm.tracking.console import RunLog
from megatfm.tracking.run_directory import RunDirectory
from tests.support.workers import Workers

CPU = torch.device("cpu")


def enter(run: RunDirectory) -> None:
    with run:
        pass


def test_a_run_directory_is_locked_by_one_process(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a", 0):
        with pytest.raises(LockedError, match=rf"/a: another process .* \(process {os.getpid()} on .*\): wait"):
            enter(RunDirectory(tmp_path / "a", 0))
        enter(RunDirectory(tmp_path / "a", 1))  # another rank of the first
        enter(RunDirectory(tmp_path / "b", 0))
    enter(RunDirectory(tmp_path / "a", 0))


def lock_folder(folder: Path, sender: Connection) -> None:
    with RunDirectory(folder, 0):
        sender.send("locked")
        time.sleep(60)


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    holder = context.Process(target=lock_folder, args=(tmp_path, sender))
    holder.start()
    try:
        assert receiver.recv() == "locked"
        with pytest.raises(MegatfmError, match="another process is training"):
            enter(RunDirectory(tmp_path, 0))
        holder.kill()
        holder.join(20)
        enter(RunDirectory(tmp_path, 0))
    finally:
        holder.kill()
        holder.join()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = r"file/a: can't write the run directory: Not a directory: make room there, or give another name"
    with pytest.raises(MegatfmError, match=words):
        enter(RunDirectory(tmp_path / "file" / "a", 0))


def fail_in_run(
    run: RunDirectory, error: Exception, *, steps: int = 0, leave: str | None = None, delay: float = 0
) -> None:
    """Fail as training does: after what is written before the first step, or after some."""
    with run, RunLog(run, steps=1):
        if run.is_main:
            run.write("plan.txt", "a plan")
            run.log_event("started", "seed 0", 0)
        if leave:
            (run.folder / leave).write_text("precious")
        if steps:
            run.keep()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            time.sleep(delay)
        raise error


def fail_on_all_ranks(folder: Path, order: tuple[int, ...]) -> None:
    """The ranks leave one after another."""
    rank = torch.distributed.get_rank()
    with pytest.raises(UsageError, match="no such optimizer"):
        fail_in_run(RunDirectory(folder, rank), UsageError("no such optimizer"), delay=0.1 * order.index(rank))


def test_a_run_refused_before_its_first_step_leaves_no_files(tmp_path: Path, workers: Workers) -> None:
    with pytest.raises(UsageError):
        fail_in_run(RunDirectory(tmp_path / "runs" / "a", 0), UsageError("no such optimizer"))
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        workers.run(fail_on_all_ranks, 3, tmp_path / "runs" / "b", order)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "steps"), [(UsageError("too late"), 1), (MegatfmError("a full disk"), 0), (ValueError("a bug"), 0)]
)
def test_a_run_that_failed_keeps_its_log(tmp_path: Path, error: Exception, steps: int) -> None:
    with pytest.raises(type(error)):
        fail_in_run(RunDirectory(tmp_path / "a", 0), error, steps=steps)
    assert str(error) in (tmp_path / "a" / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "a" / "plan.txt").is_file()


def test_a_refused_run_keeps_files_of_others(tmp_path: Path) -> None:
    """A file that somebody put there meanwhile, and a folder that was there before, where the log tells the reason."""
    with pytest.raises(UsageError):
        fail_in_run(RunDirectory(tmp_path / "a", 0), UsageError("no"), leave="logs/notes")
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["logs", "notes"]
    (tmp_path / "b").mkdir()
    with pytest.raises(UsageError):
        fail_in_run(RunDirectory(tmp_path / "b", 0), UsageError("no such optimizer"))
    assert "ERROR no such optimizer" in (tmp_path / "b" / "logs" / "rank-0.log").read_text()
    with RunDirectory(tmp_path / "b", 0), pytest.raises(LockedError):
        enter(RunDirectory(tmp_path / "b", 0))
    assert (tmp_path / "b" / "plan.txt").is_file()


def test_a_run_that_starts_beside_another_one_leaves_its_folders(tmp_path: Path) -> None:
    """Both found no folder; the other was first with the lock, and hasn't opened its log yet."""
    second = RunDirectory(tmp_path / "a", 0)
    second.new_paths.will_make_folder(second.log_path.parent)
    with RunDirectory(tmp_path / "a", 0):
        with pytest.raises(LockedError):
            enter(second)
        second.new_paths.remove()  # as the command does
        assert (tmp_path / "a" / "logs").is_dir()


@pytest.mark.parametrize("name", ["checkpoints", "logs"])
def test_checkpoints_and_logs_may_be_linked(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    link, target = tmp_path / "run" / name, tmp_path / "disk" / "of-run"
    link.symlink_to(target)
    with pytest.raises(MegatfmError, match=rf"run/{name} is a .*link to a missing folder: create .*/disk/of-run, or"):
        enter(RunDirectory(tmp_path / "run", 0))
    target.mkdir(parents=True)
    caplog.set_level("INFO", logger="megatfm")
    with RunDirectory(tmp_path / "run", 0) as run:
        run.announce_links()
    assert f"run/{name} is a symbolic link to {target}" in caplog.text
    for file in ("config.toml", "lock"):
        enter(RunDirectory(tmp_path / "run", 0))  # a file of that name alone makes no run
        (target.parent / file).touch()
    with pytest.raises(UsageError, match=rf"run/{name} is a symbolic link into another run, {target.parent}, .*: link"):
        enter(RunDirectory(tmp_path / "run", 0))


def test_a_link_within_the_run_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "big").mkdir(parents=True)
    for name in ("config.toml", "lock"):
        (tmp_path / "runs" / "a" / name).touch()
    (tmp_path / "runs" / "a" / "checkpoints").symlink_to("big")
    (tmp_path / "scratch").symlink_to("runs")
    enter(RunDirectory(tmp_path / "scratch" / "a", 0))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.model").write_bytes(b"a tokenizer")
    return load_config("quickstart", ["data.tokenizer=t.model"])


def test_the_run_directory_is_named_by_the_config(tmp_path: Path, config: Config) -> None:
    assert config.run_folder == tmp_path / "runs" / "quickstart"
    assert config.model_copy(update={"run_dir": "/x/y"}).run_folder == Path("/x/y")


def test_a_path_that_is_not_unicode_is_refused(config: Config) -> None:
    with pytest.raises(UsageError, match=r"udcff': a run directory's path must be UTF-8"):
        _ = config.model_copy(update={"run_dir": os.fsdecode(b"/x/\xff")}).run_folder


def test_a_run_writes_its_config_plan_and_environment(tmp_path: Path, config: Config) -> None:
    run = RunDirectory(tmp_path / "a", 0)
    enter(run)
    run.write_run_files(config, "the plan\n", CPU)
    assert load_config(tmp_path / "a") == config.model_copy(update={"run_dir": str(tmp_path / "a")})
    assert json.loads((tmp_path / "a" / "environment.json").read_text())["torch"] == torch.__version__
    assert (tmp_path / "a" / "plan.txt").read_text() == "the plan\n"
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == b"a tokenizer"
    run.write_run_files(config, "another\n", CPU)
    assert (tmp_path / "a" / "plan.txt").read_text() == "another\n"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "config.toml", "environment.json", "lock", "logs", "plan.txt", "tokenizer.model",
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["tokenizer.json", "."])
def test_the_tokenizer_is_copied_with_all_its_files(tmp_path: Path, config: Config, source: str) -> None:
    """A tokenizer.json may need the roles that a file beside it gives to its tokens."""
    (tmp_path / "from").mkdir()
    text = ["def f(x):\n    return x\n" * 20]
    (tmp_path / "from" / "tokenizer.json").write_bytes(tokenizers.train_byte_bpe(text, vocab_size=310))
    (tmp_path / "from" / "tokenizer_config.json").write_text('{"eos_token": "<sep>"}')
    (tmp_path / "from" / "additional_chat_templates").mkdir()
    (tmp_path / "from" / "additional_chat_templates" / "rag.jinja").write_text("rag")
    source = str(tmp_path / "from" / source)
    data = config.data.model_copy(update={"tokenizer": source})
    with RunDirectory(tmp_path / "a", 0) as run:
        run.write_run_files(config.model_copy(update={"data": data}), "the plan", CPU)
    copy, before = tokenizers.load(tmp_path / "a"), tokenizers.load(source)
    assert copy.hash == before.hash
    assert copy.id_to_piece(copy.eos) == "<sep>"
    assert tokenizers.list_chat_templates(tmp_path / "a") == ["additional_chat_templates/rag.jinja"]
    with RunDirectory(tmp_path / "a", 0) as run:  # another tokenizer
        run.write_run_files(config, "the plan", CPU)
    assert tokenizers.list_chat_templates(tmp_path / "a") == []


def test_another_tokenizer_replaces_the_files_of_the_old_one(tmp_path: Path, config: Config) -> None:
    """A run begins anew in its folder, or was allowed to: `generate` needs the tokenizer that trains."""
    run = RunDirectory(tmp_path / "a", 0)
    enter(run)
    run.write_run_files(config, "", CPU)
    for name, content in (("tokenizer.json", b'{"version": "1.0"}'), ("tokenizer.model", b"another")):
        (tmp_path / "new").mkdir(exist_ok=True)
        (tmp_path / "new" / name).write_bytes(content)
        data = config.data.model_copy(update={"tokenizer": str(tmp_path / "new" / name)})
        run.write_run_files(config.model_copy(update={"data": data}), "", CPU)
        assert (tmp_path / "a" / name).read_bytes() == content
        assert len(list((tmp_path / "a").glob("tokenizer*"))) == 1


def test_a_file_of_another_tokenizer_that_cannot_be_removed_is_named(tmp_path: Path, config: Config) -> None:
    run = RunDirectory(tmp_path / "a", 0)
    (tmp_path / "a" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(MegatfmError, match=r"a/tokenizer\.json: belongs to another tokenizer, and can't be removed"):
        run.write_run_files(config, "", CPU)


def test_a_tokenizer_file_that_cannot_be_read_is_named(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "a", 0)
    run.write_run_files(config, "", CPU)
    copy = next((tmp_path / "a").glob("tokenizer*"))
    genuine = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == copy:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return genuine(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(MegatfmError, match=r"a/tokenizer\S*: can't be read: Permission denied: remove it"):
        run.write_run_files(config, "", CPU)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 8)
    run = RunDirectory(tmp_path, 0)
    run.write("plan.txt", "old")
    temporary_path(tmp_path / "plan.txt").mkdir()  # stands for a full disk
    with pytest.raises((MegatfmError, OSError)):
        run.write("plan.txt", "new")
    assert (tmp_path / "plan.txt").read_text() == "old"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("successor", [False, True])
def test_a_moved_run_directory_is_noticed(tmp_path: Path, rank: int, successor: bool) -> None:
    folder = tmp_path / "a"
    with RunDirectory(folder, 0) as first, nullcontext(first) if rank == 0 else RunDirectory(folder, rank) as run:
        run.check_not_moved()
        shutil.rmtree(folder)
        if successor:
            folder.mkdir()
            (folder / "lock").write_text("another's")
        with pytest.raises(MegatfmError, match="removed, moved or replaced during training"):
            run.check_not_moved()
        with pytest.raises(MegatfmError, match="nothing more is written"):
            run.log_failure("it hangs", 3, [1], ["n1"])
    assert [path.name for path in tmp_path.rglob("*")] == (["a", "lock"] if successor else [])
