"""Results on disk and in tables, of a model that diverged: strict JSON, and a perplexity beyond the range of floats."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from torch import nn

from megatfm.commands.finetuning import print_results, print_spread
from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference import evaluate, harness, task_evaluation, text
from megatfm.inference.evaluation_tasks import PREDICTIONS, EvaluatedTask, write_results
from megatfm.inference.harness import run_harness
from megatfm.inference.image_evaluation import make_image_evaluation
from megatfm.inference.task_evaluation import EvaluatedFile, TaskResults, evaluate_task, predict_file
from megatfm.inference.text import TextModel
from megatfm.tasks.question_scores import Likelihood, average_metrics, score_cloze
from megatfm.tasks.questions import Question


def read_strict_json(text: str) -> Any:
    """The value of JSON as other languages read it, without the constants that Python's module accepts."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def open_with_task(monkeypatch: pytest.MonkeyPatch, run: Path, task: dict[str, str]) -> None:
    """Have an evaluation open the run as one of a task, without its model."""
    config = load_config(run / "config.toml").with_changes({"task": task})
    monkeypatch.setattr(task_evaluation, "_open_run", lambda *_: (config, None))


GENERATION = {"form": "generation", "train": "a.jsonl", "label": "b"}
CLASSIFICATION = {"form": "classification", "train": "a.jsonl", "label": "b"}


