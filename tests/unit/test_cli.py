"""The command line itself: what it imports to say what there is, and what shells complete."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.cli import COMMANDS, build_parser, main
from megatfm.commands.config import COMPLETION_FILES, completion_script
from megatfm.config import list_presets

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pydantic", "rich", "transformers", "megatfm.launchers", "megatfm.data_prep")
PROGRAM = """
import sys
from megatfm import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as left:
    code = left.code
found = [name for name in {heavy!r} if name in sys.modules]
assert not found, found
sys.exit(code)
"""


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["--version"], 0), ([], 2), (["trian"], 2)])
def test_saying_what_there_is_imports_nothing_heavy(words: list[str], code: int) -> None:
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == code, done.stderr
    if words == ["--help"]:
        assert all(f"    {name}" in done.stdout for name in COMMANDS)


def test_models_and_runs_are_imported_without_the_compiler() -> None:
    """A second of CPU that sampling, evaluating and converting don't need."""
    line = "import megatfm.train.trainer, megatfm.inference, sys; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


@pytest.fixture(scope="module")
def bash_script() -> str:
    return completion_script("bash")


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("la", ["launch"]),
        (
            "launch quickst",
            [
                "quickstart",
                "quickstart-data",
                "quickstart-moe",
                "quickstart-vision",
                "quickstart-vision-data",
            ],
        ),
        ("launch --nproc 2 train.micro", ["train.micro_batch="]),
        ("launch x --reserv", ["--reservation"]),
        ("train optimizer.matrix_", ["optimizer.matrix_lr="]),
        ("prep x read.fol", ["read.folder="]),
        ("config sho", ["show"]),
        ("generate --prom", ["--prompt"]),
        ("train quickstart train.precision = b", ["bf16"]),
        ("train quickstart checkpoint.mode =", ["async", "sync", "runs"]),
        ("train quickstart train.precision=fp8", ["train.precision=fp8", "train.precision=fp8-tensorwise"]),
        ("launch --nproc 2 quickstart parallel.sequence_parallel = t", ["true"]),
        ("verify quickstart data.train = ru", ["runs"]),
        ("verify quickstart data.train=ru", ["data.train=runs"]),
        ("prep quickstart-data tokenizer.kind = word", ["wordpiece"]),
        ("status ru", ["runs", "runs/first", "runs/second"]),
        ("logs runs/f", ["runs/first"]),
        ("compare runs/first runs/s", ["runs/second"]),
        ("generate runs/", ["runs/empty", "runs/first", "runs/second"]),
        ("completion f", ["fish"]),
        ("nonsense x", []),
    ],
)
def test_bash_completes_the_line_with_these_words(
    bash_script: str, tmp_path: Path, line: str, completions: list[str]
) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "runs" / "empty").mkdir()
    words = ["megatfm", *line.split(" ")]
    asks = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _megatfm; echo ${{COMPREPLY[@]}}"
    command = ["bash", "-c", f"{bash_script}\n{asks}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions
    assert done.stderr == ""


@pytest.mark.parametrize("shell", COMPLETION_FILES)
def test_every_shell_knows_every_command(shell: str, bash_script: str) -> None:
    text = bash_script if shell == "bash" else completion_script(shell)
    for word in (*COMMANDS, "quickstart-data", "train.global_batch="):
        assert word in text
    for flag in ("max-tokens", "gpus-per-node"):
        assert (f"-l {flag}" if shell == "fish" else f"--{flag}") in text
    if not shutil.which(shell):
        return  # what is asserted above holds everywhere; the shell's own check where there is one
    done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flags_of_launch_at_train_are_told_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "quickstart", "--nproc", "2"])
    assert ended.value.code == 2
    assert "`megatfm launch CONFIG --nproc …` starts several" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--num-beams", "--beams"])
def test_beams_have_one_name_in_both_commands(flag: str) -> None:
    parser = build_parser()
    assert parser.parse_args(["generate", "RUN", flag, "3"]).num_beams == 3
    assert parser.parse_args(["predict", "RUN", "FILE", flag, "3"]).beams == 3


def test_the_presets_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "presets"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert [line.split()[0] for line in lines] == list_presets()
    assert all(len(line.split()) > 3 and line.endswith(".") for line in lines), lines
