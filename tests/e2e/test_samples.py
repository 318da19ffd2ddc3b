"""Prompts and tasks while a run trains: what `generate` and `evaluate --task` make of its checkpoints."""

import json
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import megatfm
from megatfm.config import Config
from megatfm.errors import EXIT_OK, EXIT_REQUEUE, UsageError
from megatfm.inference.decoding import Sampling
from megatfm.inference.evaluation_tasks import evaluate_questions
from megatfm.inference.text import PromptSampler, generate_text, open_text_model
from megatfm.tasks.questions import open_evaluation_task
from megatfm.train.run import train
from tests.support.files import read_lines
from tests.support.finetuning_tasks import write_tasks
from tests.support.forked_commands import run_command
from tests.support.workers import WorkerFailure, Workers

EXTENDED = pytest.mark.extended
PROMPTS = ["import ", "", "Größe 東京\n"]
SHORT = (
    "train.steps=2", "evaluate.every=1", "evaluate.max_rows=4", "checkpoint.every=1", "train.precision=fp64",
    f"evaluate.sample_prompts={json.dumps(PROMPTS)}", "evaluate.sample_tokens=9",
)  # fmt: skip
SEQ2SEQ = ("model.family=encoder_decoder", "objective.name=span_corruption", "data.target_length=64")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "zero3 of an encoder-decoder": (3, ("train.global_batch=6", "train.micro_batch=2", *SEQ2SEQ)),
    "tp x dp": (4, ("parallel.tp=2", "parallel.sequence_parallel=false", "parallel.dp_shard=2", "parallel.zero=1")),
    "experts": (2, ("model.ffn={name='moe', n_experts=4, top_k=2, d_ff=32}", "parallel.ep=2", "parallel.dp_shard=2")),
    "averaged weights": (2, ("optimizer={name='schedule_free_adamw', lr=1e-2}", "lr_schedule.name=constant")),
}  # fmt: skip


def train_with_samples(config: Config) -> int:
    return train(config, sampler=PromptSampler())


def train_until_token(config: Config, token: int) -> tuple[int, int]:
    """Train; at that sampled token, the last rank alone gets a signal. Return the exit code and the sampled tokens."""
    genuine, n_tokens = Sampling.sample, 0

    def sample(sampling: Sampling, logits: Any, position: Any) -> Any:
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens == token and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)
        return genuine(sampling, logits, position)

    with patch.object(Sampling, "sample", sample):
        return train_with_samples(config), n_tokens


def samples(run: Path) -> dict[int, list[dict[str, str]]]:
    return {line["step"]: line["samples"] for line in read_lines(run / "metrics.jsonl")}


# Tasks of averaged weights are below.
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=EXTENDED) if name == "averaged weights" else name for name in LAYOUTS]
)
def test_samples_are_what_generate_makes_of_the_checkpoint(
    workers: Workers, make_config: Any, tmp_path: Path, layout: str
) -> None:
    ranks, settings = LAYOUTS[layout]
    config = make_config(*SHORT, *settings, run="run")
    assert workers.run(train_with_samples, ranks, config) == [EXIT_OK] * ranks
    actual = samples(tmp_path / "run")
    assert list(actual) == [1, 2]
    for step, texts in actual.items():
        loaded = open_text_model(tmp_path / f"run/checkpoints/step-{step:08d}", dtype="float64")
        sampling = Sampling(0.8, top_p=0.95, vocab_size=loaded.tokenizer.vocab_size)
        expected = [generate_text(loaded, prompt, sampling, 9, 1)[0] for prompt in PROMPTS]
        assert texts == [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, expected, strict=True)]
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"step 2  sample: {repr(PROMPTS[0] + actual[2][0]['text'])[1:-1]}" in log


def test_a_signal_interrupts_a_sample(workers: Workers, make_config: Any, tmp_path: Path) -> None:
    config = make_config(*SHORT, run="run")
    assert workers.run(train_until_token, 2, config, 3) == [(EXIT_REQUEUE, 3)] * 2
    assert workers.run(train_with_samples, 2, config) == [EXIT_OK] * 2
    assert workers.run(train_with_samples, 2, make_config(*SHORT, run="whole")) == [EXIT_OK] * 2
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")


