"""Evaluate a model on tasks without training: multiple choice and cloze by likelihood, generation, retrieval."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatfm.errors import MegatfmError, UsageError
from megatfm.files import atomic_write, name_write_errors, to_strict_json
from megatfm.inference.batched_generation import TextRequest, generate_texts
from megatfm.inference.embeddings import SentenceEmbedder
from megatfm.inference.harness import run_harness
from megatfm.inference.likelihood import BATCH_SIZE, Continuation, check_fits, encode_continuation, score
from megatfm.inference.text import TextModel
from megatfm.parallel import distributed
from megatfm.tasks.question_scores import QuestionResult, score_questions, score_rank, score_text, summarise_results
from megatfm.tasks.questions import (
    EvaluationTask,
    TextPair,
    list_question_pairs,
    list_scored_pairs,
    open_evaluation_task,
)
from megatfm.terminal import format_counted

log = logging.getLogger("megatfm")

RESULTS, PREDICTIONS = "evaluation_tasks.json", Path("predictions") / "tasks"


@dataclass(frozen=True)
class EvaluatedTask:
    """Metrics of a task with their intervals, and a record of each question."""

    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks of lm-evaluation-harness by name. path: folder with YAML files of further ones. shots: None: the task's.
    chat_template: whether questions are rendered by the model's chat template."""

    names: Sequence[str]
    path: str | None = None
    shots: int | None = None
    chat_template: bool = False


def evaluate_task_files(
    open_model: Callable[[torch.device], TextModel],
    files: Mapping[str, str | Path],
    harness: HarnessTasks | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int = 0,
    device: distributed.Device = "auto",
    embedding_options: Callable[[nn.Module], Mapping[str, Any]] | None = None,
    out_dir: Path | None = None,
    show: Callable[[Mapping[str, EvaluatedTask]], None] = lambda results: None,
) -> dict[str, EvaluatedTask] | None:
    """Evaluate a model on task files by name and on tasks of the harness; write results and predictions to `out_dir`.

    open_model: opens it on a device. embedding_options: fields of a `SentenceEmbedder`, for models that are no run.
    limit: number of questions of each task; 0: all. show: called with the results before they are written, which may
    fail. Collective: each rank holds the model and takes a share of the questions; ranks other than 0 return None.
    Raises UsageError.
    """
    if repeated := sorted(files.keys() & set(harness.names if harness else ())):
        raise UsageError(
            f"--harness {repeated[0]}: a task file has this name, and one result would replace the other: give it "
            f"another name, --task NAME={files[repeated[0]]}"
        )
    tasks = open_tasks(files, limit)
    with distributed.distributed_session(device=device) as rank:
        loaded = open_model(rank.device)
        n_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        log.info("%s: %s parameters on %s", loaded.config.model.family, f"{n_parameters:,}", rank.device)
        options = embedding_options(loaded.model) if embedding_options else None
        results = {
            task.name: evaluate_questions(loaded, task, batch_size=batch_size, embedding_options=options)
            for task in tasks
        }
        if harness and harness.names:
            log.info("tasks of lm-evaluation-harness: %s", ", ".join(harness.names))
            results |= _run_harness(loaded, harness, limit, batch_size)
    if not rank.is_main:
        return None
    show(results)
    if out_dir is not None:
        write_results(out_dir, loaded.step, results)
    return results


def open_tasks(files: Mapping[str, str | Path], limit: int = 0) -> list[EvaluationTask]:
    """Read task files by name. limit: number of questions of each; 0: all. Raises UsageError."""
    if limit < 0:
        raise UsageError(f"limit = {limit}: choose 1 or more questions of each task, or 0 for all")
    return [open_evaluation_task(path, name=name, limit=limit) for name, path in files.items()]


def _run_harness(loaded: TextModel, harness: HarnessTasks, limit: int, batch_size: int) -> dict[str, EvaluatedTask]:
    results = run_harness(
        loaded,
        harness.names,
        include_path=harness.path,
        shots=harness.shots,
        chat_template=harness.chat_template,
        limit=limit,
        batch_size=batch_size,
    )
    evaluated = {}
    for name, metrics in results.items():
        questions = int(metrics.pop("sample_len", 0))
        summary = {"kind": "harness", "questions": questions, "metrics": metrics, "intervals": {}}
        evaluated[name] = EvaluatedTask(summary, [])
    return evaluated


