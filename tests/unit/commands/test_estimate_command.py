"""`megatfm estimate`: verdicts, exit codes, and what is refused."""

import json
from pathlib import Path

import pytest

from megatfm.cli import main

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
