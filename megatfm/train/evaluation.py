"""Evaluates validation sets: loss and, if the loss is the text's likelihood, bits per byte."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from megatfm.config import Config
from megatfm.data.dataset import SizedRowDataset
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.sequences import IGNORE_INDEX
from megatfm.engines.interface import Engine, RunsModel
from megatfm.objectives import Objective
from megatfm.tasks.predictions import collect_predictions, get_engine_model
from megatfm.tokenizers import Tokenizer
from megatfm.train.corpora import Corpora

log = logging.getLogger("megatfm")
T = TypeVar("T")


def evaluate(
    engine: Engine,
    rows: SizedRowDataset,
    objective: Objective,
    byte_lengths: NDArray[np.int64] | None,
    *,
    micro_batch: int,
    max_rows: int = 0,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Evaluate one validation set. A collective.

    Returns "loss", "tokens" (targets of the first loss term) and "rows"; for an objective with several terms "terms",
    their means; for one with metrics "metrics". If a term is the text's likelihood, also "bits_per_byte" and "bytes".
    Every text is coded from its first byte to its end, end-of-text token included, so bits per byte compare with those
    of a file compressor. The model doesn't see text before the start of a row, which can only make the value worse.

    byte_lengths [vocabulary]: bytes of text of each token id; None if unknown. max_rows: 0 for all rows. on_batch:
    called for each batch.
    """
    byte_lengths = byte_lengths if objective.likelihood_term else None
    stop = min(max_rows or len(rows), len(rows))
    n_bytes = torch.zeros(1, dtype=torch.float64, device=engine.device)
    with _make_loader(engine, rows, micro_batch, stop) as loader:

        def batches() -> Iterator[dict[str, NDArray[Any]]]:
            for microbatches in loader:
                on_batch()
                for batch in microbatches:
                    if byte_lengths is not None:
                        targets = batch["targets"]
                        n_bytes.add_(int(byte_lengths[targets[targets != IGNORE_INDEX]].sum()))
                    yield batch

        result = engine.evaluate(batches(), objective)
    engine.mesh.all_reduce_(n_bytes, engine.mesh.batch_axes)
    results: dict[str, Any] = {"loss": result.loss}
    if objective.likelihood_term and byte_lengths is not None:
        bits = result.sums[objective.likelihood_term] / math.log(2)
        results |= {"bits_per_byte": bits / max(float(n_bytes), 1.0), "bytes": int(n_bytes)}
    terms = {term: mean for term, mean in result.terms.items() if term not in objective.metrics}
    if len(terms) > 1:
        results["terms"] = terms
    if objective.metrics:
        results["metrics"] = {name: result.terms[name] for name in objective.metrics}
    return results | {"tokens": result.target_counts[next(iter(objective.loss_weights))], "rows": stop}


