"""What `megatfm train`, `launch --from` and `estimate` check and say before anything is started."""

import argparse
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from megatfm.cli import main
from megatfm.commands import training
from megatfm.commands.training import enable_expandable_segments
from megatfm.config import load_config
from megatfm.errors import LockedError


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_grows_its_segments_unless_something_is_set(name: str) -> None:
    environment: dict[str, str] = {}
    enable_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = {name: "max_split_size_mb:512"}
    enable_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}


def test_the_config_of_a_run_that_is_under_way_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restarts read it."""
    config = load_config("quickstart", [f"run_dir={tmp_path}"])
    monkeypatch.setattr(training, "load_training_config", lambda *_: config)
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (tmp_path / "launch.json").write_text(json.dumps(note))
    (tmp_path / training.RESOLVED_CONFIG).write_text("of the run\n")
    parser = argparse.ArgumentParser()
    training.add_launch_arguments(parser)
    with pytest.raises(LockedError, match=f"process {os.getpid()} runs this already"):
        training.launch_command(parser.parse_args(["--from", "a-model", "--nproc", "1"]))
    assert (tmp_path / training.RESOLVED_CONFIG).read_text() == "of the run\n"


CONFIG = ("gpt2-124m",)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", *words])
    return int(stop.value.code or 0)


def test_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*CONFIG, "--gpus", "8") == 0
    text = capsys.readouterr().out
    assert "124,439,808 parameters, on 8 × NVIDIA H100" in text
    assert "fits:" in text
    assert "matrix products" in text


def test_a_run_that_does_not_fit_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("gpt2-xl", "--gpus", "4", "--device", "a100-40gb", "train.micro_batch=16", "parallel.zero=0") == 1
    )
    text = capsys.readouterr().out
    assert "DOES NOT FIT: every rank needs" in text
    assert "fits with" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*CONFIG, "--gpus", "2", "--json") == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["step_seconds"] == pytest.approx(sum(parsed["causes"].values()))
    assert parsed["memory"][0]["total"] > 2**30


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--device", "h1000"), "did you mean 'h100'"),
        (("--gpus", "0"), "--gpus 0"),
        (("--gpus", "3", "parallel.tp=2"), "does not fit 3 processes"),
        (
            (
                "--gpus",
                "7",
            ),
            "is not a multiple of micro-batches",
        ),
        (("--device", "a100", "train.precision=fp8"), "has no fp8"),
        (("parallel.engine=deepspeed", "parallel.zero=1"), "estimates are of the native engine"),
        (("--hardware", "missing.toml"), "can't be read"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*CONFIG, *words) == 2
    assert text in capsys.readouterr().err


def test_hardware_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text('[device.mine]\nextends = "h100"\nname = "My GPU"\nmemory_gib = 4.0\n', encoding="utf-8")
    assert run(*CONFIG, "--gpus", "2", "--hardware", str(path), "--device", "mine") == 1
    assert "My GPU" in capsys.readouterr().out
    path.write_text('[device.mine]\nname = "My GPU"\n', encoding="utf-8")
    assert run(*CONFIG, "--hardware", str(path), "--device", "mine") == 2
    assert "missing" in capsys.readouterr().err
