"""The command line: what it imports to say what there is, what shells complete, narrow terminals."""

import io
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from megatfm.cli import COMMANDS, build_parser
from megatfm.commands.completion import COMPLETION_FILES, make_completion_script
from megatfm.config import load_config, to_toml
from megatfm.terminal import print_table, spell_unencodable
from tests.support.forked_commands import run_command

ROOT = Path(__file__).parents[2]
STOP_SIGNALS = {signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP}
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert completed.returncode == code, completed.stderr
    if words == ["--help"]:
        assert all(f"    {name}" in completed.stdout for name in COMMANDS)


def test_models_and_runs_are_imported_without_the_compiler_and_training_without_deepspeed() -> None:
    """A second of CPU that sampling, evaluating and converting don't need; a library that few have."""
    code = (
        "import sys; from megatfm.optim.parameters import OPTIMIZERS; print(*OPTIMIZERS.names())\n"
        "import megatfm.train.run, megatfm.inference\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import megatfm.engines.registry, megatfm.engines.native.engine\n"
        "assert 'deepspeed' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    optimizers = ["adafactor", "adamw", "lamb", "lion", "muon", "schedule_free_adamw", "soap"]
    assert run.stdout.split() == optimizers, "whatever is imported first, all are registered"


@pytest.fixture(scope="module")
def bash_script() -> str:
    return make_completion_script("bash")


@pytest.mark.parametrize(("line", "completions"), [
    ("la", ["launch"]),
    ("launch quickst",
     ["quickstart", "quickstart-data", "quickstart-moe", "quickstart-vision", "quickstart-vision-data"]),
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
])  # fmt: skip
def test_bash_completes_a_line_with_words(bash_script: str, tmp_path: Path, line: str, completions: list[str]) -> None:
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "runs" / "empty").mkdir()
    words = ["megatfm", *line.split(" ")]
    asks = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _megatfm; echo ${{COMPREPLY[@]}}"
    command = ["bash", "-c", f"{bash_script}\n{asks}"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == completions
    assert completed.stderr == ""


@pytest.mark.parametrize("shell", COMPLETION_FILES)
def test_completion_of_every_shell_has_every_command(shell: str, bash_script: str) -> None:
    text = bash_script if shell == "bash" else make_completion_script(shell)
    for word in (*COMMANDS, "quickstart-data", "train.global_batch="):
        assert word in text
    for flag in ("max-tokens", "gpus-per-node"):
        assert (f"-l {flag}" if shell == "fish" else f"--{flag}") in text
    if not shutil.which(shell):
        return  # what is asserted above holds everywhere; the shell's own check where there is one
    completed = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_flags_of_launch_at_train_are_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", "quickstart", "--nproc", "2") == 2
    assert "`megatfm launch CONFIG --nproc …` starts several" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    ([], "usage: megatfm"),
    (["help"], "COMMAND = 'help': there is none (did you mean '--help'?)"),
    (["version"], "COMMAND = 'version': there is none (did you mean '--version'?)"),
    (["generate", "RUN", "hello"], "unknown argument: hello: `megatfm generate --help` lists those that there are"),
    (["config", "show"], "the following arguments are required: CONFIG\n"),
])  # fmt: skip
def test_a_first_command_that_is_wrong_names_the_way_to_the_list(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*words) == 2
    output = capsys.readouterr().err
    assert message in output
    assert ("quickstart" in output) == (not words or words[0] in ("help", "version"))


@pytest.mark.parametrize("flag", ["--num-beams", "--beams"])
def test_beams_have_one_name_in_both_commands(flag: str) -> None:
    parser = build_parser()
    assert parser.parse_args(["generate", "RUN", flag, "3"]).num_beams == 3
    assert parser.parse_args(["predict", "RUN", "FILE", flag, "3"]).beams == 3


# -------------------------------------------------------------------------------------------------- terminals


PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "40", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which has a name in characters that ASCII lacks."""
    folder = tmp_path_factory.mktemp("terminal")
    for name, steps in (("a-name-longer-than-half-a-terminal", 10), ("数据", 20)):
        (folder / "runs" / name).mkdir(parents=True)
        words = [f"train.steps={steps}", "lr_schedule.warmup_steps=5", "model.vocab_size=400"]
        config = load_config("quickstart", words)
        (folder / "runs" / name / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--help"], 0, "-> tokens -> shards"),
    (["verify", "--help"], 0, "NAME,..."),
    (["compare", "runs/a-name-longer-than-half-a-terminal", "runs/数据"], 2, "must be UTF-8"),
    (["compare", *["runs/a-name-longer-than-half-a-terminal"] * 2], 0, "MFU\n  a-name"),
    (["status"], 0, "run: a-name-longer-than-half-a-terminal\n  state: ENDED"),
    (["report", "runs/数据"], 2, "must be UTF-8"),
    (["config", "show", "…"], 2, "…: no such config file or preset"),
], ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "")  # fmt: skip
def test_no_command_fails_for_what_a_terminal_lacks(folder: Path, words: list[str], code: int, message: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "megatfm", *words],
        cwd=folder, env={**os.environ, **PLAIN}, capture_output=True, check=False,
    )  # fmt: skip
    text = (completed.stdout + completed.stderr).decode()
    assert completed.returncode == code, text
    assert "Traceback" not in text
    assert message in text


OPEN_A_FILE = """
import os
from megatfm.cli import main
try:
    main(["--version"])
except SystemExit as left:
    assert left.code == 0
os._exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_with_closed_streams_and_no_file_takes_their_numbers(closed: str) -> None:
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, OPEN_A_FILE]
    completed = subprocess.run(shell, cwd=ROOT, capture_output=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, b"")


@pytest.mark.parametrize(("words", "are_blocked"), [
    (["train"], True), (["finetune"], True), (["finetune", "--prepare"], False), (["status"], False),
])  # fmt: skip
def test_stop_signals_wait_for_training_alone(words: list[str], are_blocked: bool) -> None:
    """Nothing else would ever handle them. Ignored ones stay so: SIGHUP under nohup."""
    handled = {number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        run_command(*words, "nowhere")
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert STOP_SIGNALS & blocked == (handled if are_blocked else set())


FULL = "can't be written: No space left on device: make room, or write it elsewhere"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize(("words", "full", "code", "message"), [
    ("config presets", ">/dev/full", 1, f"error: the output {FULL}\n"),
    ("config presets", ">/dev/full 2>&1", 1, ""),
    ("status nowhere", "2>/dev/full", 2, ""),
])  # fmt: skip
def test_output_to_a_full_disk_is_an_error_in_one_line(words: str, full: str, code: int, message: str) -> None:
    shell = ["sh", "-c", f'exec "$0" -m megatfm {words} {full}', sys.executable]
    completed = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (code, message)


def test_output_to_a_terminal_that_was_closed_is_dropped() -> None:
    program = "import sys; from megatfm.terminal import *; input(); mute_closed_streams(); print('x', flush=True)"
    other_end, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=terminal, stderr=subprocess.PIPE
    )
    os.close(terminal)
    os.close(other_end)
    assert process.communicate(b"\n", timeout=60) == (None, b"")
    assert process.returncode == 0


def test_characters_are_spelled_and_names_of_files_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("ascii", b"2 x 3 -> ? \xe6"), ("utf-8", "2 × 3 → 数 ".encode() + b"\xe6")):
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding, errors="strict"))
        spell_unencodable()
        print("2 × 3 → 数 \udce6", end="", flush=True)
        assert output.getvalue() == expected


@pytest.mark.parametrize("width", [20, 38, 42, 80])
def test_a_table_is_a_list_where_it_would_be_cut(width: int) -> None:
    cells = [["first", "1,234,567", "of many words"], ["a second row", "", "[x] is no markup"]]
    table = Table("", "a number", "text", title="A table", box=None, pad_edge=False)
    for row in cells:
        table.add_row(*row)
    output = io.StringIO()
    print_table(table, Console(file=output, width=width, force_terminal=True, color_system=None, markup=False))
    text = output.getvalue()
    longest = 12 + 1 + 9 + 1 + 16  # of each column, and a space between
    assert all(cell in text for row in cells for cell in row), text
    assert ("  a number: 1,234,567\n" in text) == (width < longest), text
