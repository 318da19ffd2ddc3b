"""Checks and messages of commands before anything is started."""

import argparse
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import psutil
import pytest

import megatfm
from megatfm.commands import finetuning, training
from megatfm.commands.training import enable_expandable_segments
from megatfm.config import list_presets, load_config
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import LockedError, UsageError
from tests.support.forked_commands import run_command
from tests.support.small_runs import SMALL_CONFIG, tokenizer_model

__all__ = ["tokenizer_model"]  # a fixture


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_enabled_unless_the_user_configured_the_allocator(name: str) -> None:
    environment: dict[str, str] = {}
    enable_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    environment = {name: "max_split_size_mb:512"}
    enable_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:512"}


def test_the_config_of_a_running_run_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_config_of_a_running_task_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`launch RUN/finetune.toml` reads it at each restart. A folder that can't be made is one line, too."""
    config = load_config("quickstart", [f"run_dir={tmp_path}"])
    monkeypatch.setattr(finetuning, "make_finetuning_config", lambda *_: (config, []))
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (tmp_path / "launch.json").write_text(json.dumps(note))
    (tmp_path / "finetune.toml").write_text("of the run\n")
    assert run_command("finetune", "task.toml", "--prepare") == LockedError.exit_code
    assert f"process {os.getpid()} runs this already" in capfd.readouterr().err
    assert (tmp_path / "finetune.toml").read_text() == "of the run\n"
    config = config.with_changes({"run_dir": f"{tmp_path}/launch.json/below"})
    assert run_command("finetune", "task.toml", "--prepare") == 1
    assert "finetune.toml: Not a directory: make room" in capfd.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["finetune", "task.toml", "--prepare", "--export", "out"], "--export is for a run that trains"),
    (["verify", "--presets", "--layouts", "none", "--all"], "--all shows every parameter of one CONFIG"),
])  # fmt: skip
def test_options_that_would_change_nothing_are_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*words) == 2
    assert f"error: {message}" in capfd.readouterr().err


CORPORA = ("train=corpora/web", "validation.web=corpora/web", 'mixture.web={path = "corpora/web"}')


