"""Tasks that are evaluated while a run trains: what `megatfm evaluate --task` says of the checkpoint, as curves."""

import json
from pathlib import Path
from typing import Any

import pytest

import megatfm
from megatfm import cli
from megatfm.config import Config
from megatfm.errors import EXIT_OK
from megatfm.inference.evaluation_tasks import evaluate_questions
from megatfm.inference.text import load
from megatfm.tasks.questions import open_evaluation_task
from megatfm.train.trainer import train
from tests.support.evaluated_tasks import write_tasks
from tests.support.workers import Workers

SHORT = (
    "train.steps=2",
    "evaluate.every=1",
    "evaluate.max_rows=4",
    "checkpoint.every=1",
    "train.precision=fp64",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "tp x dp": (4, ("parallel.tp=2", "parallel.dp_shard=2")),
    "averaged weights": (2, ("optimizer={name='schedule_free_adamw', lr=1e-2}", "lr_schedule.name=constant")),
}  # fmt: skip


def run_training(config: Config) -> int:
    return train(config)


def tasks_override(tasks: dict[str, str]) -> str:
    return f"evaluate.tasks={{{', '.join(f'{name} = {json.dumps(path)}' for name, path in tasks.items())}}}"


def evaluations(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("tasks", {}) for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_curves_are_what_evaluate_says_of_the_checkpoints(
    workers: Workers, make_config: Any, tmp_path: Path, layout: str
) -> None:
    ranks, settings = LAYOUTS[layout]
    tasks = write_tasks(tmp_path)
    config = make_config(*SHORT, *settings, tasks_override(tasks), run="run")
    assert workers.run(run_training, ranks, config) == [EXIT_OK] * ranks
    actual = evaluations(tmp_path / "run")
    assert list(actual) == [1, 2]
    for step, by_task in actual.items():
        loaded = load(tmp_path / f"run/checkpoints/step-{step:08d}", dtype="float64")
        for name, metrics in by_task.items():
            summary = evaluate_questions(loaded, open_evaluation_task(tasks[name])).summary
            expected = {key: value for key, value in summary["metrics"].items() if key in metrics}
            assert metrics == pytest.approx(expected, rel=1e-9)
        assert by_task.keys() == tasks.keys()
        assert "accuracy_pmi" in by_task["choice"]
        assert by_task["cloze"].keys() == {"bits_per_byte", "perplexity"}
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"step 2  task choice: accuracy {actual[2]['choice']['accuracy']:.4f}" in log


def test_tasks_do_not_touch_the_run_and_are_in_its_report(
    workers: Workers, make_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tasks_override(write_tasks(tmp_path))
    workers.run(run_training, 1, make_config(*SHORT, "model.dropout=0.1", tasks, run="with"))
    workers.run(run_training, 1, make_config(*SHORT, "model.dropout=0.1", run="without"))
    curves = []
    for name in ("with", "without"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([(json.loads(line)["loss"], json.loads(line)["evaluation"]) for line in lines])
    assert curves[0] == curves[1]
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "with"), "--with", str(tmp_path / "without")])
    assert not ended.value.code
    page = (tmp_path / "with/report.html").read_text()
    for title in ("Right answers of tasks", "Accuracy on tasks"):
        assert title in page
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path / "without")])
    assert "Right answers of tasks" not in (tmp_path / "without/report.html").read_text()


def test_the_command_leaves_results_in_the_run(
    workers: Workers, make_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path)
    workers.run(run_training, 1, make_config(*SHORT, run="run"))
    words = [
        "evaluate",
        str(tmp_path / "run"),
        "--task",
        tasks["choice"],
        "--task",
        f"other={tasks['cloze']}",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--batch", "5", "--limit", "4", "--device", "cpu"])
    assert not ended.value.code
    stored = json.loads((tmp_path / "run/evaluation_tasks.json").read_text())
    assert stored["step"] == 2
    assert {name: task["questions"] for name, task in stored["tasks"].items()} == {"choice": 4, "other": 4}
    records = (tmp_path / "run/predictions/tasks/other.jsonl").read_text().splitlines()
    assert [json.loads(record)["row"] for record in records] == [1, 2, 3, 4]
    assert "accuracy_per_byte" in capsys.readouterr().out
    metrics = megatfm.load(tmp_path / "run").evaluate_tasks({"choice": tasks["choice"]}, limit=4, batch=3)
    assert metrics["choice"] == pytest.approx(stored["tasks"]["choice"]["metrics"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "3"], "--batch: are for tasks: give --task FILE or --harness NAME"),
        (["--task", "x.toml", "--baselines"], "evaluate validation sets by a second command"),
        (["--task", "x.toml"], "x.toml: there is no such file"),
        (["--task", "a/x.toml", "--task", "b/x.toml"], "'x' is named already"),
        (["--task", "x.toml", "--shots", "1"], "--shots: are for tasks of the harness"),
        (["--task", "x.toml", "--limit", "-1"], "limit = -1: choose 1 or more"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", str(tmp_path), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
