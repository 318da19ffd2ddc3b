"""Corpora from URLs and to URLs: the same as from folders and to folders, whatever breaks off on the way."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest

from megatfm import data_prep
from megatfm.config.prep import PrepConfig, ReadConfig
from megatfm.corpus import remote
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.remote import RemoteFolder
from megatfm.data_prep.execution.upload import RemoteOutput
from megatfm.data_prep.input_files import InputFiles
from megatfm.errors import MegatfmError, UsageError
from tests.support.packed_corpora import serve_s3, use_s3
from tests.support.prep_files import StoppedError, run_tasks, stop_before_commit, write_file


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serve_s3() as address:
        yield address


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket there, and its file system."""
    use_s3(endpoint, monkeypatch)
    fs = fsspec.filesystem("s3")
    fs.mkdir("prep-bucket")
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    yield fs
    fs.invalidate_cache()
    fs.rm("prep-bucket", recursive=True)
    fs.clear_instance_cache()


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system of this process, whose bucket is removed after the test."""
    fs = fsspec.filesystem("memory")
    yield fs
    if fs.exists("/bucket"):
        fs.rm("/bucket", recursive=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of a few formats, with names to be left out, and one that a URL spells otherwise."""
    root = tmp_path / "small"
    lines = [json.dumps({"text": f"A line number {n} of some words. " * 9}) for n in range(60)]
    write_file(root / "a" / "lines.jsonl", "\n".join(lines).encode())
    for n in range(12):
        write_file(root / "b" / f"text {n}#é.txt", (f"Another text, with number {n}, is here. " * 40).encode())
    write_file(root / "a.txt", b"a folder comes before a file of a longer name\n" * 9)
    write_file(root / ".hidden" / "x.txt", b"never read")
    write_file(root / "tests" / "y.txt", b"left out")
    return root


SETTINGS: dict[str, Any] = {
    "split": {"validation": 0.1},
    "tokenizer": {"kind": "byte-bpe", "vocab_size": 300, "sentinels": 0, "ul2_modes": False},
}


def make_config(folder: str, out: str, scratch: Path, **more: Any) -> PrepConfig:
    values = {
        "out": out, "read": {"folder": folder, "exclude": ["tests"]}, "scratch": str(scratch), **SETTINGS,
    }  # fmt: skip
    return PrepConfig.model_validate({**values, **more})


def read_remote_files(fs: Any, place: str) -> dict[str, bytes]:
    fs.invalidate_cache()
    return {path.removeprefix(f"{place}/"): fs.cat(path) for path in fs.find(place)}


def read_local_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def without_place(files: dict[str, bytes]) -> dict[str, Any]:
    """All but the report and what says where the text was read: they name the folder."""
    return {
        name: json.dumps({**json.loads(data), "provenance": 0, "config": 0}).encode()
        if name.endswith(".json")
        else data
        for name, data in files.items()
        if name != "report.html"
    }


def test_from_a_bucket_to_a_bucket_is_what_folders_give(s3: Any, small: Path, tmp_path: Path) -> None:
    s3.put(str(small), "prep-bucket/in", recursive=True)
    local = data_prep.run(make_config(str(small), str(tmp_path / "out"), tmp_path))
    url, scratch = "s3://prep-bucket/corpora/mine", tmp_path / "scratch"
    summary = data_prep.run(make_config("s3://prep-bucket/in", url, scratch))
    assert summary.out == url
    assert not any(scratch.iterdir()), "nothing is left here"
    uploaded, written = read_remote_files(s3, "prep-bucket/corpora/mine"), read_local_files(tmp_path / "out")
    assert without_place(uploaded) == without_place(written)
    assert Corpus.open(f"{url}/train").fingerprint == local.result["train"]["fingerprint"]
    assert data_prep.run(make_config("s3://prep-bucket/in", url, scratch)).already_done
    with pytest.raises(UsageError, match=rf"{url}: was prepared with another config \(split.seed"):
        data_prep.run(make_config("s3://prep-bucket/in", url, scratch, split={"validation": 0.1, "seed": 1}))
    s3.pipe("prep-bucket/corpora/mine/notes.txt", b"mine")
    repeated = data_prep.run(make_config("s3://prep-bucket/in", url, scratch, overwrite=True))
    assert repeated.result == summary.result
    assert read_remote_files(s3, "prep-bucket/corpora/mine")["notes.txt"] == b"mine", "what no prep made stays"


