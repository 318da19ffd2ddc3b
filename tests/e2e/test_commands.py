"""The commands as a user types them, in processes that are forked (tests/support/forked_commands.py)."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm import cli
from megatfm.commands import quickstart
from megatfm.errors import EXIT_OK
from tests.support.forked_commands import ForkedCommand, keep_last_override, run_megatfm
from tests.support.small_runs import SMALL_CONFIG
from tests.support.training_runs import run_training, training_curve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped by a signal to the launcher, and resumed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
    validation = f"data.validation={{held-out='{corpus}/validation'}}"
    settings = ["run_dir=run", validation, "evaluate.max_rows=0", "evaluate.every=1000", "checkpoint.every=1000"]
    words = ["launch", "small.toml", "--nproc", "2", *settings]
    launch = ForkedCommand([*words, "train.steps=300"], folder / "said", folder)
    launch.wait_for_lines(folder / "run/metrics.jsonl", 3)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.wait(60) == 75, launch.output
    stopped_at = len(training_curve(folder / "run"))
    assert 3 <= stopped_at < 300
    more = [f"train.steps={stopped_at + 3}", 'resume.allow=["schedule"]']
    output = run_megatfm(*words, *more, output=folder / "said again", cwd=folder)
    assert "Traceback" not in output
    assert "Warning" not in output
    assert [line["step"] for line in training_curve(folder / "run")] == list(range(1, stopped_at + 4))
    return folder / "run"


def test_a_trained_run_generates_evaluates_and_exports(trained, tmp_path):
    output = tmp_path / "said"
    sampled = run_megatfm("generate", trained, "--prompt", "def ", "--max-tokens", 20, "--seed", 1, output=output)
    assert sampled.startswith("def ")
    assert "bits per byte" in run_megatfm("evaluate", trained, "--baselines", output=output)
    results = json.loads((trained / "evaluation.json").read_text())["sets"]
    in_training = training_curve(trained)[-1]["evaluation"]
    for name, result in results.items():
        assert result["bits_per_byte"] == pytest.approx(in_training[name]["bits_per_byte"], rel=1e-5)
    baselines = json.loads((trained / "baselines.json").read_text())["held-out"]
    assert set(baselines) == {f"{tool} -9, {way}" for tool in ("gzip", "xz") for way in ("per document", "joined")}
    assert baselines["xz -9, joined"] < baselines["gzip -9, joined"] < baselines["gzip -9, per document"]
    run_megatfm("report", trained, output=output)
    page = (trained / "report.html").read_text()
    assert "held-out" in page
    assert "def " in page


def test_the_quickstart_on_a_folder_of_ones_own(texts, tmp_path):
    """On one process; `trained` is stopped and resumed on two."""
    tiny = [
        "model.d_model=32", "model.ffn.d_ff=64", "model.n_layers=1", "data.sequence_length=64", "train.global_batch=8",
        "train.micro_batch=4", "train.steps=40", "evaluate.every=1000",
    ]  # fmt: skip
    message = run_megatfm("quickstart", "--nproc", 1, "--corpus", texts, *tiny, output=tmp_path / "said", cwd=tmp_path)
    assert "Traceback" not in message
    assert "Warning" not in message
    stages = [line for line in message.splitlines() if line.startswith("$ megatfm ")]
    assert [stage.split()[2] for stage in stages] == [
        *("prep", "launch", "launch", "generate", "generate", "evaluate", "report")
    ]
    for output in ("bits per byte", "gzip -9, per document", "xz -9, joined", "tokens/s", "report.html", "Next"):
        assert output in message[message.index("Results") :]
    run = tmp_path / "runs/quickstart-my-texts"
    assert [line["step"] for line in training_curve(run)] == list(range(1, 41))
    assert (run / "report.html").is_file()
    assert "stopped" in (run / "events.jsonl").read_text()
    with subprocess.Popen(["true"]) as started_again:
        assert not quickstart._wait_for_step(started_again, run, 20), "it would be stopped again"
    last_command = shlex.split(message.splitlines()[-1])
    script = run_megatfm(*last_command[1:], output=tmp_path / "job", cwd=tmp_path)
    assert "#SBATCH --nodes=2" in script
    assert "would be refused" not in script


TUTORIALS = {
    "README.md": ["prep", "launch", "generate", "evaluate", "report"],
    "docs/quickstart.md": ["prep", "launch", "generate", "evaluate", "report"],
    "docs/tutorials/pretrain-on-your-data.md": ["prep", "prep", "launch", "prep"],
    "docs/guide/concepts.md": ["train", "config"],
    "docs/guide/config.md": ["doctor", "config", "config", "describe", "launch"],
}
"""Pages in the order in which a newcomer reads them, and the commands on each."""
TINY = (
    "model.n_layers=1", "model.d_model=48", "model.ffn.d_ff=64", "data.sequence_length=64",
    "train.steps=4", "train.global_batch=8", "train.micro_batch=4", "lr_schedule.warmup_steps=1",
)  # fmt: skip
LESS = {"prep": ("tokenizer.vocab_size=512",), "launch": TINY, "train": TINY}
"""Less text, smaller models and fewer steps than the pages say."""


def test_the_commands_of_the_tutorials_run_in_their_order_in_one_folder(texts, tmp_path):
    """The files are those that the pages show; files left by a page don't make a command of a later one fail."""
    for file in texts.rglob("*.py"):  # the page takes *.txt and *.md
        copy = tmp_path / "my-texts" / file.relative_to(texts).with_suffix(".txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    for page, expected in TUTORIALS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        named = re.findall(r"`([\w-]+\.toml)`(?:;[^`]*)?:\n\n```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for name, content in named:
            (tmp_path / name).write_text(content, encoding="utf-8")
        blocks = "".join(re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
        lines = [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("megatfm ")]
        # What verifies, and what describes a published model, is tested elsewhere.
        lines = [words for words in lines if words[0] != "verify" and not "".join(words[1:2]).startswith("llama3")]
        assert [words[0] for words in lines] == expected, page
        for words in lines:
            less = () if "--dry-run" in words else LESS.get(words[0], ())
            folder = [] if words[1:2] != ["quickstart-data"] else ["read.folder=my-texts"]
            output = run_megatfm(*keep_last_override([*words, *folder, *less]), output=tmp_path / "said", cwd=tmp_path)
            assert "Traceback" not in output
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert (tmp_path / "runs/mine/metrics.jsonl").is_file()


def test_gzip_and_xz_agree_with_the_programs(corpus, tmp_path):
    from megatfm import tokenizers
    from megatfm.corpus.corpus import Corpus
    from megatfm.inference.evaluate import measure_compressors

    tokenizer = tokenizers.load(corpus / "tokenizer.model")
    held_out = Corpus.open(corpus / "validation")
    actual = measure_compressors(held_out, tokenizer)
    blocks = (held_out.read_block(number) for number in range(held_out.n_blocks))
    text = b"".join(tokenizer.decode(tokens).encode() for block in blocks for _, tokens in block)
    # zlib, which Python has, finds other matches than the gzip program: up to half a percent more bytes.
    for tool, tolerance in {"gzip": 0.01, "xz": 0.001}.items():
        reference = subprocess.run([tool, "-9", "--stdout"], input=text, capture_output=True, check=True).stdout
        assert actual[f"{tool} -9, joined"] == pytest.approx(8 * len(reference) / len(text), rel=tolerance)


@pytest.mark.slow  # tests/unit/engines/native/test_compile.py has the same numbers without the command
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++ on a CPU: apt-get install g++")
def test_compiled_blocks_train_the_same(workers, make_config, config_file, tmp_path):
    words = [
        *("train.steps=3", "data.validation={}", "train.precision=fp64", "parallel.tp=2"),
        'optimizer={name="adamw", lr=3e-3}',
    ]
    assert workers.run(run_training, 2, make_config(*words, run="eager")) == [EXIT_OK, EXIT_OK]
    more = [f"run_dir={tmp_path / 'compiled'}", "train.compile=true"]
    command = [sys.executable, "-m", "megatfm", "launch", config_file, "--nproc", "2", *words, *more]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert compiled.returncode == 0, compiled.stderr
    for line, other in zip(training_curve(tmp_path / "eager"), training_curve(tmp_path / "compiled"), strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-9)
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-9)


@pytest.mark.parametrize(("words", "code", "message"), [
    (["train", "nowhere.toml"], 2, "nowhere.toml"),
    (["train", "quickstart", "train.stepz=3"], 2, "did you mean 'steps'"),
    (["train", "quickstart"], 2, "tokenizer.model"),
    (["launch", "quickstart", "--nproc", "3", "train.global_batch=16"], 2, "is not a multiple of"),
    (["report", "nowhere"], 2, "nowhere"),
    (["evaluate", "nowhere"], 2, "nowhere"),
    (["finetune", "nowhere.toml", "--from", "nowhere", "--export", "/etc"], 2, "/etc: exists already"),
    (["data", "check", "nowhere"], 2, "nowhere"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_mistake_is_one_line_and_an_exit_code(tmp_path, monkeypatch, capfd, words, code, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatfm.cli.signal.pthread_sigmask", lambda *args: None)
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    printed = capfd.readouterr().err
    assert left.value.code == code, printed
    assert message in printed
    assert "Traceback" not in printed
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 or words[0] == "launch"
    assert not (tmp_path / "runs/quickstart/checkpoints").exists()


def test_a_closed_output_ends_the_command_silently(tmp_path):
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "megatfm", "config", "schema"]
    completed = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    os.close(writes)
    assert (completed.returncode, completed.stderr) == (128 + signal.SIGPIPE, b"")