def test_sampling_does_not_touch_the_run(workers: Workers, make_config: Any, tmp_path: Path) -> None:
    dropout = ("model.dropout=0.1", "optimizer={name='schedule_free_adamw', lr=1e-2}", "lr_schedule.name=constant")
    workers.run(train_with_samples, 1, make_config(*SHORT, *dropout, run="with"))
    workers.run(train_with_samples, 1, make_config(*SHORT, *dropout, "evaluate.sample_prompts=[]", run="without"))
    curves = []
    for name in ("with", "without"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([(json.loads(line)["loss"], json.loads(line)["evaluation"]) for line in lines])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("settings", "message"), [
    (("model.position={name='learned', max_positions=64}",), r"sample_tokens = 64: the prompt 'import ' has"),
    (("model.family=encoder", "objective.name=masked"), r"model\.family = 'encoder' makes no text"),
])  # fmt: skip
def test_prompts_that_can_not_be_continued_are_refused_before_the_first_step(
    workers: Workers, make_config: Any, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    config = make_config(*SHORT, *settings, "evaluate.sample_tokens=64", run="run")
    with pytest.raises(WorkerFailure, match=message):
        workers.run(train_with_samples, 2, config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("settings", "instead"), [
    (("parallel.pp=2",), r"parallel\.pp = 2 .*set parallel\.pp = 1"),
    (("parallel.cp=2",), r"parallel\.cp = 2 .*set parallel\.cp = 1"),
    (("parallel.tp=2",), r"parallel\.tp = 2 .*set parallel\.sequence_parallel = false"),
    (("train.precision=fp8",), r"train\.precision = 'fp8' .*set train\.precision = 'bf16'"),
])  # fmt: skip
def test_layouts_that_can_not_generate_are_refused_by_name(
    make_config: Any, settings: tuple[str, ...], instead: str
) -> None:
    with pytest.raises(UsageError, match=rf"evaluate\.sample_prompts has 1, and with {instead}"):
        make_config("evaluate.sample_prompts=['x']", *settings, run="run")


def test_an_engine_that_can_not_generate_is_refused_by_name(workers: Workers, make_config: Any) -> None:
    config = make_config(
        "evaluate.sample_prompts=['x']", "parallel.engine=deepspeed", "parallel.zero=2", "optimizer.name=adamw",
        run="run",
    )  # fmt: skip
    with pytest.raises(WorkerFailure, match=r"evaluate\.sample_prompts: parallel\.engine = 'deepspeed' does not"):
        workers.run(train_with_samples, 2, config)


# ------------------------------------------------------------------------------------------------------ tasks


SHORT_WITH_TASKS = (
    "train.steps=2", "evaluate.every=1", "evaluate.max_rows=4", "checkpoint.every=1", "train.precision=fp64",
)  # fmt: skip
TASK_LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "tp x dp": (4, ("parallel.tp=2", "parallel.dp_shard=2")),
    "averaged weights": (2, ("optimizer={name='schedule_free_adamw', lr=1e-2}", "lr_schedule.name=constant")),
}  # fmt: skip


def train_with_tasks(config: Config) -> int:
    return train(config)


def tasks_override(tasks: dict[str, str]) -> str:
    return f"evaluate.tasks={{{', '.join(f'{name} = {json.dumps(path)}' for name, path in tasks.items())}}}"


def evaluations(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line.get("tasks", {}) for line in read_lines(run / "metrics.jsonl")}


# What the command says of a run of one rank is below.
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=EXTENDED) if name == "one rank" else name for name in TASK_LAYOUTS]
)
def test_curves_are_what_evaluate_says_of_the_checkpoints(
    workers: Workers, make_config: Any, tmp_path: Path, layout: str
) -> None:
    ranks, settings = TASK_LAYOUTS[layout]
    tasks = write_tasks(tmp_path)
    config = make_config(*SHORT_WITH_TASKS, *settings, tasks_override(tasks), run="run")
    assert workers.run(train_with_tasks, ranks, config) == [EXIT_OK] * ranks
    actual = evaluations(tmp_path / "run")
    assert list(actual) == [1, 2]
    for step, by_task in actual.items():
        loaded = open_text_model(tmp_path / f"run/checkpoints/step-{step:08d}", dtype="float64")
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
    workers.run(train_with_tasks, 1, make_config(*SHORT_WITH_TASKS, "model.dropout=0.1", tasks, run="with"))
    workers.run(train_with_tasks, 1, make_config(*SHORT_WITH_TASKS, "model.dropout=0.1", run="without"))
    curves = []
    for name in ("with", "without"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([(json.loads(line)["loss"], json.loads(line)["evaluation"]) for line in lines])
    assert curves[0] == curves[1]
    assert run_command("report", str(tmp_path / "with"), "--with", str(tmp_path / "without")) == 0
    page = (tmp_path / "with/report.html").read_text()
    for title in ("Right answers of tasks", "Accuracy on tasks"):
        assert title in page
    run_command("report", str(tmp_path / "without"))
    assert "Right answers of tasks" not in (tmp_path / "without/report.html").read_text()


def test_the_command_leaves_results_in_the_run(
    workers: Workers, make_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path)
    workers.run(train_with_tasks, 1, make_config(*SHORT_WITH_TASKS, run="run"))
    words = [
        "evaluate", str(tmp_path / "run"), "--task", tasks["choice"], "--task", f"other={tasks['cloze']}",
    ]  # fmt: skip
    assert run_command(*words, "--batch", "5", "--limit", "4", "--device", "cpu") == 0
    stored = json.loads((tmp_path / "run/evaluation_tasks.json").read_text())
    assert stored["step"] == 2
    assert {name: task["questions"] for name, task in stored["tasks"].items()} == {"choice": 4, "other": 4}
    records = (tmp_path / "run/predictions/tasks/other.jsonl").read_text().splitlines()
    assert [json.loads(record)["row"] for record in records] == [1, 2, 3, 4]
    assert "accuracy_per_byte" in capsys.readouterr().out
    metrics = megatfm.load(tmp_path / "run").evaluate_tasks({"choice": tasks["choice"]}, limit=4, batch=3)
    assert metrics["choice"] == pytest.approx(stored["tasks"]["choice"]["metrics"], rel=1e-6)


@pytest.mark.parametrize(("words", "message"), [
    (["--batch", "3"], "--batch is for tasks: give --task FILE or --harness NAME"),
    (["--batch", "3", "--limit", "1"], "--batch, --limit are for tasks: give"),
    (["--task", "x.toml", "--baselines"], "evaluate validation sets by a second command"),
    (["--task", "x.toml"], "x.toml: there is no such file"),
    ([], "a model in the Hugging Face format has no validation sets: give --task FILE or --harness NAME"),
    (["--task", "a/x.toml", "--task", "b/x.toml"], "'x' is named already"),
    (["--task", "x.toml", "--shots", "1"], "--shots is for tasks of the harness"),
    (["--task", "x.toml", "--limit", "-1"], "limit = -1: choose 1 or more"),
])  # fmt: skip
def test_wrong_options_of_evaluate_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run_command("evaluate", str(tmp_path), *words) == 2
    assert message in capsys.readouterr().err
