"""The Python API: training, text, evaluation; called again in one process, as notebooks do."""

import json
import math
import multiprocessing
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatfm
from megatfm import terminal
from megatfm.commands.generation import add_generate_arguments, generate_command
from megatfm.config import Config
from megatfm.corpus.corpus import Corpus
from megatfm.data.loader import DataLoader
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference import evaluate
from megatfm.tracking.run_directory import RunDirectory
from tests.support.documentation import list_code_blocks
from tests.support.forked_commands import ForkedCommand, run_command
from tests.support.small_runs import corpus, file, run, texts

__all__ = ["corpus", "file", "run", "texts"]  # fixtures

NOTEBOOK = """
import asyncio, io, os, signal, socket, sys, threading, warnings

warnings.simplefilter("error")

def refuse():
    raise AssertionError("a fork in a process with threads and, in a notebook, open sockets")

os.fork = refuse
before = {{name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}}

class Cells(io.StringIO):  # as a kernel's: no file, no terminal
    def fileno(self):
        raise io.UnsupportedOperation("fileno")

async def cells():
    import megatfm
    handler = sys.stdout
    sys.stdout = Cells()
    one = megatfm.fit({file!r}, "name=one", "train.steps=2", "run_dir={folder}/one")
    two = megatfm.fit(megatfm.load_config({file!r}, ["name=two", "train.steps=2", "run_dir={folder}/two"]))
    one = megatfm.fit({file!r}, "name=one", "train.steps=3", "run_dir={folder}/one", "resume.allow=schedule")
    model = megatfm.load(one)
    text = model.generate("import ", max_tokens=4, seed=3)
    found = model.evaluate()
    sys.stdout, shown = handler, sys.stdout.getvalue()
    assert (str(one), str(two)) == ("{folder}/one", "{folder}/two")
    assert isinstance(text, str) and found["held-out"]["bits_per_byte"] > 0, found
    assert shown.count("finished: step") == 3, shown

asyncio.run(cells())
assert before == {{name: signal.getsignal(name) for name in before}}
assert [thread.name for thread in threading.enumerate() if thread.name.startswith("megatfm")] == []
import torch.distributed as dist
assert not dist.is_initialized()
"""


def test_a_notebook_trains_twice_and_resumes(file: Path, tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK.format(file=str(file), folder=tmp_path))
    notebook = ForkedCommand([], tmp_path / "output", program=str(program))
    assert notebook.wait() == 0, notebook.output


def test_text_is_what_the_command_makes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    model = megatfm.load(run)
    capsys.readouterr()
    for words, options in ((["--seed", "3"], {"seed": 3}), (["--num-beams", "2"], {"num_beams": 2})):
        generate_command(parser.parse_args([str(run), "--prompt", "def ", "--max-tokens", "6", *words]))
        assert capsys.readouterr().out == f"def {model.generate('def ', max_tokens=6, **options)}\n"


@pytest.mark.parametrize("options", [{"seed": 3}, {"temperature": 0, "batch": 2}, {"num_beams": 2}])
def test_several_prompts_get_the_texts_that_they_get_alone(run: Path, options: dict[str, Any]) -> None:
    """Prompts of several lengths; two are equal, for in a batch the second could draw other numbers."""
    model, prompts = megatfm.load(run), ["def ", "import os, sys; import numpy as np", "x", "def ", ""]
    alone = [model.generate(prompt, max_tokens=7, **options) for prompt in prompts]
    assert len({*alone}) > 2
    assert model.generate(prompts, max_tokens=7, **options) == alone
    assert model.generate([], **options) == []


def test_the_model_is_a_module_that_can_be_called(run: Path) -> None:
    model, tokens = megatfm.load(run), torch.tensor([[1, 5, 6]])
    assert torch.equal(model(tokens).logits, model.module(tokens).logits)
    assert isinstance(model.module, torch.nn.Module)
    assert model.config.d_model == 32
    assert len(list(model.parameters())) == len(list(model.module.parameters()))
    assert model.tokenizer.vocab_size == 512


