"""A run's record beside its estimate: messages, snapshots, and files that lie."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from megatfm.cli import main
from megatfm.config import load_config, to_toml
from megatfm.errors import UsageError
from megatfm.estimate.recorded import device_of, read_recorded, snapshot_owners

FRAMES = [
    {"filename": "/usr/lib/torch/nn/functional.py", "line": 1, "name": "linear"},
    {"filename": "/opt/megatfm/layers/feed_forward.py", "line": 88, "name": "forward"},
]
SNAPSHOT = {
    "segments": [
        {
            "blocks": [
                {"state": "active_allocated", "size": 3 << 30, "frames": FRAMES},
                {"state": "inactive", "size": 9 << 30, "frames": FRAMES},
                {"state": "active_pending_free", "size": 1 << 20, "frames": []},
            ]
        }
    ]
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of GPT-2 on 8 H100s whose rank 5 ran out of memory."""
    config = load_config("gpt2-124m", ["train.micro_batch=64"])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "processes": "8", "machines": "1"}
    (tmp_path / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    steps = [
        {"step": n, "tokens": n, "loss": 2.0, "memory_bytes": n << 30, "step_seconds": 0.5} for n in (1, 2)
    ]
    lines = "".join(f"{json.dumps(step)}\n" for step in steps)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "logs").mkdir()
    message = (
        "error: rank 5 is out of memory: it held 77.3 GiB and asked for 2.50 GiB more; memory snapshot: …\n"
    )
    (tmp_path / "logs" / "rank-5.log").write_text("…\n" * 9 + message, encoding="utf-8")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "rank-5.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    return tmp_path


def test_a_run_that_ran_out_of_memory_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain-oom", str(run)])
    shown, errors = capsys.readouterr()
    assert ended.value.code == 0, errors
    assert "on 8 × NVIDIA H100 SXM 80 GB" in shown
    assert "recorded: 2.00 GiB on rank 0 in step 2" in shown
    assert "rank 5 held 77.30 GiB and asked for 2.50 GiB more; predicted for it:" in shown
    assert "3.000 GiB  layers/feed_forward.py:88" in shown
    assert all(phase in shown for phase in ("forward", "backward", "optimizer"))
    assert "fits with train.recompute=full" in shown


def test_the_device_is_the_one_of_the_run(run: Path) -> None:
    recorded = read_recorded(run)
    assert device_of(recorded) == "h100"
    assert recorded.step_seconds == 0.5
    for name, expected in (
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("none", None),
    ):
        facts = {"gpu": name, "processes": "8", "machines": "1"}
        (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
        assert device_of(read_recorded(run)) == expected


def test_a_cpu_has_to_be_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "environment.json").write_text('{"gpu": "none"}', encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["explain-oom", str(run)])
    assert "ran on a CPU, which is in no table of devices: name one with --device" in capsys.readouterr().err


def test_the_memory_of_a_runs_tensors_does_not_depend_on_who_computed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on a CPU has no CUDA, whose memory the estimate on a GPU reserves."""
    predicted = []
    for gpu in ("NVIDIA H100 80GB HBM3", "none"):
        facts = {"gpu": gpu, "processes": "8", "machines": "1"}
        (run / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
        with pytest.raises(SystemExit):
            main(["explain-oom", str(run), "--device", "h100"])
        output = capsys.readouterr().out
        predicted += re.findall(r"predicted for its tensors: ([\d.]+)\n", output)
        assert ("Python and its libraries included" in output) == (gpu == "none")
    assert len(predicted) == 2
    assert predicted[0] == predicted[1]


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Command()), b"", b"\x80\x04N.", pickle.dumps({"segments": 3})]
)
def test_a_file_that_lies_is_no_snapshot(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank-0.pickle").write_bytes(content)
    with pytest.raises(UsageError, match="not a memory snapshot of torch"):
        snapshot_owners(tmp_path / "rank-0.pickle")
    assert not (tmp_path / "ran").exists()


def test_the_report_has_the_estimate_beside_what_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert ended.value.code == 0, capsys.readouterr().err
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Estimated and measured" in page
    assert "<td>step, s</td><td>0.5</td>" in page
