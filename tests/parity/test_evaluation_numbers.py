"""Numbers of an evaluation, of tasks and of images, are the same on any ranks, in any batches, padded and packed."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatfm.config import Config, ModelConfig
from megatfm.corpus.manifest import NO_TOKENIZER
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from megatfm.inference.image_evaluation import collect_classes
from megatfm.inference.likelihood import Continuation, score
from megatfm.parallel.mesh import build_mesh
from megatfm.tasks.question_scores import average_metrics, score_questions
from megatfm.tasks.questions import list_scored_pairs, open_evaluation_task, split_pair
from megatfm.train.build import build_engine
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate_sets
from megatfm.train.evaluation_tasks import TaskEvaluator
from tests.support.finetuning_tasks import small_config, write_tasks
from tests.support.golden_curves import CLASSES, SIDE, make_image_files
from tests.support.image_models import COMMON
from tests.support.parity import one_device
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
    model, results = one_device(config.model, config.train.seed).eval(), {}
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


IMAGES = 19
MODELS: dict[str, dict[str, Any]] = {
    "image_classification": {"extra_heads.classifier.n_classes": CLASSES, "extra_heads.classifier.hidden": True},
    "contrastive": {
        "family": "two_towers",
        "text_tower": {"d_model": 12, "n_layers": 1, "n_heads": 2, "d_ff": 24, "max_positions": 8},
        "contrastive": {"width": 10, "scale": 3.0},
    },
}  # fmt: skip
ROW_LENGTHS = {
    "image_classification": [{"sequence_length": 5}, {"sequence_length": 21}],
    "contrastive": [{"sequence_length": 5, "target_length": 8}, {"sequence_length": 21, "target_length": 30}],
}  # fmt: skip
"""Rows of one image, which are padded on the captions' side, and of several."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and corpora of images with classes or captions, of which some are the same."""
    corpora = tmp_path_factory.mktemp("images")
    write_tasks(corpora)
    _, tokenizer = open_tokenizer(evaluation_config(corpora, "contrastive", ROW_LENGTHS["contrastive"][0]))
    assert tokenizer is not None
    for name, hash_ in (("image_classification", NO_TOKENIZER), ("contrastive", tokenizer.hash)):
        with ShardWriter(corpora / name, tokenizer_hash=hash_, token_dtype="uint16") as writer:
            for number in range(IMAGES):
                has_caption = name == "contrastive"
                caption = np.arange(20, 21 + number % 5) + number // 2 * has_caption
                writer.add(
                    f"{number:04d}", (caption if has_caption else caption[:0]).astype(np.uint16), "drawn", 1,
                    members=make_image_files(number),
                )  # fmt: skip
            writer.finish({})
    return corpora


def evaluation_config(corpora: Path, objective: str, data: dict[str, int], micro_batch: int = 1) -> Config:
    model = {
        **COMMON, **MODELS[objective], "init.std": 0.5, "embedding.channels": 1, "embedding.mean": [0.5],
        "embedding.std": [0.5], "position.grid": (2, 2),
    }  # fmt: skip
    corpus = str(corpora / objective)
    return Config.model_validate(
        {
            "name": "images",
            "run_dir": str(corpora / "run"),
            "model": ModelConfig.from_dotted(model),
            "objective": {"name": objective},
            "data": {
                "train": corpus,
                "validation": {"images": corpus},
                "images": {"size": SIDE, "crop_pct": 1.0},
                **({"tokenizer": str(corpora / "tokenizer.model")} if objective == "contrastive" else {}),
                **data,
            },
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 32 * 7 * 6, "micro_batch": micro_batch, "seed": 5},
        }
    )


def evaluate_images(corpora: Path, objective: str) -> list[dict[str, Any]]:
    """Evaluate an untrained model in batches of 1, 7 and 32, each with one image in a row, then with several."""
    torch.set_num_threads(1)
    results = []
    for micro_batch in (1, 7, 32):
        for data in ROW_LENGTHS[objective]:
            config, tokenizer = open_tokenizer(evaluation_config(corpora, objective, data, micro_batch))
            mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
            engine = build_engine(config, mesh, torch.device("cpu"), "fp64")
            with collect_classes(engine.model, SIDE // 2, n_mistakes=3) as collector:
                sets = evaluate_sets(engine, open_corpora(config, tokenizer), config, 0, lambda: None)
            result = sets["images"]
            counts, mistakes = collector.gather()
            surest = [(mistake.label, mistake.predicted) for mistake in mistakes]
            results.append(
                {"rows": result["rows"], "loss": result["loss"], "metrics": result["metrics"],
                 "seen": (counts, surest)},
            )  # fmt: skip
    return results


@pytest.mark.parametrize("objective", MODELS)
def test_images_have_the_same_metrics(workers: Workers, corpora: Path, objective: str) -> None:
    (alone,) = workers.run(evaluate_images, 1, corpora, objective)
    expected = alone[0]
    assert expected["metrics"].keys() == {"top1", "top5"}
    assert 0 < expected["metrics"]["top1"] < expected["metrics"]["top5"] < 1
    if objective == "image_classification":
        assert sum(count for *_, count in expected["seen"][0]) == IMAGES
    for ranks in (1, 3):  # three have unequal shares, as two have
        for results in workers.run(evaluate_images, ranks, corpora, objective) if ranks > 1 else [alone]:
            for number, result in enumerate(results):
                assert result["rows"] <= IMAGES // 3 if number % 2 else result["rows"] == IMAGES
                assert result["metrics"] == expected["metrics"]
                assert result["seen"] == expected["seen"]
                assert math.isclose(result["loss"], expected["loss"], rel_tol=1e-12)
