"""A transformer that classifies texts, in Hugging Face's format: FineWeb-Edu's kind of filter (Penedo et al. 2024,
"The FineWeb Datasets", section 4), by the library transformers."""

from pathlib import Path
from typing import Any

import torch

from megatfm.config.prep_scores import ClassifierConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.registry import STEPS
from megatfm.data_prep.steps.scored import count_score, filter_by_score
from megatfm.errors import UsageError


@STEPS.register("classifier")
class Classifier:
    """Keeps documents by the probability of a label, or by the number that a model of one output says."""

    title = "classifier"

    def __init__(self, config: ClassifierConfig) -> None:
        self._config = config
        self._tokenizer, self._model = _loaded(config.folder, config.device)
        labels = {str(name): number for number, name in self._model.config.id2label.items()}
        if len(labels) > 1 and config.label not in labels:
            raise UsageError(
                f"{config.folder}: has no label {config.label!r}; its labels are {', '.join(sorted(labels)[:30])}"
            )
        if len(labels) == 1 and config.label is not None:
            raise UsageError(
                f"{config.folder}: has a single output, a number without a label: leave label out, and set at_least "
                "and at_most on its own scale"
            )
        self._label = labels[config.label] if config.label is not None else None
        self._what = "score" if self._label is None else "probability"
        self._tokens = min(config.tokens, self._tokenizer.model_max_length)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        score = self.score(document.text)
        if self._label is None:
            counts.count_event(f"from {int(score // 1)} on")
        else:
            count_score(counts, score)
        return filter_by_score(document, score, self._config, self._what)

    @torch.inference_mode()
    def score(self, text: str) -> float:
        """What the model says of the begin of a text."""
        row = self._tokenizer(text, truncation=True, max_length=self._tokens, return_tensors="pt")
        logits = self._model(**row.to(self._config.device)).logits[0].double()
        if self._label is None:
            return float(logits)
        several = self._model.config.problem_type == "multi_label_classification"
        return float((logits.sigmoid() if several else logits.softmax(0))[self._label])


def _loaded(folder: str, device: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            "steps: classifier: the library is not installed: pip install transformers, or fit a classifier of your "
            "own for the step `linear`"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder}: has no config.json: folder is that of a model in Hugging Face's format, on this machine"
        )
    logging.disable_progress_bar()
    try:
        # Left out, trust_remote_code would be asked for on a terminal, and pickled weights would be read.
        how = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, **how, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"{folder}: can't be read as a classifier: {error}") from error
    if found["missing_keys"]:
        raise UsageError(
            f"{folder}: lacks the weights {', '.join(sorted(found['missing_keys'])[:4])}: it was trained for something "
            "else than classifying texts"
        )
    return tokenizer, model.eval().to(device)