def write_results(folder: Path, step: int, results: Mapping[str, EvaluatedTask]) -> None:
    """Write evaluation_tasks.json and each task's records. Raises MegatfmError if a file can't be written."""
    with name_write_errors(folder / PREDICTIONS):
        (folder / PREDICTIONS).mkdir(parents=True, exist_ok=True)
        for name, result in results.items():
            lines = [to_strict_json(record, ensure_ascii=False) + "\n" for record in result.records]
            atomic_write(folder / PREDICTIONS / f"{name}.jsonl", "".join(lines))
    stored = {"step": step, "tasks": {name: result.summary for name, result in results.items()}}
    with name_write_errors(folder / RESULTS):
        atomic_write(folder / RESULTS, to_strict_json(stored, indent=2) + "\n")


def evaluate_questions(
    loaded: TextModel,
    task: EvaluationTask,
    *,
    batch_size: int = BATCH_SIZE,
    embedding_options: Mapping[str, Any] | None = None,
) -> EvaluatedTask:
    """Evaluate a model on a task. Collective if there is a process group. Raises UsageError, MegatfmError.

    embedding_options: fields of a `SentenceEmbedder`, for retrieval; None: those of a run.
    """
    log.info("%s: %s (%s)", task.name, format_counted(len(task.questions), "question"), task.config.kind)
    if task.config.kind == "retrieval":
        results = _find_answers(make_sentence_embedder(loaded, embedding_options), task, batch_size)
    elif task.config.kind == "generation":
        results = _generate_answers(loaded, task, batch_size)
    else:
        results = _compare_answers(loaded, task, batch_size)
    return EvaluatedTask(summarise_results(task, results), [dict(result.record) for result in results])


def _generate_answers(loaded: TextModel, task: EvaluationTask, batch_size: int) -> list[QuestionResult]:
    config = task.config
    requests = [
        TextRequest(question.prompt, config.max_tokens, tuple(config.stop), place=f"{config.data}, row {number}")
        for number, question in enumerate(task.questions, start=1)
    ]
    texts = generate_texts(loaded, requests, batch_size=batch_size)
    return [score_text(question, text) for question, text in zip(task.questions, texts, strict=True)]


def make_sentence_embedder(loaded: TextModel, options: Mapping[str, Any] | None = None) -> SentenceEmbedder:
    """Return a model's sentence embedder. options: its fields; None: those of a run."""
    config, prefix_ids = loaded.config, loaded.prompt_prefix_ids
    max_tokens = config.model.position.limit or config.data.sequence_length
    fields = {"max_tokens": max_tokens} if options is None else options
    return SentenceEmbedder(loaded.model, loaded.tokenizer, prefix_ids=prefix_ids, **fields)


def _find_answers(embedder: SentenceEmbedder, task: EvaluationTask, batch_size: int) -> list[QuestionResult]:
    """Rank all answers of a task by the cosine of their vectors to a prompt's. The first of equal ones ranks higher."""
    answers = list(dict.fromkeys(question.accepted[0] for question in task.questions))
    prompts_QD, answers_AD = (
        embedder.encode(texts, normalize=True, batch_size=batch_size).double()
        for texts in ([question.prompt for question in task.questions], answers)
    )
    if not (prompts_QD.isfinite().all() and answers_AD.isfinite().all()):
        raise MegatfmError(
            f"{task.name}: vectors are not finite: the weights are, or the training was, broken; use an earlier "
            "checkpoint"
        )
    results = []
    for question, prompt_D in zip(task.questions, prompts_QD, strict=True):
        right, similarities_A = answers.index(question.accepted[0]), answers_AD @ prompt_D
        nearer = similarities_A > similarities_A[right]
        nearer[:right] |= similarities_A[:right] == similarities_A[right]
        results.append(score_rank(question, 1 + int(nearer.sum())))
    return results


def _compare_answers(loaded: TextModel, task: EvaluationTask, batch_size: int) -> list[QuestionResult]:
    """Score every answer after its prompt, and after the unconditional prompt if there is one."""
    rows = {
        pair: question.number + 1 for question in reversed(task.questions) for pair in list_question_pairs(question)
    }
    pairs = list_scored_pairs(task)
    continuations = [_encode(loaded, task, pair, rows[pair]) for pair in pairs]
    likelihoods = score(loaded.model, continuations, batch_size=batch_size)
    return score_questions(task, dict(zip(pairs, likelihoods, strict=True)))


def _encode(loaded: TextModel, task: EvaluationTask, pair: TextPair, row: int) -> Continuation:
    place = f"{task.config.data}, row {row}"
    try:
        continuation = encode_continuation(loaded, pair.prompt, pair.answer)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    check_fits(loaded.model, continuation, f"{place}: its text")
    return continuation
