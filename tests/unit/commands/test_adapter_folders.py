"""A folder with an adapter alone, given where a model is asked for: every command names the base and the way out."""

import json
from pathlib import Path

import pytest

import megatfm
from megatfm.errors import UsageError
from tests.support.small_models import run_command

HUB = "meta-llama/Llama-3.2-1B"
COMMANDS = {
    "generate": ["generate", "adapter", "--prompt", "a"],
    "evaluate": ["evaluate", "adapter"],
    "evaluate on tasks": ["evaluate", "adapter", "--task", "questions.jsonl"],
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
    write_adapter(tmp_path, HUB)
    return tmp_path


def write_adapter(folder: Path, base: str | None) -> None:
    (folder / "adapter").mkdir(exist_ok=True)
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
    (folder / "adapter/adapter_config.json").write_text(text)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_the_base_and_the_way_out(
    folder: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*COMMANDS[command]) == 2
    error = capfd.readouterr().err
    assert HUB in error
    assert "--base BASE" in error
    assert f"hf download {HUB} --local-dir BASE" in error
    assert not (folder / "out").exists()


def test_the_base_may_be_unnamed_a_run_of_ours_or_another_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