def test_evaluation_is_what_the_command_leaves(
    run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where shards of URLs are kept
    monkeypatch.chdir(corpus)
    monkeypatch.setattr(evaluate, "measure_compressors", lambda corpus, _: {"of tokens": float(corpus.n_tokens)})
    url = f"file://{corpus}/validation"
    actual = megatfm.load(run).evaluate({"more": Path("validation"), "web": url}, compressors=True)
    assert set(actual) == {"held-out", "again", "more", "web"}
    assert actual["web"]["loss"] == actual["more"]["loss"] == actual["held-out"]["loss"]
    assert actual["more"]["compressors"] == {"of tokens": float(Corpus.open("validation").n_tokens)}
    config = (run / "config.toml").read_text()
    shutil.copytree(run, tmp_path / "moved")
    (tmp_path / "moved/config.toml").write_text(re.sub(r'(?m)^train = ".*"$', 'train = "/gone"', config))
    assert megatfm.load(tmp_path / "moved").evaluate()["held-out"]["loss"] == actual["held-out"]["loss"]
    requested, stored = list[Any](), json.loads((run / "evaluation.json").read_text())

    def evaluate_run(_: Path, sets: Any, *__: Any, show: Callable[[Any, Any], None], **___: Any) -> None:
        requested.append(sets)
        show(stored, {})

    monkeypatch.setattr(evaluate, "evaluate_run", evaluate_run)
    assert run_command("evaluate", str(run), "--validation", f"web={url}") == 0
    assert requested == [{"web": url}]
    assert f"{actual['web']['loss']:.4f}" in capsys.readouterr().out


def test_commands_say_on_stderr_what_they_do(
    run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names what it reads, results as they come, and every ten seconds (here: always) its progress."""
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    expected = {
        ("evaluate", str(run)): [
            rf"{run}: step-00000002, 2 validation sets, [\d,]+ parameters, .*",
            r"held-out: 100 % of \d+ rows", r"held-out: loss [\d.]+, [\d.]+ bits per byte", r"again: loss .*",
        ],
        ("describe", str(run)): ["small: counting parameters and FLOPs, without allocating the model"],
        ("data", "check", f"{corpus}/train"): [
            rf"{corpus}/train: \d+ samples in 1 shard", r"checked: 100 % of \d+ samples",
        ],
        ("convert", str(run), str(tmp_path / "hf"), "--to", "hf"): [
            rf"{run}/checkpoints/step-00000002: \d+ tensors of LlamaForCausalLM", r"converted: 100 % of \d+ tensors",
        ],
    }  # fmt: skip
    for words, lines in expected.items():
        assert run_command(*words) == 0
        output = capsys.readouterr()
        for line in lines:
            assert re.search(rf"^\d\d:\d\d:\d\d {line}$", output.err, re.MULTILINE), (line, output.err)
            assert not re.search(line, output.out)


def test_results_that_can_not_be_written_are_shown(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a full disk, or in another user's run: they may have taken hours."""

    def refuse(*_: object) -> None:
        raise MegatfmError("evaluation.json: can't write it: Read-only file system")

    monkeypatch.setattr(RunDirectory, "write", refuse)
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: {"loss": 1.2345})
    assert run_command("evaluate", str(run)) == 1
    displayed = capsys.readouterr()
    assert "1.2345" in displayed.out
    assert displayed.err.endswith("error: evaluation.json: can't write it: Read-only file system\n")
    caplog.clear()
    assert megatfm.load(run).evaluate() == {"held-out": {"loss": 1.2345}, "again": {"loss": 1.2345}}
    assert "evaluation.json: can't write it: Read-only file system" in caplog.messages
    monkeypatch.setattr(evaluate, "open_engine", refuse)
    with pytest.raises(MegatfmError, match="Read-only"):
        megatfm.load(run).evaluate()


def test_losses_that_are_no_numbers_are_strict_json(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings, which `float` reads; from Python, they are numbers."""
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: {"loss": math.nan, "bits_per_byte": math.inf})
    actual = megatfm.load(run).evaluate()
    assert math.isnan(actual["again"]["loss"])
    stored = (run / "evaluation.json").read_text()
    result = json.loads(stored, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))["sets"]["again"]
    assert result == {"loss": "NaN", "bits_per_byte": "Infinity"}


def test_a_model_loaded_by_a_relative_path_can_be_used_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    model = megatfm.load(run.name)
    monkeypatch.chdir(tmp_path)
    assert isinstance(model.generate("a", max_tokens=2), str)


def test_wrong_calls_of_the_api_are_one_line(run: Path, tmp_path: Path) -> None:
    config = megatfm.load_config(run)
    assert isinstance(config, Config)
    with pytest.raises(UsageError, match=r"config\.with_changes\("):
        megatfm.fit(config, "train.steps=3")
    with pytest.raises(UsageError, match="neither a checkpoint nor a run"):
        megatfm.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatfm.nothing
    model = megatfm.load(run)
    for call, message in (
        (lambda: model.evaluate(["validation"]), r"sets = \['validation'\]: give a dict of names, e\.g\. "),
        (lambda: model.evaluate_tasks("questions.toml"), r"files = 'questions\.toml': give a dict of names, e\.g\. "),
        (lambda: model([[1, 2]]), r"tokens = \[\[1, 2\]\]: give ids \[batch, sequence\], e\.g\. "),
        (lambda: model(torch.tensor([1, 2])), r"tokens = tensor\(\[1, 2\]\): give ids \[batch, sequence\]"),
        (lambda: model(tokens=torch.ones(1, 2)), "give ids"),
        (lambda: model.generate("a", max_tokens=0), "^max_tokens = 0: choose 1 or more$"),
        (lambda: model.generate(["a"], batch=0), "^batch = 0: choose 1 or more prompts at a time"),
        (lambda: model.generate(["a", 3]), r"^prompt = \['a', 3\] is not a string: give one, e\.g\. .* or a list"),
        (lambda: model.generate("a", num_beams=-1), r"^num_beams = -1: choose 0 \(none\) or more$"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_a_data_worker_that_imports_an_unguarded_script_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing marks the process so while it imports the script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="a data worker imports this script: call fit under `if __name__ == "):
        megatfm.fit("nowhere.toml")


def test_the_rows_of_the_questions_are_those_of_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (text for page, _, text in list_code_blocks("python") if page.name == "faq.md" and "read_rows" in text)
    monkeypatch.chdir(run.parent.parent)
    assert "step = 4211" in block
    page: dict[str, Any] = {}
    exec(block.replace("step = 4211", "step = 3").replace("runs/mine", str(run)), page)
    with DataLoader(page["corpora"].train, global_batch=8, micro_batch=4) as loader:
        third = [next(loader) for _ in range(3)][-1]
    assert np.array_equal(page["rows"]["tokens"], np.concatenate([batch["tokens"] for batch in third]))
    assert capsys.readouterr().out.strip()


def test_every_offer_is_explained() -> None:
    offers: list[Callable[..., object]] = [megatfm.fit, megatfm.load, megatfm.load_config, megatfm.Model]
    for offer in [*offers, megatfm.Model.generate, megatfm.Model.evaluate]:
        assert len(str(offer.__doc__)) > 60
