"""Tasks evaluated while a run trains, by the engine and in packed rows, against one padded row after another."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.inference.likelihood import Continuation, score
from megatfm.parallel.mesh import build_mesh
from megatfm.tasks.question_scores import average_metrics, score_questions
from megatfm.tasks.questions import list_scored_pairs, open_evaluation_task, split_pair
from megatfm.train.build import build_engine
from megatfm.train.corpora import open_tokenizer
from megatfm.train.evaluation_tasks import TaskEvaluator
from tests.support.finetuning_tasks import build_initial_model, small_config, write_tasks
from tests.support.workers import Workers

Results = Mapping[str, Mapping[str, Any]]
DECISIONS = ("accuracy", "f1", "exact_match", "matthews")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


def tasks_config(folder: Path, changes: Mapping[str, Any]) -> Config:
    tasks = {name: str(folder / f"{name}.toml") for name in ("choice", "cloze")}
    config, _ = open_tokenizer(small_config(folder).with_changes({"evaluate.tasks": tasks, **changes}))
    return config


def by_engine(folder: Path, cases: list[dict[str, Any]]) -> list[Results]:
    torch.set_num_threads(1)
    results = []
    for changes in cases:
        config = tasks_config(folder, changes)
        _, tokenizer = open_tokenizer(config)
        mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
        engine = build_engine(config, mesh, torch.device("cpu"), "fp64")
        results.append(TaskEvaluator(engine, config, tokenizer).evaluate())
    return results


@cache
def by_rows(folder: Path, changes: tuple[tuple[str, Any], ...] = ()) -> Results:
    config = tasks_config(folder, dict(changes))
    _, tokenizer = open_tokenizer(config)
    assert tokenizer is not None
    model, results = build_initial_model(config), {}
    for name, path in config.evaluate.tasks.items():
        task = open_evaluation_task(path)
        pairs, continuations = list_scored_pairs(task), []
        for pair in pairs:
            prompt, answer = split_pair(tokenizer, pair)
            continuations.append(Continuation([tokenizer.bos, *tokenizer.encode(prompt).tolist()], answer))
        scored = dict(zip(pairs, score(model, continuations, batch_size=3), strict=True))
        metrics = average_metrics(task.config.kind, score_questions(task, scored))
        results[name] = metrics if task.config.kind == "choice" else metrics | {"accuracy": None}
    return results


def check(results: Results, expected: Results) -> None:
    assert results.keys() == expected.keys()
    for name, metrics in expected.items():
        known = {metric: value for metric, value in metrics.items() if value is not None}
        assert results[name].keys() == known.keys()
        for metric, value in known.items():
            if metric.startswith(DECISIONS):
                assert results[name][metric] == value, (name, metric)
            else:
                assert math.isclose(results[name][metric], value, rel_tol=1e-12), (name, metric)


BATCHES = [{"train.micro_batch": n, "train.global_batch": 32 * 7 * 6} for n in (1, 7, 32)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_batches_and_rows_change_no_result(workers: Workers, folder: Path, ranks: int) -> None:
    """26 rows at most, of which ranks have unequal numbers; rows of 48 hold one or two examples, of 200 up to ten."""
    cases = [{**batch, "data.sequence_length": length} for batch in BATCHES for length in (48, 200)]
    for results in workers.run(by_engine, ranks, folder, cases):
        for result in results:
            check(result, by_rows(folder))


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2}, "pipeline": {"pp": 2}, "context": {"cp": 2}, "replicas": {"dp_replicate": 2, "zero": 0},
}  # fmt: skip


def test_layouts_change_no_result(workers: Workers, folder: Path) -> None:
    cases = [
        {f"parallel.{key}": value for key, value in layout.items()} | {"train.micro_batch": 2, "train.global_batch": 4}
        for layout in LAYOUTS.values()
    ]
    for results in workers.run(by_engine, 2, folder, cases):
        for result in results:
            check(result, by_rows(folder))


MORE_TERMS = {"model.n_mtp_heads": 2, "model.ffn": {"name": "moe", "d_ff": 16, "n_experts": 4, "top_k": 2}}


def test_other_terms_and_heads_further_ahead_are_left_out(workers: Workers, folder: Path) -> None:
    """Experts add terms to the loss, and heads for later tokens use the head over the vocabulary again."""
    cases = [MORE_TERMS | {"parallel.ep": 2, "parallel.dp_shard": 2}, MORE_TERMS | {"parallel.pp": 2}]
    cases = [case | {"train.micro_batch": 2, "train.global_batch": 4} for case in cases]
    expected = by_rows(folder, tuple((key, value) for key, value in _hashable(MORE_TERMS)))
    for results in workers.run(by_engine, 2, folder, cases):
        for result in results:
            check(result, expected)


def _hashable(changes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return changes of tables as changes of their keys."""
    flat: list[tuple[str, Any]] = []
    for key, value in changes.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat += [(f"{key}.{name}", part) for name, part in inner] or [(key, value)]
    return flat


def refused(folder: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        by_engine(folder, [changes])
    return str(error.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"data.sequence_length": 16}, r"evaluate.tasks.choice: the answer ' .*more than data.sequence_length = 16"),
    ({"objective": {"name": "prefix"}}, "evaluate.tasks is for decoders that predict next tokens"),
    ({"evaluate.tasks": {"text": "text.toml"}}, "evaluate.tasks.text: kind = 'generation' has no likelihood"),
])  # fmt: skip
def test_a_task_that_a_layout_can_not_evaluate_is_refused(
    workers: Workers, folder: Path, changes: dict[str, Any], message: str
) -> None:
    task = (folder / "cloze.toml").read_text().replace("cloze", "generation")
    (folder / "text.toml").write_text(task)
    if "evaluate.tasks" in changes:
        changes = {"evaluate.tasks": {"text": str(folder / "text.toml")}}
    (reason,) = workers.run(refused, 1, folder, changes)
    assert re.search(message, reason)
