"""Weights & Biases: its run across resumes, and a server that is away, refuses, hangs or ends during a run."""

import gzip
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatfm.errors import MegatfmError, UsageError
from megatfm.tracking import metrics
from megatfm.tracking.metrics import MetricsLog, RunInfo

PROJECT = {"id": "p", "name": "proof", "entity": {"id": "e", "name": "me"}}


def answer_query(name: str, variables: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The data of a GraphQL query by its name; an error for those that a run can do without."""
    bucket = {"id": "b", "name": variables.get("name"), "displayName": "run", "project": PROJECT}
    files = [{"name": file, "uploadUrl": f"{url}/upload"} for file in variables.get("files", ())]
    answers = {
        "Viewer": {"viewer": {"id": "v", "entity": "me", "flags": "{}", "username": "me", "teams": {"edges": []}}},
        "RunResumeStatus": {"model": {**PROJECT, "bucket": None}},
        "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}},
    }
    return {"data": answers[name]} if name in answers else {"errors": [{"message": "unknown"}]}


@contextmanager
def serve_wandb(outage: str) -> Iterator[str]:
    """Serve at the URL that is yielded, until someone gets `/outage`. outage: "refuses", "hangs" or "fails" then."""
    is_out, is_over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if is_out.is_set():
                self.fail()
                return
            answer: dict[str, Any] = {}
            if self.path == "/graphql":
                query = json.loads(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                answer = answer_query(str(query.get("operationName")), query.get("variables") or {}, url)
            self.reply(200, json.dumps(answer).encode())

        do_PUT = do_POST

        def do_GET(self) -> None:
            if self.path == "/outage":
                self.reply(200, b"")
                is_out.set()
            else:
                self.do_POST()

        def fail(self) -> None:
            if outage == "hangs":
                is_over.wait()
            elif outage == "fails":
                self.reply(500, b"")
            self.close_connection = True

        def reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_wandb_missing_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'megatfm\[wandb\]'"):
        MetricsLog(RunInfo(tmp_path), ["wandb"])


WANDB_RUN = """
import sys
from pathlib import Path
from megatfm.tracking.metrics import MetricsLog, RunInfo

first_step, last = int(sys.argv[2]), int(sys.argv[3])
run = RunInfo(Path(sys.argv[1]), first_step, config={"train": {"seed": 7}}, wandb_project="proof")
log = MetricsLog(run, ["wandb"])
for step in range(first_step + 1, last + 1):
    log.write({"step": step, "loss": float(step), "evaluation": {"code": {"loss": 0.5}}})
log.close()
"""


def wandb_records(file: Path) -> tuple[str, list[dict[str, str]]]:
    """The run's id and its history, read back from the file that `wandb sync` would send.

    It is LevelDB's log format: a header of 7 bytes, then records of checksum, length, type and payload; files
    as small as these are one block of whole records.
    """
    from wandb.proto import wandb_internal_pb2

    content, offset, run_id, history = file.read_bytes(), 7, "", []
    while offset < len(content):
        size, kind = struct.unpack_from("<HB", content, offset + 4)
        assert kind == 1
        record = wandb_internal_pb2.Record.FromString(content[offset + 7 : offset + 7 + size])
        offset += 7 + size
        if record.HasField("run"):
            run_id = record.run.run_id
        if record.HasField("history"):
            history.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return run_id, history


def test_wandb_resumes_the_same_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")
    run = tmp_path / "run"
    for first, last in ((0, 3), (2, 5)):
        completed = subprocess.run(
            [sys.executable, "-W", "error", "-c", WANDB_RUN, str(run), str(first), str(last)],
            env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stderr
        assert "WARNING" not in completed.stderr
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    (first_id, first_half), (second_id, second_half) = (wandb_records(file) for file in files)
    assert first_id == second_id == (run / "wandb-id").read_text()
    assert [row["step"] for row in first_half] == ["1", "2", "3"]
    assert [(row["step"], row["train/loss"]) for row in second_half] == [("3", "3"), ("4", "4"), ("5", "5")]
    assert second_half[0]["evaluation/code/loss"] == "0.5"


def test_a_wandb_usage_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UsageError) as caught:
        MetricsLog(RunInfo(tmp_path), ["wandb"])
    assert str(caught.value) == ("W&B: No API key configured. Use `wandb login` to log in, or set WANDB_MODE=offline")


def test_unreachable_wandb_is_tried_once_then_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")
    requested: list[str | None] = []

    class Offline:
        def define_metric(self, *_: object, **__: object) -> None: ...
        def finish(self) -> None: ...

    def away(mode: str | None = None, **_: object) -> Offline:
        requested.append(mode)
        if mode != "offline":
            raise wandb.errors.CommError("Run initialization has timed out\nafter 90 s")
        return Offline()

    monkeypatch.setattr(wandb, "init", away)
    monkeypatch.setattr(metrics.WeightsAndBiases, "is_unreachable", False)
    for _ in range(2):
        MetricsLog(RunInfo(tmp_path), ["wandb"]).close()
    assert requested == [None, "offline", "offline"]
    (message,) = caplog.messages
    assert "W&B can't be reached (Run initialization has timed out after 90 s)" in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"two words", b"a/b", "café".encode(), b"a" * 129])
def test_a_file_that_holds_no_wandb_id_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("began another run"))
    (tmp_path / "wandb-id").write_bytes(content)
    with pytest.raises(MegatfmError, match=rf"^{tmp_path}/wandb-id: not the id of a W&B run: .* delete the file"):
        MetricsLog(RunInfo(tmp_path), ["wandb"])


KILL_WANDB = """
import psutil
for child in psutil.Process().children(recursive=True):
    child.kill()
for step"""


def test_training_goes_on_when_wandb_s_process_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")
    completed = subprocess.run(
        [sys.executable, "-c", WANDB_RUN.replace("\nfor step", KILL_WANDB), str(tmp_path), "0", "40"],
        env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("W&B has stopped (ConnectionResetError") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 40


OUTAGE = """
from megatfm.tracking import metrics
metrics.WeightsAndBiases.FINISH_SECONDS = 1.0
import urllib.request
urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/outage")
for step"""
OUTAGES = ("refuses", "hangs", "fails")
InterruptedRun = tuple[Path, "subprocess.Popen[str]"]
"""Folder and process."""


@pytest.fixture(scope="module")
def interrupted_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, InterruptedRun]]:
    """A run for each outage, in which its server ends so. All run at once: each waits for half a minute."""
    pytest.importorskip("wandb", reason="pip install 'megatfm[wandb]'")
    program = WANDB_RUN.replace("import sys", "import os, sys", 1).replace("\nfor step", OUTAGE)
    with ExitStack() as stack:
        runs = {}
        for outage in OUTAGES:
            folder, url = tmp_path_factory.mktemp(outage), stack.enter_context(serve_wandb(outage))
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(folder), "0", "5"],
                env=os.environ | {"WANDB_MODE": "online", "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            runs[outage] = folder, process
        yield runs


@pytest.mark.extended  # W&B's own process takes half a minute to give up
@pytest.mark.parametrize("outage", OUTAGES)
def test_a_run_ends_when_the_server_of_wandb_is_gone(
    interrupted_runs: Mapping[str, InterruptedRun], outage: str
) -> None:
    """All steps are in metrics.jsonl and in W&B's file on disk, and one warning names it."""
    folder, process = interrupted_runs[outage]
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (warning,) = [line for line in errors.splitlines() if "W&B has stopped (TimeoutError" in line]
    (file,) = folder.glob("wandb/run-*/*.wandb")
    assert f"`wandb sync {file.parent}` sends them" in warning
    assert [row["step"] for row in wandb_records(file)[1]] == ["1", "2", "3", "4", "5"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5
