"""Evaluate the best checkpoint of a fine-tuning run on its files, and predict the labels of other files."""

import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from megatfm import checkpoint
from megatfm.checkpoint.locate import find_best_checkpoint
from megatfm.config import Config
from megatfm.engines.interface import RunsModel
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import atomic_write, name_write_errors, to_strict_json
from megatfm.inference.batched_generation import GeneratedAnswers, answer_rows
from megatfm.inference.evaluate import evaluate_set, keep_validation, load_run_config, open_engine
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.parallel import distributed
from megatfm.tasks.files import read_rows
from megatfm.tasks.metrics import (
    bootstrap_interval,
    compute_class_scores,
    compute_perplexity,
    confusion_matrix,
    exact_match,
    list_metrics,
    mean_interval,
    token_f1,
)
from megatfm.tasks.predictions import Predictions, collect_predictions, get_engine_model
from megatfm.tasks.span_predictions import SpanPredictions
from megatfm.terminal import format_counted
from megatfm.tokenizers import Tokenizer
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.finetuning import prepare_task_corpus

log = logging.getLogger("megatfm")

FilePredictions = Predictions | SpanPredictions | GeneratedAnswers
RESULTS, PREDICTIONS = "task.json", "predictions"


class EvaluatedFile(NamedTuple):
    """Results of a file: predictions or answers, mean loss, number of examples, the objective's metrics."""

    predictions: FilePredictions | None = None
    loss: float = math.nan
    n_examples: int = 0
    objective_metrics: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class TaskResults:
    """Results of the best checkpoint: its folder and step; set → examples, loss, metrics, intervals, predictions."""

    checkpoint: Path
    step: int
    sets: Mapping[str, Mapping[str, Any]]


def evaluate_task(
    run_dir: Path, *, trust_plugins: bool = False, show: Callable[[TaskResults], None] = lambda results: None
) -> TaskResults | None:
    """Evaluate a run's best checkpoint on its validation and test files; write task.json and predictions to the run.

    show: called with the results before they are written, which may fail. Collective; ranks other than 0 return None.
    Raises UsageError, MegatfmError.
    """
    config, tokenizer = _open_run(run_dir, trust_plugins)
    task = config.task
    assert task is not None
    sets = {name: path for name in ("validation", "test") if (path := getattr(task, name))}
    evaluated = _evaluate_files(run_dir, config, tokenizer, sets, with_labels=True)
    if evaluated is None:
        return None
    source, by_set = evaluated
    results: dict[str, dict[str, Any]] = {}
    predictions_by_file: dict[Path, FilePredictions] = {}
    threshold = None if task.validation else 0.0
    for name, file_result in by_set.items():
        predictions, loss = file_result.predictions, file_result.loss
        results[name] = {"examples": file_result.n_examples, "loss": loss}
        if not task.has_head:
            metrics = dict(file_result.objective_metrics) or {"perplexity": compute_perplexity(loss)}
            results[name] |= {"metrics": metrics, "intervals": {}}
        if predictions is None:
            continue
        if isinstance(predictions, SpanPredictions):
            predictions = replace(predictions, threshold=threshold)
            threshold = predictions.answered_up_to
        file = run_dir / PREDICTIONS / f"{name}.jsonl"
        predictions_by_file[file] = predictions
        summary = summarise(predictions, sets[name])
        metrics = {**results[name].get("metrics", {}), **summary["metrics"]}
        results[name] |= {**summary, "metrics": metrics, "predictions": str(file)}
    step = dict(checkpoint.read_state(source))["step"]
    task_results = TaskResults(source, int(str(step)), results)
    show(task_results)
    for file, predictions in predictions_by_file.items():
        _write_predictions(file, predictions)
    stored = {"checkpoint": source.name, "step": step, "labels": task.labels, "sets": results}
    with name_write_errors(run_dir / RESULTS):
        atomic_write(run_dir / RESULTS, to_strict_json(stored, indent=2) + "\n")
    return task_results


def summarise(predictions: FilePredictions, file: str) -> dict[str, Any]:
    """Return metrics, intervals of means over examples, and results by class. file: with the labels."""
    task = predictions.task
    if isinstance(predictions, GeneratedAnswers):
        return predictions.summarise([str(row[task.label]) for row in read_rows(file)])
    summary: dict[str, Any] = {"metrics": predictions.metrics(), "intervals": {}}
    if isinstance(predictions, SpanPredictions):
        for name, metric in (("f1", token_f1), ("exact_match", exact_match)):
            summary["intervals"][name] = mean_interval(predictions.scores(metric))
        if task.no_answer:
            summary["threshold"] = predictions.answered_up_to
        return summary
    targets, predicted = predictions.expected, predictions.predicted
    metrics = list_metrics(task)
    means = [name for name in dict.fromkeys((next(iter(metrics)), task.best_by)) if name in metrics]
    summary["examples"] = len(np.unique(predictions.examples))
    if task.form != "tagging":  # whose words are not independent
        summary["intervals"] = {name: bootstrap_interval(metrics[name], targets, predicted) for name in means}
    if task.form in ("classification", "tagging"):
        summary["per_class"] = compute_class_scores(targets, predicted, task.labels)
        summary["confusion"] = confusion_matrix(targets, predicted, len(task.labels))
    return summary


