"""fastText models (Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification"), by the library."""

from typing import Any

from megatfm.config.prep_scores import FastTextConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.registry import STEPS
from megatfm.data_prep.steps.scored import count_score, filter_by_score
from megatfm.errors import UsageError


@STEPS.register("fasttext")
class FastText:
    """Keeps documents by the probability of a label; line breaks, which fastText reads as ends, count as spaces."""

    title = "fastText"

    def __init__(self, config: FastTextConfig) -> None:
        self._config = config
        self._model = _loaded(config.file)
        labels = self._model.get_labels()
        if config.label not in labels:
            raise UsageError(
                f"{config.file}: has no label {config.label!r}; its labels are {', '.join(sorted(labels)[:30])}"
            )

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        line = document.text.replace("\n", " ")
        # Not `predict`, which hands over an array in a way that NumPy 2 refuses.
        found = {label: p for p, label in self._model.f.predict(f"{line}\n", -1, 0.0, "strict")}
        score = min(1.0, max(0.0, float(found.get(self._config.label, 0.0))))
        count_score(counts, score)
        return filter_by_score(document, score, self._config, "probability")


def _loaded(path: str) -> Any:
    try:
        import fasttext
    except ImportError as error:
        raise UsageError(
            "steps: fasttext: the library is not installed: pip install fasttext-wheel, or fit a classifier of your "
            "own for the step `linear`"
        ) from error
    try:
        return fasttext.FastText._FastText(model_path=path)
    except ValueError as error:
        raise UsageError(f"{path}: is no fastText model ({error})") from error
