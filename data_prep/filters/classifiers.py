"""Filters by classifier: the user's linear one (logistic regression over hashed n-grams), and fastText's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.config.prep_steps import FastTextConfig, LinearConfig
from megatfm.data_prep.dedup.hashing import hash_ngrams, hash_words
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS, count_score, filter_by_score
from megatfm.errors import UsageError

WORDS_VERSION = 2
"""Version of the splitting into words, stored with weights, which are useless after a change."""


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """Logistic regression over hashed n-grams of words (Weinberger et al. 2009).

    The probability of a text is σ(bias + mean of `weight` over the buckets of its n-grams of 1 … ngrams words). weight
    [2^k] float32. Words are those of `megatfm.data_prep.dedup.hashing`.
    """

    weight: NDArray[np.float32]
    bias: float
    ngrams: int

    def __call__(self, text: str) -> float:
        buckets = hash_features([text], self.ngrams, len(self.weight))[0]
        logit = self.bias + (float(self.weight[buckets].mean(dtype=np.float64)) if len(buckets) else 0.0)
        return float(1 / (1 + np.exp(-logit)))

    @classmethod
    def fit(
        cls, texts: Sequence[str], labels: Sequence[bool], *, bits: int = 18, ngrams: int = 2, decay: float = 1e-4
    ) -> Self:
        """Fit the weights by L-BFGS: minimal mean log loss + decay · ‖weight‖² / 2. bits: log2 of the buckets."""
        from scipy.optimize import minimize  # by name, since only fitting needs it
        from scipy.sparse import csr_matrix

        buckets_by_text = hash_features(texts, ngrams, 2**bits)
        sizes = np.array([len(buckets) for buckets in buckets_by_text])
        rows = np.repeat(1 / np.maximum(sizes, 1), sizes)
        shape = (len(texts), 2**bits)
        x = csr_matrix((rows, np.concatenate(buckets_by_text), np.concatenate([[0], np.cumsum(sizes)])), shape=shape)
        signs = np.where(labels, 1.0, -1.0)

        def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            margins = signs * (x @ values[1:] + values[0])
            slope = -signs / (1 + np.exp(np.minimum(margins, 500))) / len(signs)
            gradient = np.concatenate([[slope.sum()], x.T @ slope + decay * values[1:]])
            return float(np.logaddexp(0, -margins).mean() + decay / 2 * values[1:] @ values[1:]), gradient

        best = minimize(loss, np.zeros(2**bits + 1), jac=True, method="L-BFGS-B").x
        return cls(best[1:].astype(np.float32), float(best[0]), ngrams)

    def save(self, path: Path) -> None:
        """Write the weights as `.npz` or `.safetensors`, by the suffix."""
        tensors = {
            "weight": self.weight,
            "bias": np.array([self.bias], np.float32),
            "ngrams": np.array([self.ngrams], np.int32),
            "words": np.array([WORDS_VERSION], np.int32),
        }
        if path.suffix == ".safetensors":
            from safetensors.numpy import save_file

            save_file(tensors, path)
        else:
            np.savez_compressed(path, **tensors)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of `save`. Raises UsageError for any other."""
        try:
            if path.suffix == ".safetensors":
                from safetensors.numpy import load_file

                weights: dict[str, Any] = load_file(path)
            else:
                with np.load(path, allow_pickle=False) as file:
                    weights = dict(file)
            weight = weights["weight"].astype(np.float32)
            bias, ngrams = float(weights["bias"].item()), int(weights["ngrams"].item())
        except Exception as error:  # the libraries raise many kinds
            raise UsageError(
                f"{path}: can't be read as weights ({type(error).__name__}: {error}): write such a file by "
                "LinearClassifier.save"
            ) from error
        if "words" not in weights or weights["words"].tolist() != [WORDS_VERSION]:
            raise UsageError(
                f"{path}: was fitted by another version of megatfm, which takes other words from a text: fit it again"
            )
        size = len(weight)
        if weight.ndim != 1 or size < 2 or size & (size - 1) or not 1 <= ngrams <= 9 or not np.isfinite(weight).all():
            raise UsageError(
                f"{path}: weight {list(weight.shape)}, ngrams {ngrams}: a power of two finite numbers, and 1 to 9 "
                "words, are expected"
            )
        return cls(weight, bias, ngrams)


def hash_features(texts: Sequence[str], ngrams: int, buckets: int) -> list[NDArray[np.int64]]:
    """Return for each text the buckets [n] of all its n-grams of 1 … ngrams words."""
    words, offsets = hash_words(texts)
    buckets_by_text: list[list[NDArray[np.int64]]] = [[] for _ in texts]
    for length in range(1, ngrams + 1):
        hashes, starts = hash_ngrams(words, offsets, length)
        # Adding the length gives equal words in n-grams of different lengths different buckets.
        bucket_indices = ((hashes + np.uint64(length)) % np.uint64(buckets)).astype(np.int64)
        for text_index in range(len(texts)):
            if offsets[text_index + 1] - offsets[text_index] >= length:
                buckets_by_text[text_index].append(bucket_indices[starts[text_index] : starts[text_index + 1]])
    return [np.concatenate(buckets) if buckets else np.empty(0, np.int64) for buckets in buckets_by_text]


@STEPS.register("linear_classifier")
class LinearClassifierFilter:
    """Keeps documents by their probability under a linear classifier."""

    title = "linear classifier"

    def __init__(self, config: LinearConfig) -> None:
        self._config = config
        self._weights = LinearClassifier.load(Path(config.file))

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        score = self._weights(document.text)
        count_score(counts, score)
        return filter_by_score(document, score, self._config, "probability")


@STEPS.register("fasttext")
class FastText:
    """Keeps documents by the probability of a label. Line breaks, which end a text for fastText, become spaces."""

    title = "fastText"

    def __init__(self, config: FastTextConfig) -> None:
        self._config = config
        self._model = _load_fasttext(config.file)
        labels = self._model.get_labels()
        if config.label not in labels:
            raise UsageError(
                f"{config.file}: has no label {config.label!r}; its labels are {', '.join(sorted(labels)[:30])}"
            )

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        line = document.text.replace("\n", " ")
        # Not `predict`, whose np.array call NumPy 2 refuses.
        probabilities = {label: p for p, label in self._model.f.predict(f"{line}\n", -1, 0.0, "strict")}
        score = float(np.clip(probabilities.get(self._config.label, 0.0), 0.0, 1.0))  # NaN stays
        count_score(counts, score)
        return filter_by_score(document, score, self._config, "probability")


def _load_fasttext(path: str) -> Any:
    try:
        import fasttext
    except ImportError as error:
        raise UsageError(
            "steps: fasttext: the library is not installed: pip install fasttext-wheel, or fit a classifier of your "
            "own for the step `linear_classifier`"
        ) from error
    try:
        return fasttext.FastText._FastText(model_path=path)
    except ValueError as error:
        raise UsageError(f"{path}: is no fastText model ({error})") from error
