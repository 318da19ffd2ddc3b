"""Keep evaluation sets out of the training data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatfm.config.prep_steps import DecontaminateConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.readers.jsonl import records
from megatfm.data_prep.words import Hashes, ngram_hash, ngram_hashes, word_hashes
from megatfm.errors import MegatfmError, UsageError


class Decontaminate:
    """Drops documents that share a run of words with an evaluation text (Brown et al. 2020, appendix C).

    Unlike there the whole document goes, not its surroundings alone. Runs are compared by 64-bit hashes of words (see
    `megatfm.data_prep.words`), without case, punctuation and what isn't seen, in both texts alike.
    """

    title = "decontamination"

    def __init__(self, config: DecontaminateConfig) -> None:
        runs: dict[int, set[int]] = {}
        too_short, texts = list[str](), 0
        for text in (text for path in config.against for text in _texts(Path(path))):
            texts += 1
            words, _ = word_hashes([text])
            if len(words) < min(config.min_words, config.words):
                too_short.append(text)
            elif len(words) < config.words:
                runs.setdefault(len(words), set()).add(int(ngram_hash(words)))
            else:
                found, _ = ngram_hashes(words, np.array([0, len(words)]), config.words)
                runs.setdefault(config.words, set()).update(found.tolist())
        if not runs:
            raise UsageError(
                f"{', '.join(config.against)}: none of {texts} texts has {config.min_words} words or more: give "
                "other files, or lower min_words of decontaminate"
            )
        self.notes = [_of_short(too_short, texts, config)] if too_short else []
        self._runs: dict[int, Hashes] = {
            length: np.array(sorted(hashes), np.uint64) for length, hashes in sorted(runs.items())
        }

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        words, offsets = word_hashes([document.text])
        for length, known in self._runs.items():
            if len(words) < length:
                break
            found, _ = ngram_hashes(words, offsets, length)
            places = np.minimum(np.searchsorted(known, found), len(known) - 1)
            if (known[places] == found).any():
                return "shares a run of words with an evaluation set"
        return document


def _of_short(short: list[str], texts: int, config: DecontaminateConfig) -> str:
    """A note on texts that can't be found, with the longest of them."""
    longest = " ".join(max(short, key=len).split())
    return (
        f"{len(short)} of {texts} evaluation texts are too short to be looked for, with fewer than "
        f"{min(config.min_words, config.words)} words (decontaminate.min_words); the longest is "
        f"{longest[:80]!r}{'…' if len(longest) > 80 else ''}"
    )


def _texts(path: Path) -> Iterator[str]:
    """The texts of an evaluation set."""
    try:
        if ".jsonl" in path.suffixes:
            for _, record in records(path):
                yield from _strings(record)
        else:
            yield path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read ({error}): give the files of evaluation sets") from None
    except MegatfmError as error:
        raise UsageError(str(error)) from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