@pytest.mark.parametrize("override", [*(f"data.{corpus}" for corpus in CORPORA), "data.corpus=corpora/web"])
def test_corpora_beside_a_task_are_refused(tmp_path: Path, override: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Corpora that the files of the task would replace."""
    (tmp_path / "task.toml").write_text('[task]\ntrain = "a.csv"\n')
    assert run_command("finetune", str(tmp_path / "task.toml"), "--from", str(tmp_path / "model"), override) == 2
    assert f"error: {override}: a task is trained and evaluated on its own files" in capfd.readouterr().err


@pytest.mark.parametrize("corpus", ['train = "web"', 'validation.web = "web"', 'mixture.web = { path = "web" }'])
@pytest.mark.parametrize("model", [["--from", "model"], []])
def test_corpora_in_the_config_of_a_task_are_refused(
    tmp_path: Path, corpus: str, model: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The task's files would replace these, too. Corpora of a base or of a stored config are no mistake."""
    (tmp_path / "task.toml").write_text(f'[task]\ntrain = "a.csv"\n[data]\n{corpus}\n')
    key = corpus.partition(" ")[0].partition(".")[0]
    assert run_command("finetune", str(tmp_path / "task.toml"), *model) == 2
    message = "a task is trained and evaluated on its own files"
    assert f"error: {tmp_path / 'task.toml'}: data.{key}: {message}" in capfd.readouterr().err
    (tmp_path / "task.toml").rename(tmp_path / "finetune.toml")
    (tmp_path / "further.toml").write_text('extends = "finetune.toml"\n')
    for name in ("finetune.toml", "further.toml"):
        assert run_command("finetune", str(tmp_path / name), *model) == 2
        assert message not in capfd.readouterr().err


@pytest.mark.parametrize("command", [["verify", "config.toml"], ["verify", "--presets", "quickstart"]])
def test_verify_says_that_its_engine_replaces_the_configured_one(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text('extends = "quickstart"\n')
    mistake = "--layouts=none" if "--presets" in command else "train.steps=none"  # no step is taken
    for configured, engine, is_replaced in (("deepspeed", "native", True), ("native", "native", False)):
        words = [f"parallel.engine={configured}", "--engine", engine, mistake]
        assert run_command(*command, *words) == 2
        note = f"note: --engine {engine} replaces parallel.engine = {configured!r}\n"
        assert (note in capfd.readouterr().err) == is_replaced
    assert run_command(*command, "--engine", "deepspeed", mistake) == 2
    assert "note:" not in capfd.readouterr().err


def test_ids_are_decoded_by_the_tokenizer_that_made_them(
    tmp_path: Path, tokenizer_model: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another one would show other words, and end documents of Megatron-LM's file by an id of its own."""
    other, folder = tmp_path / "tokenizer.model", str(tmp_path / "train")
    other.write_bytes(tokenizer_model)
    with ShardWriter(folder, tokenizer_hash="made it", token_dtype="uint16") as writer:
        writer.add("a", np.array([5, 6]), "x", 3)
        writer.finish({})
    assert run_command("data", "export", folder, str(tmp_path / "a.bin"), "--tokenizer", str(other)) == 2
    assert "was written with tokenizer made it" in capfd.readouterr().err
    for words, code in ((["export", folder, str(tmp_path / "a.bin")], 2), (["export", folder, f"{tmp_path}/tars/"], 0)):
        assert run_command("data", *words) == code
        assert f"note: {other}: is not used" in capfd.readouterr().err
    assert run_command("data", "show", folder, "--sample", "0") == 0
    assert capfd.readouterr().out.endswith("\n5 6\n")


@pytest.mark.parametrize("images", [["--images", "3"], []])
def test_evaluate_names_the_pictures(
    images: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results = {"step": 7, "objective": "image_classification", "sets": {"seen": {"loss": 1.0, "metrics": {}}}}
    monkeypatch.setattr("megatfm.inference.evaluate.evaluate_run", lambda *_, **__: (results, {}))
    assert run_command("evaluate", "runs/a", *images, "--validation", "seen=corpora/a") == 0
    line = "pictures in runs/a/pictures; `megatfm report runs/a` shows them\n"
    assert (line in capfd.readouterr().out) == bool(images)


@pytest.mark.parametrize(("sets", "message"), [
    (["code=corpora/a", "code=corpora/b"], "--validation code=corpora/b: code is corpora/a already"),
    (["code"], "--validation code: expected NAME=DIR"),
    (["=corpora/a"], "--validation =corpora/a: expected NAME=DIR"),
])  # fmt: skip
def test_validation_sets_have_distinct_names(sets: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for validation_set in sets for argument in ("--validation", validation_set)]
    assert run_command("evaluate", "runs/none", *arguments) == 2
    assert message in capfd.readouterr().err


def test_a_further_validation_set_does_not_replace_the_runs_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(SMALL_CONFIG.format(corpus="/corpora/small"))
    assert run_command("evaluate", str(tmp_path), "--validation", "again=corpora/code") == 2
    error = capfd.readouterr().err
    assert error == (
        "error: --validation again=corpora/code: the run's own data.validation.again is /corpora/small/validation: "
        "give another name\n"
    )


LONG = "/".join(["long" * 50] * 30)


@pytest.mark.parametrize("words", [
    *([command, LONG] for command in ("train", "finetune", "launch", "evaluate", "report", "status", "cancel")),
    ["describe", LONG], ["explain-oom", LONG], ["compare", LONG, LONG], ["predict", LONG, LONG],
    ["generate", LONG, "--prompt", "a"], ["data", "check", LONG], ["data", "index", LONG, "--labels", "cls"],
    ["config", "show", LONG], ["train", "quickstart", f"data.tokenizer={LONG}"],
    ["estimate", "gpt2-124m", "--write", LONG], ["prep", "quickstart-data", f"read.folder={LONG}"],
    ["prep", LONG], ["data", "show", "a\0b"], ["estimate", "gpt2-124m", "--hardware", "a\0b"],
    ["prep", "quickstart-data", 'out="a\\u0000b"', "read.folder=."],
], ids=lambda words: " ".join(word[:20] for word in words))  # fmt: skip
def test_paths_that_no_system_has_are_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(*words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 7000


def test_the_report_of_no_run_is_refused_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("report", str(tmp_path / "none")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/none: not a run directory")


# ------------------------------------------------------------------------------------------- megatfm estimate


GPT2 = ("estimate", "gpt2-124m")


def test_estimate_prints_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*GPT2, "--gpus", "8") == 0
    text, said = capsys.readouterr()
    assert re.fullmatch(r"\d\d:\d\d:\d\d gpt2-124m: estimating a step on 8 × NVIDIA H100.*\n", said)
    assert "124,439,808 parameters, on 8 × NVIDIA H100" in text
    assert "fits:" in text
    assert "matrix products" in text


def test_estimate_suggests_changes_for_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("train.micro_batch=16", "parallel.zero=0")
    assert run_command("estimate", "gpt2-xl", "--gpus", "4", "--device", "a100-40gb", *overrides) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT: every rank needs" in text
    assert "fits with" in text


def test_estimate_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*GPT2, "--gpus", "2", "--json") == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["step_seconds"] == pytest.approx(sum(parsed["causes"].values()))
    assert parsed["memory"][0]["total"] > 2**30


@pytest.mark.parametrize(("arguments", "text"), [
    (("--device", "h1000"), "did you mean 'h100'"),
    (("--gpus", "0"), "--gpus 0"),
    (("--gpus", "3", "parallel.tp=2"), "does not fit 3 processes"),
    (("--gpus", "7"), "is not a multiple of train.micro_batch"),
    (("--device", "a100", "train.precision=fp8"), "has no fp8"),
    (("parallel.engine=deepspeed", "parallel.zero=1"), "estimates are of the native engine"),
    (("--hardware", "missing.toml"), "can't be read"),
])  # fmt: skip
def test_wrong_options_of_estimate_are_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*GPT2, *arguments) == 2
    assert text in capsys.readouterr().err


def test_estimate_reads_a_hardware_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text('[device.mine]\nextends = "h100"\nname = "My GPU"\nmemory_gib = 4.0\n', encoding="utf-8")
    assert run_command(*GPT2, "--gpus", "2", "--hardware", str(path), "--device", "mine") == 1
    assert "My GPU" in capsys.readouterr().out
    path.write_text('[device.mine]\nname = "My GPU"\n', encoding="utf-8")
    assert run_command(*GPT2, "--hardware", str(path), "--device", "mine") == 2
    assert "[device.mine] lacks memory_gib" in capsys.readouterr().err


# ------------------------------------------------------------------------------ folders with an adapter alone


HUB = "meta-llama/Llama-3.2-1B"
COMMANDS = {
    "generate": ["generate", "adapter", "--prompt", "a"],
    "evaluate": ["evaluate", "adapter"],
    "evaluate on tasks": ["evaluate", "adapter", "--task", "questions.toml"],
    "predict": ["predict", "adapter", "train.csv"],
    "export": ["convert", "adapter", "out", "--to", "hf"],
    "to experts": ["convert", "adapter", "out", "--to", "moe", "--experts", "2"],
    "finetune": ["finetune", "topics.toml", "--from", "adapter"],
    "train": ["train", "--from", "adapter", "data.train=corpus/train"],
    "join without the base": ["convert", "adapter", "out", "--to", "megatfm"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topics.toml").write_text('name = "topics"\n[task]\ntrain = "train.csv"\n')
    (tmp_path / "train.csv").write_text("text,label\ngood,yes\nbad,no\n")
    (tmp_path / "questions.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n')
    (tmp_path / "questions.toml").write_text(
        'kind = "choice"\ndata = "questions.jsonl"\nprompt = "{{ question }}"\nchoices = "choices"\nanswer = "answer"\n'
    )
    write_adapter(tmp_path, HUB)
    return tmp_path


def write_adapter(folder: Path, base: str | None) -> None:
    (folder / "adapter").mkdir(exist_ok=True)
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
    (folder / "adapter/adapter_config.json").write_text(text)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_adapters_without_a_base(folder: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(*COMMANDS[command]) == 2
    error = capfd.readouterr().err
    assert HUB in error
    assert "--base BASE" in error
    assert f"hf download {HUB} --local-dir BASE" in error
    assert not (folder / "out").exists()


def test_the_refusal_names_the_base_model_where_it_is_known(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for base, way_out in (
        (None, "adapter_config.json doesn't name"),
        ("runs/bert/checkpoints/step-00000004", "`megatfm convert runs/bert/checkpoints/step-00000004 BASE --to hf`"),
        ("../llama", "BASE is the Hugging Face folder of ../llama"),
    ):  # fmt: skip
        write_adapter(folder, base)
        if base and base.startswith("runs"):
            (folder / base).mkdir(parents=True)
            (folder / base / "metadata.json").write_text("{}")
        with pytest.raises(UsageError, match="holds an adapter in PEFT's format") as error:
            megatfm.load("adapter")
        assert way_out in str(error.value)
    (folder / "adapter/adapter_config.json").write_text("[not json")
    with pytest.raises(UsageError, match="holds an adapter in PEFT's format, and not its model: join them"):
        megatfm.load("adapter")
    assert run_command("convert", "adapter", "out", "--to", "hf", "--base", "llama") == 2
    assert "in two steps, --to megatfm --base llama and then --to hf" in capfd.readouterr().err


def test_presets_are_described_in_whole_sentences(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`et al.` ends no sentence. Lines break at the terminal's width; in a pipe, a preset is one line for grep."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run_command("config", "presets", "GPT3", "medium") == 0
    assert capfd.readouterr().out.split() == (
        ["gpt3-medium", "GPT-3", "Medium", "(Brown", "et", "al.", "2020,", "table", "2.1", "and", "appendix", "B)."]
    )
    assert run_command("config", "presets") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_presets())
    assert all(len(line.split()) > 3 and line.endswith(".") for line in lines), lines
    assert not [line for line in lines if line.count("(") != line.count(")")]
    monkeypatch.setenv("COLUMNS", "60")
    assert run_command("config", "presets") == 0
    wrapped = capfd.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 60
    assert wrapped.split() == " ".join(lines).split()
    assert run_command("config", "presets", "gpt3", "t5") == 2
    assert "error: no preset mentions gpt3 and t5: " in capfd.readouterr().err


@pytest.mark.parametrize(("arguments", "setting"), [
    (["train", "quickstart", "--tensor-model-parallel-size", "2"], "parallel.tp=2"),
    (["train", "quickstart", "--bf16", "--other", "5", "--lr", "1e-3"], "train.precision=… optimizer.lr=1e-3"),
    (["launch", "quickstart", "--nproc", "2", "--lr=1e-3"], "optimizer.lr=1e-3"),
    (["prep", "quickstart-data", "--vocab-size", "9"], "tokenizer.vocab_size=9"),
    (["train", "quickstart", "--train.steps=4"], "train.steps=4"),
])  # fmt: skip
def test_a_flag_that_is_a_setting_names_the_setting(
    arguments: list[str], setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*arguments) == 2
    assert capfd.readouterr().err.endswith(f": settings have no dashes: {setting}\n")


def test_quickstart_refuses_an_impossible_number_before_it_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("quickstart", "--nproc", "0") == 2
    assert capfd.readouterr().err == "error: --nproc 0: choose 1 or more\n"
    assert not list(tmp_path.iterdir())