def compute_loss_by_position(
    engine: Engine,
    rows: SizedRowDataset,
    objective: Objective,
    *,
    n_buckets: int,
    n_rows: int,
    micro_batch: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[float]:
    """Return the mean loss in each of `n_buckets` equal ranges of token positions, over the first `n_rows` rows.

    Runs one pass per bucket and ignores all targets outside it, which works with every engine and layout. A bucket
    without targets gives NaN. The objective must have a likelihood term. A collective.
    """
    term = objective.likelihood_term
    assert term is not None
    losses = []
    for bucket in range(n_buckets):
        with _make_loader(engine, rows, micro_batch, min(n_rows, len(rows))) as loader:

            def batches(loader: DataLoader = loader, bucket: int = bucket) -> Iterator[dict[str, Any]]:
                for microbatches in loader:
                    on_batch()
                    for batch in microbatches:
                        targets = batch["targets"]
                        in_bucket = np.arange(targets.shape[1]) * n_buckets // targets.shape[1] == bucket
                        yield {**batch, "targets": np.where(in_bucket, targets, IGNORE_INDEX)}

            result = engine.evaluate(batches(), objective)
        count = result.target_counts[term]
        losses.append(result.sums[term] / count if count else math.nan)
    return losses


def _make_loader(engine: Engine, rows: SizedRowDataset, micro_batch: int, end_position: int) -> DataLoader:
    return DataLoader(
        rows,
        global_batch=micro_batch * engine.mesh.data_ranks,
        micro_batch=micro_batch,
        data_rank=DataRank(engine.mesh.data_rank, engine.mesh.data_ranks, engine.mesh.row_readers),
        end_position=end_position,
    )


def format_result(result: Mapping[str, Any]) -> str:
    """Format a result for the log, as "loss 1.2345, 1.650 bits per byte"."""
    texts = [f"loss {result['loss']:.4f}"]
    values = {**result.get("terms", {}), **result.get("metrics", {})}
    texts += [f"{name} {value:.4f}" for name, value in values.items()]
    if "bits_per_byte" in result:
        texts.append(f"{result['bits_per_byte']:.3f} bits per byte")
    return ", ".join(texts)


class Sampler(Protocol):
    """Continues the prompts of a config, as `megatfm.inference.text.PromptSampler` does."""

    def check(self, model: nn.Module, tokenizer: Tokenizer | None, config: Config) -> None:
        """Raise UsageError for a prompt that the model can't continue."""

    def generate(
        self, model: nn.Module, tokenizer: Tokenizer | None, config: Config, step: int, on_token: Callable[[], None]
    ) -> list[str]:
        """Return the continuation of each prompt. on_token: called for each token. A collective."""


class EvaluatesTasks(Protocol):
    """Scores the answers of a config's tasks, as `megatfm.train.evaluation_tasks.TaskEvaluator` does."""

    def evaluate(self, on_batch: Callable[[], None]) -> dict[str, dict[str, float]]:
        """Return the metrics of each task by its name. A collective."""


class Evaluator:
    """Evaluates a run's validation sets and tasks, and generates samples from its prompts.

    sampler: needed if the config has prompts. tasks: evaluates the config's tasks; None if it has none. Raises
    UsageError for a prompt that the model can't continue.
    """

    def __init__(
        self,
        engine: Engine,
        corpora: Corpora,
        config: Config,
        sampler: Sampler | None,
        tasks: EvaluatesTasks | None = None,
    ) -> None:
        self._engine, self._corpora, self._config, self._tasks = engine, corpora, config, tasks
        self._sampler = sampler if config.evaluate.sample_prompts else None
        if config.evaluate.sample_prompts and not sampler:
            raise ValueError("evaluate.sample_prompts: `train` needs a sampler")
        if self._sampler:
            check = self._sampler.check
            self._run_model(lambda model: check(model, corpora.tokenizer, config))

    def evaluate(self, step: int, on_batch: Callable[[], None]) -> dict[str, Any]:
        """Evaluate; return the fields for metrics.jsonl. on_batch: called for each batch and each sampled token. A
        collective."""
        start = time.perf_counter()
        results = evaluate_sets(self._engine, self._corpora, self._config, step, on_batch)
        record: dict[str, Any] = {"evaluation": results}
        if self._tasks:
            record["tasks"] = self._tasks.evaluate(on_batch)
            for name, metrics in record["tasks"].items():
                texts = (f"{metric.replace('_', ' ')} {value:.4f}" for metric, value in metrics.items())
                log.info("step %d  task %s: %s", step, name, ", ".join(texts))
        record["evaluation_seconds"] = time.perf_counter() - start
        if self._sampler:
            record["samples"] = self._generate_samples(step, on_batch)
        return record

    def _generate_samples(self, step: int, on_token: Callable[[], None]) -> list[dict[str, str]]:
        assert self._sampler
        generate, tokenizer, config = self._sampler.generate, self._corpora.tokenizer, self._config
        texts = self._run_model(lambda model: generate(model, tokenizer, config, step, on_token))
        prompts = config.evaluate.sample_prompts
        for prompt, text in zip(prompts, texts, strict=True):
            log.info("step %d  sample: %s", step, repr(prompt + text)[1:-1])
        return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]

    def _run_model(self, function: Callable[[nn.Module], T]) -> T:
        assert isinstance(self._engine, RunsModel)  # checked against the engine's declared features
        return self._engine.run_model(function)


def evaluate_sets(
    engine: Engine, corpora: Corpora, config: Config, step: int, on_batch: Callable[[], None]
) -> dict[str, Any]:
    """Evaluate every validation set of a config; return name → result of `evaluate`."""
    results = {}
    for name, rows in corpora.validation.items():
        with (
            collect_predictions(get_engine_model(engine))
            if config.task and config.task.has_head
            else nullcontext() as collector
        ):
            results[name] = evaluate(
                engine,
                rows,
                corpora.objective.for_evaluation(),
                corpora.byte_lengths,
                micro_batch=config.train.micro_batch,
                max_rows=config.evaluate.max_rows,
                on_batch=on_batch,
            )
        if config.task and collector:
            results[name]["metrics"] = collector.gather(config.task, config.data.validation[name]).metrics()
        log.info("step %d  %s: %s", step, name, format_result(results[name]))
        if (n_buckets := config.evaluate.position_buckets) and corpora.objective.likelihood_term:
            results[name]["loss_by_position"] = compute_loss_by_position(
                engine,
                rows,
                corpora.objective,
                n_buckets=n_buckets,
                n_rows=max(1, results[name]["rows"] // n_buckets),
                micro_batch=config.train.micro_batch,
                on_batch=on_batch,
            )
    return results
