"""Filters by transformer: text classifiers (FineWeb-Edu; Penedo et al. 2024, section 4), and perplexity.

Perplexity is that of a megatfm run; CCNet (Wenzek et al. 2020, section 3.4) used an n-gram model. Only this module of
data_prep imports torch.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatfm.config.prep_steps import ClassifierConfig, PerplexityConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS, count_score, filter_by_score
from megatfm.errors import UsageError
from megatfm.inference.text import open_text_model


@STEPS.register("classifier")
class Classifier:
    """Keeps documents by the probability of a label, or by the output of a model with a single one."""

    title = "classifier"

    def __init__(self, config: ClassifierConfig) -> None:
        self._config = config
        self._tokenizer, self._model = _load_classifier(config.folder, config.device)
        labels = {str(name): index for index, name in self._model.config.id2label.items()}
        if len(labels) > 1 and config.label not in labels:
            raise UsageError(
                f"{config.folder}: has no label {config.label!r}; its labels are {', '.join(sorted(labels)[:30])}"
            )
        if len(labels) == 1 and config.label is not None:
            raise UsageError(
                f"{config.folder}: has a single output, a number without a label: leave label out, and set min_score "
                "and max_score on its own scale"
            )
        self._label = labels[config.label] if config.label is not None else None
        self._score_name = "score" if self._label is None else "probability"
        self._tokens = min(config.max_tokens, self._tokenizer.model_max_length)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        score = self.score(document.text)
        if self._label is None:
            _count_bin(counts, score, math.floor)
        else:
            count_score(counts, score)
        return filter_by_score(document, score, self._config, self._score_name)

    @torch.inference_mode()
    def score(self, text: str) -> float:
        """Score the beginning of a text."""
        row = self._tokenizer(text, truncation=True, max_length=self._tokens, return_tensors="pt")
        logits = self._model(**row.to(self._config.device)).logits[0].double()
        if self._label is None:
            return float(logits)
        is_multi_label = self._model.config.problem_type == "multi_label_classification"
        return float((logits.sigmoid() if is_multi_label else logits.softmax(0))[self._label])


def _load_classifier(folder: str, device: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            "steps: classifier: the library is not installed: pip install transformers, or fit a classifier of your "
            "own for the step `linear_classifier`"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder}: has no config.json: folder is that of a model in Hugging Face's format, on this machine"
        )
    logging.disable_progress_bar()
    try:
        # Left out, trust_remote_code would be asked for on a terminal, and pickled weights would be read.
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            folder, **options, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"{folder}: can't be read as a classifier: {error}") from error
    if loading_info["missing_keys"]:
        raise UsageError(
            f"{folder}: lacks the weights {', '.join(sorted(loading_info['missing_keys'])[:4])}: it was trained for "
            "something else than classifying texts"
        )
    return tokenizer, model.eval().to(device)


@STEPS.register("perplexity")
class Perplexity:
    """Keeps documents by perplexity: e^(mean negative log-likelihood of a token).

    A token is predicted from the tokens before it in its window of the model's row length, the first one from the id
    that begins texts.
    """

    title = "perplexity"

    def __init__(self, config: PerplexityConfig) -> None:
        self._config = config
        model = open_text_model(config.run, config.device)
        if model.config.objective.name != "causal":
            raise UsageError(
                f"{config.run}: was trained with objective.name = {model.config.objective.name!r}, and perplexity is "
                "that of a causal model: choose another run"
            )
        self._model, self._tokenizer = model.model, model.tokenizer
        self._begin_id = model.prompt_prefix_ids[-1] if model.prompt_prefix_ids else model.tokenizer.bos
        self._window = model.config.data.sequence_length

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        (ids,) = self._tokenizer.encode_batch([document.text], 1)
        score = self.score(list(map(int, ids[: self._config.max_tokens])))
        _count_bin(counts, score, lambda finite: 2 ** int(math.log2(finite)))
        return filter_by_score(document, score, self._config, "perplexity")

    @torch.inference_mode()
    def score(self, ids: list[int]) -> float:
        """Return the perplexity of ids [n]."""
        row, total = torch.tensor([self._begin_id, *ids], device=self._config.device), 0.0
        for begin in range(0, len(ids), self._window):
            window = row[begin : begin + self._window + 1]
            logits_TV = self._model(window[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits_TV.float(), window[1:], reduction="sum"))
        try:
            return math.exp(total / max(1, len(ids)))
        except OverflowError:
            return math.inf


def _count_bin(counts: StepStats, score: float, begin: Callable[[float], int]) -> None:
    """Count a score in its bin of a histogram for the report. NaN has none: its document is dropped."""
    if math.isinf(score):
        counts.count_event("infinite" if score > 0 else "minus infinite")
    elif not math.isnan(score):
        counts.count_event(f"from {begin(score):,} on")