def predict_file(
    run_dir: Path,
    file: str,
    out: str | None = None,
    *,
    search: Mapping[str, float] = MappingProxyType({}),
    trust_plugins: bool = False,
) -> tuple[Path, int] | None:
    """Predict the labels of a file's rows by a run's best checkpoint; return the predictions file and its lines.

    out: the predictions file; None: in the run. search: keys of the task that decide how answers are generated
    (`beams`, `length_penalty`), in place of the run's. Collective; ranks other than 0 return None. Raises UsageError.
    """
    config, tokenizer = _open_run(run_dir, trust_plugins)
    task = config.task
    assert task is not None
    if search and task.form != "generation":
        raise UsageError(
            f"{run_dir}: --beams and --length-penalty: its task, form = {task.form!r}, generates no answers: "
            "leave them out"
        )
    if "length_penalty" in search and search.get("beams", task.beams) < 2:
        raise UsageError("--length-penalty: is for a beam search: give --beams 2 or more, too, or leave it out")
    config = config.model_copy(update={"task": task.model_copy(update=dict(search))})
    if task.form == "chat":
        raise UsageError(f"{run_dir}: its task, form = 'chat', has no labels to predict: use `megatfm generate`")
    if not Path(file).exists():
        raise UsageError(f"{file}: there is no such file: give one with column {task.text!r}")
    target = Path(out) if out else run_dir / PREDICTIONS / f"{Path(file).stem}.jsonl"
    if target.exists() and target.samefile(file):
        raise UsageError(f"--out {target}: the predictions would overwrite the rows: give another file")
    evaluated_file = {"validation": task.validation, "test": task.test}.get(Path(file).stem)
    if out is None and evaluated_file and not _are_same_file(evaluated_file, file):
        raise UsageError(
            f"{file}: {target} is for the predictions of task.{Path(file).stem} = {evaluated_file}, which the report "
            "shows: give --out FILE"
        )
    threshold = _read_threshold(run_dir) if task.form == "span_extraction" else 0.0
    evaluated = _evaluate_files(run_dir, config, tokenizer, {"predicted": file}, with_labels=False)
    if evaluated is None:
        return None
    predictions = evaluated[1]["predicted"].predictions
    assert predictions is not None
    if isinstance(predictions, SpanPredictions):
        predictions = replace(predictions, threshold=threshold)
    return target, _write_predictions(target, predictions)


def _are_same_file(first: str, second: str) -> bool:
    return Path(first).exists() and Path(first).samefile(second)


def _read_threshold(run_dir: Path) -> float:
    """Return the no-answer threshold that a run chose on its validation file; 0 if it chose none.

    Raises MegatfmError if the results are damaged.
    """
    path = run_dir / RESULTS
    if not path.is_file():
        return 0.0
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return float(results["sets"].get("validation", {}).get("threshold", 0.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MegatfmError(
            f"{path}: can't be read ({error}), and the run's threshold for no answer is in it: evaluate the run again, "
            f"`megatfm finetune {shlex.quote(str(run_dir))}`"
        ) from None


def _open_run(run_dir: Path, trust_plugins: bool) -> tuple[Config, Tokenizer]:
    """Return a run's config, with one replica per process, and its tokenizer. Raises UsageError."""
    config = load_run_config(run_dir, trust_plugins=trust_plugins)
    if config.task is None:
        raise UsageError(f"{run_dir}: a run without a [task]: give one that `megatfm finetune` trained")
    config, tokenizer = open_tokenizer(config.model_copy(update={"run_dir": str(run_dir.absolute())}))
    assert tokenizer is not None
    return config, tokenizer


def _evaluate_files(
    run_dir: Path, config: Config, tokenizer: Tokenizer, files: Mapping[str, str], *, with_labels: bool
) -> tuple[Path, dict[str, EvaluatedFile]] | None:
    """Return the checkpoint and the results of each file; None on ranks other than 0. Collective."""
    task = config.task
    assert task is not None
    with distributed.distributed_session(device=config.train.device) as rank:
        tokenized = files if task.has_head or with_labels else {}
        corpora_read = run_on_rank_0_raising(
            lambda: {
                name: prepare_task_corpus(config, path, tokenizer, with_labels=with_labels)
                for name, path in tokenized.items()
            }
        )
        folders = {name: str(corpus.folder) for name, corpus in corpora_read.items()}
        source = run_on_rank_0_raising(lambda: find_best_checkpoint(run_dir))
        corpora = open_corpora(keep_validation(config, folders), tokenizer)
        engine, _ = open_engine(config, source, rank, format_counted(len(files), "file"))
        results: dict[str, EvaluatedFile] = {}
        for name, rows in corpora.validation.items():
            with collect_predictions(get_engine_model(engine)) if task.has_head else nullcontext() as collector:
                result = evaluate_set(engine, name, rows, corpora.objective, None, config.train.micro_batch)
            predictions: FilePredictions | None = collector.gather(task, folders[name]) if collector else None
            results[name] = EvaluatedFile(
                predictions, float(result["loss"]), corpora_read[name].n_examples, result.get("metrics", {})
            )
        for name, file in files.items():
            if task.text_metrics or name not in tokenized:
                log.info("%s: generating answers", name)
                answers = _generate_answers(engine, tokenizer, config, file)
                results[name] = results.get(name, EvaluatedFile())._replace(predictions=answers)
    return (source, results) if rank.is_main else None


def _generate_answers(engine: Any, tokenizer: Tokenizer, config: Config, file: str) -> GeneratedAnswers:
    """Generate answers to the rows of a file. Collective."""
    if not isinstance(engine, RunsModel):
        raise UsageError(
            f"parallel.engine = {config.parallel.engine!r} can't generate answers, which task.text_metrics needs: "
            "leave them out, or use parallel.engine = 'native'"
        )
    rows = read_rows(file)
    return engine.run_model(lambda model: answer_rows(model, tokenizer, config, file, rows))


def _write_predictions(file: Path, predictions: FilePredictions) -> int:
    """Write a line for each row; return the number of lines."""
    rows = list(predictions.rows())
    with name_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, "".join(to_strict_json(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)