@pytest.mark.parametrize(("task", "search", "message"), [
    (GENERATION, {"length_penalty": 0.5}, "--length-penalty: is for a beam search"),
    (GENERATION, {"length_penalty": 0.5, "beams": 1}, "--length-penalty: is for a beam search"),
    (CLASSIFICATION, {"beams": 2}, "--beams and --length-penalty: its task, form = 'classification', generates no an"),
    ({"form": "chat", "train": "a.jsonl"}, {}, "form = 'chat', has no labels to predict: use `megatfm generate`"),
    (CLASSIFICATION, {}, "new.jsonl: there is no such file: give one with column 'text'"),
], ids=str)  # fmt: skip
def test_predictions_that_a_task_does_not_make_are_refused(
    task: dict[str, str], search: dict[str, float], message: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_with_task(monkeypatch, run, task)
    with pytest.raises(UsageError, match=message):
        predict_file(run, "new.jsonl", search=search)


def test_predictions_do_not_overwrite_their_rows(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_with_task(monkeypatch, run, CLASSIFICATION)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    with pytest.raises(UsageError, match=r"rows\.jsonl: the predictions would overwrite the rows: give another file"):
        predict_file(run, str(rows), str(rows))


def test_what_an_engine_or_a_run_lacks_is_refused(run: Path) -> None:
    """An engine that can't run its model by itself; a run on images has no text to compress, and none to continue."""
    config, images = load_config(run / "config.toml"), load_config("quickstart-vision")
    engine: Any = SimpleNamespace(model=None)
    with pytest.raises(UsageError, match=r"parallel.engine = 'native' can't generate answers, which task.text_metrics"):
        task_evaluation._generate_answers(engine, cast(Any, None), config, "rows.jsonl")
    with pytest.raises(UsageError, match=r"--images: parallel.engine = 'native' can't run its model on examples"):
        make_image_evaluation(images, engine, 3)
    with pytest.raises(UsageError, match=r"--baselines: objective.name = 'image_classification' reads no text"):
        evaluate._check_text(images, None)
    with pytest.raises(UsageError, match=r"--baselines: .* does not keep every text as it is, so nothing compares"):
        evaluate._check_text(config, cast(Any, SimpleNamespace(lossless=False)))
    with pytest.raises(UsageError, match=r"evaluate.sample_prompts: the run reads no text: leave them out"):
        text._make_text_model(nn.Identity(), None, images)


@pytest.mark.parametrize(("loss", "stored_loss", "perplexity"), [
    (2.0, 2.0, pytest.approx(7.389056098930650)),
    (709.0, 709.0, pytest.approx(8.218407461554972e307)),
    (1000.0, 1000.0, "Infinity"),
    (math.nan, "NaN", "NaN"),
    (math.inf, "Infinity", "Infinity"),
])  # fmt: skip
def test_a_finetuned_model_that_diverged_has_results(
    loss: float, stored_loss: object, perplexity: object, run: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    open_with_task(monkeypatch, run, {"form": "chat", "train": "a.jsonl", "validation": "b.jsonl"})
    evaluated = run / "checkpoints/step-00000030", {"validation": EvaluatedFile(loss=loss, n_examples=3)}
    monkeypatch.setattr(task_evaluation, "_evaluate_files", lambda *_, **__: evaluated)
    results = evaluate_task(run)
    assert results is not None
    stored = read_strict_json((run / "task.json").read_text())["sets"]["validation"]
    assert stored["loss"] == stored_loss
    assert stored["metrics"] == {"perplexity": perplexity}
    assert float(stored["loss"]) == pytest.approx(results.sets["validation"]["loss"], nan_ok=True)
    print_results(results)
    print_spread([results, results])
    assert f"{loss:.4f} ± {0.0 if math.isfinite(loss) else math.nan:.4f}" in capsys.readouterr().out


def test_results_of_finetuning_that_can_not_be_written_are_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_with_task(monkeypatch, run, {"form": "chat", "train": "a.jsonl", "validation": "b.jsonl"})
    evaluated = run / "checkpoints/step-00000030", {"validation": EvaluatedFile(loss=2.0, n_examples=3)}
    monkeypatch.setattr(task_evaluation, "_evaluate_files", lambda *_, **__: evaluated)
    (run / "task.json").mkdir()
    shown: list[TaskResults] = []
    with pytest.raises(MegatfmError, match=r"task\.json"):
        evaluate_task(run, show=shown.append)
    assert [results.sets["validation"]["loss"] for results in shown] == [2.0]


def test_a_cloze_beyond_floats_has_infinite_perplexity(tmp_path: Path) -> None:
    result = score_cloze(Question(0, "", (" word",)), Likelihood(-1000.0, 2), " ")
    metrics = average_metrics("cloze", [result])
    assert metrics["perplexity"] == math.inf
    record = {**result.record, "log_probability": -math.inf}
    write_results(tmp_path, 3, {"mine": EvaluatedTask({"metrics": metrics, "intervals": {}}, [record])})
    stored = read_strict_json((tmp_path / "evaluation_tasks.json").read_text())
    assert stored["tasks"]["mine"]["metrics"]["perplexity"] == "Infinity"
    assert read_strict_json((tmp_path / PREDICTIONS / "mine.jsonl").read_text())["log_probability"] == "-Infinity"


def test_results_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "predictions").write_text("a file in the place of the folder")
    task = EvaluatedTask({"metrics": {}, "intervals": {}}, [])
    with pytest.raises(MegatfmError, match=r"predictions/tasks: Not a directory"):
        write_results(tmp_path, 3, {"mine": task})
    with pytest.raises(MegatfmError, match=r"can't write .*predictions/x\.jsonl: "):
        task_evaluation._write_predictions(tmp_path / "predictions/x.jsonl", cast(Any, SimpleNamespace(rows=list)))


@pytest.mark.parametrize("name", ["validation", "test"])
def test_predictions_do_not_replace_those_of_the_evaluation(
    name: str, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report shows these beside the rows of the task's own file."""
    evaluated, other = tmp_path / f"{name}.csv", tmp_path / "other" / f"{name}.csv"
    other.parent.mkdir()
    for file in (evaluated, other):
        file.write_text("text,label\na,b\n")
    open_with_task(monkeypatch, run, {"train": "a.csv", name: str(evaluated)})
    monkeypatch.setattr(task_evaluation, "_evaluate_files", lambda *_, **__: None)  # as on a rank other than 0
    with pytest.raises(UsageError, match=rf"predictions/{name}\.jsonl is for the predictions of task\.{name}"):
        predict_file(run, str(other))
    for file, out in ((evaluated, None), (other, str(tmp_path / "out.jsonl"))):
        assert predict_file(run, str(file), out) is None


@pytest.mark.parametrize("content", [
    b"{", b"[1]", b'{"sets": 3}', b'{"sets": {"validation": {"threshold": []}}}', b"\xff",
])  # fmt: skip
def test_a_damaged_threshold_is_one_line_before_anything_is_predicted(
    content: bytes, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_with_task(monkeypatch, run, {"form": "span_extraction", "train": "a.json"})
    monkeypatch.setattr(task_evaluation, "_evaluate_files", lambda *_, **__: pytest.fail("the file was predicted"))
    (tmp_path / "new.json").write_text("{}")
    (tmp_path / "task.json").write_bytes(content)
    with pytest.raises(MegatfmError, match=r"task\.json: can't be read .*`megatfm finetune .*`$"):
        predict_file(tmp_path, str(tmp_path / "new.json"))


def test_a_perplexity_of_the_harness_beyond_floats_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.simple_evaluate = lambda **_: math.exp(1000.0)  # type: ignore[attr-defined]
    tasks.TaskManager = lambda **_: SimpleNamespace(match_tasks=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr(harness, "harness_model", lambda *_, **__: None)
    with pytest.raises(MegatfmError, match=r"--harness lambada: a perplexity is beyond the range of numbers"):
        run_harness(cast(TextModel, None), ["lambada"])