def test_a_kill_at_any_upload_loses_nothing(
    memory: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prep is killed once before each file is sent, and once after it was sent and before that is recorded."""
    put, sent, killed = RemoteFolder.upload, list[str](), set[tuple[str, str]]()

    def fall(name: str, when: str) -> None:
        if (name, when) not in killed:
            killed.add((name, when))
            raise StoppedError

    def falling(self: RemoteFolder, path: Path, name: str) -> Any:
        fall(name, "before")
        sent.append(name)
        actual = put(self, path, name)
        fall(name, "after")
        return actual

    monkeypatch.setattr(RemoteFolder, "upload", falling)
    config = make_config(str(small), "memory://bucket/out", tmp_path / "scratch")
    for _ in range(50):
        try:
            summary = data_prep.run(config)
            break
        except StoppedError:
            assert not memory.exists("/bucket/out/prep.json") or "prep.json" in sent
    assert len(killed) == 2 * len(set(sent)) > 20
    assert max(map(sent.count, sent)) == 2, "what was noted is not sent again"
    monkeypatch.setattr(RemoteFolder, "upload", put)
    local = data_prep.run(make_config(str(small), str(tmp_path / "out"), tmp_path))
    for name in ("train", "validation"):
        assert summary.result[name] == local.result[name]
    assert without_place(read_remote_files(memory, "/bucket/out")) == without_place(read_local_files(tmp_path / "out"))


def test_several_machines_share_the_work_by_a_shared_folder(
    memory: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {f"task-{number}": f"node-{number}" for number in (1, 2, 3)}
    monkeypatch.setattr("socket.gethostname", lambda: hosts.get(threading.current_thread().name, "node-9"))
    run_tasks(make_config(str(small), "memory://bucket/out", tmp_path / "scratch", task_bytes=2**10), 3)
    data_prep.run(make_config(str(small), str(tmp_path / "out"), tmp_path))
    assert without_place(read_remote_files(memory, "/bucket/out")) == without_place(read_local_files(tmp_path / "out"))


@pytest.mark.usefixtures("memory")
def test_a_second_machine_needs_to_see_the_work(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stop_before_commit("finish"):
        data_prep.run(make_config(str(small), "memory://bucket/out", tmp_path / "scratch"))
    monkeypatch.setattr("socket.gethostname", lambda: "node-2")
    with pytest.raises(UsageError, match=r"a prep began here on .*scratch is a folder that all of them see"):
        data_prep.run(make_config(str(small), "memory://bucket/out", tmp_path / "elsewhere"))
    assert not data_prep.run(make_config(str(small), "memory://bucket/out", tmp_path / "scratch")).already_done


class Pages(http.server.SimpleHTTPRequestHandler):
    """A server that lists folders, with a link to what is above, and breaks off in every third answer."""

    protocol_version = "HTTP/1.0"
    asked: tuple[str, ...] = ()

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            names = [quote(path.name) + "/" * path.is_dir() for path in path.iterdir()]
            links = "".join(f'<a href="{name}">x</a>' for name in ["/", "../", "?C=N;O=D", *names])
            self.answer(links.encode(), {"Content-Type": "text/html"})
            return
        data = path.read_bytes()
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(begin) : int(end or len(data)) + 1]
        Pages.asked = (*Pages.asked, begin)
        span = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}"
        self.send_response(206)
        for name, value in {
            "Content-Length": str(len(part)),
            "Content-Range": span,
            "Accept-Ranges": "bytes",
            "ETag": '"1"',
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(part[: len(part) // (1 + (len(self.asked) % 3 == 2))])

    def do_HEAD(self) -> None:
        path = Path(self.translate_path(self.path))
        headers = {"Content-Type": "text/html"} if path.is_dir() else {"Accept-Ranges": "bytes", "ETag": '"1"'}
        self.answer(b"" if path.is_dir() else path.read_bytes(), headers, body=False)

    def answer(self, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def web(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    write_file(small / "above.txt", b"")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=small)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_web_pages_are_listed_and_an_interrupted_read_resumes(
    web: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    input_files = InputFiles(ReadConfig(folder=f"{web}/b"), tmp_path)
    names = [file.name for file in input_files.files]
    assert names == sorted(f"text {n}%23é.txt" for n in range(12)), "nothing above it"
    (one,) = InputFiles(ReadConfig(folder=f"{web}/a/lines.jsonl"), tmp_path).files
    assert one.name == "lines.jsonl"
    data = bytes(range(256)) * 1000
    (small / "large.bin").write_bytes(data)
    place = RemoteFolder(web)
    monkeypatch.setattr(remote, "CHUNK_BYTES", 2**12)
    file = place.stat("large.bin")
    assert file is not None
    Pages.asked = ()
    place.download(file, tmp_path / "large.bin")
    assert (tmp_path / "large.bin").read_bytes() == data
    assert len(Pages.asked) > 9
    assert Pages.asked.count("0") == 1, "it went on where it was, and did not begin anew"


def test_remote_files_that_change_or_cannot_be_written_are_named(
    memory: Any, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/bucket/a.txt", b"one")
    place = RemoteFolder("memory://bucket")
    (file,) = place.list_files()
    memory.pipe("/bucket/a.txt", b"two")
    with pytest.raises(MegatfmError, match=r"memory://bucket: a\.txt changed while it was read: run the same"):
        place.download(file, tmp_path / "a.txt")
    assert not list(tmp_path.glob(".a.txt*"))
    with pytest.raises(ValueError, match="nothing can be written over HTTP: choose a folder"):
        make_config(str(small), "https://example.org/out", tmp_path)
    with pytest.raises(UsageError, match=r"memory://bucket: holds 'a.txt', which no prep made"):
        data_prep.run(make_config(str(small), "memory://bucket", tmp_path / "scratch"))

    def refuse(*_: Any, **more: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(memory.__class__, "put_file", refuse)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    (tmp_path / "b.txt").write_bytes(b"whole")
    with pytest.raises(UsageError, match=r"memory://bucket: b\.txt can't be written: memory:// has no way"):
        place.upload(tmp_path / "b.txt", "b.txt")
    torn = lambda self, local, destination, **_: self.pipe(destination, b"torn!")  # noqa: E731
    monkeypatch.setattr(memory.__class__, "put_file", torn)
    with pytest.raises(MegatfmError, match=r"b\.txt can't be written \(OSError: what arrived is not what was sent"):
        place.upload(tmp_path / "b.txt", "b.txt")


def test_an_upload_gets_another_name_where_it_shows_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, names = RemoteFolder(f"file://{tmp_path}/out"), list[str]()
    local_files = fsspec.filesystem("file").__class__
    put = local_files.put_file

    def put_file(self: Any, local: str, destination: str, **more: Any) -> None:
        names.append(Path(destination).name)
        put(self, local, destination, **more)

    monkeypatch.setattr(local_files, "put_file", put_file)
    (tmp_path / "x").write_bytes(b"data")
    place.upload(tmp_path / "x", "train/x")
    assert names == [".x.partial"]
    assert [file.name for file in place.list_files()] == ["train/x"]


def test_an_upload_in_parts_is_known_by_its_checksum(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)
    data = bytes(range(251)) * 50_000
    (tmp_path / "x").write_bytes(data)
    monkeypatch.setattr(remote, "_has_same_content", lambda *_: pytest.fail("the checksum tells"))
    uploaded = RemoteFolder("s3://prep-bucket").upload(tmp_path / "x", "x")
    assert uploaded.version.strip('"').endswith("-3")
    assert s3.cat("prep-bucket/x") == data


@pytest.mark.parametrize("data", [b"[1]", b"\xff{", b"[" * 100_000], ids=["a list", "no text", "deep"])
def test_a_foreign_file_under_prep_s_names_is_one_line(data: bytes, memory: Any, tmp_path: Path) -> None:
    memory.pipe("/bucket/.prep-begun.json", data)
    away = RemoteOutput("memory://bucket", tmp_path, tmp_path / "notes", ())
    with pytest.raises(UsageError, match=r"^memory://bucket: \.prep-begun\.json is not what a prep writes: .*$"):
        away.start(overwrite=False)
