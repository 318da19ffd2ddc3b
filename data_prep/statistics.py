"""What a split holds, in numbers small enough for `prep.json`: lengths, sources, use of the vocabulary."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.statistics import MOST_VALUES, countable_fields
from megatfm.data_prep.documents import Document
from megatfm.tokenizers import Tokenizer

LARGEST = 12


class Statistics:
    """Adds up over the documents of a split."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes() if tokenizer else None
        self._uses = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.int64)
        self._lengths: dict[int, int] = {}
        self._sources: dict[str, list[int]] = {}
        self._domains: dict[str, list[int]] = {}
        self._languages: dict[str, list[int]] = {}
        self._fields: dict[str, dict[str, list[int]]] = {}

    def add(self, ids: NDArray[Any], documents: Sequence[Sequence[Any]]) -> None:
        """The ids of documents, one after the other, and of each its source, tokens and bytes of text, and perhaps what
        belongs to it, its domain, its language and its fields."""
        self._uses += np.bincount(ids, minlength=len(self._uses))
        for source, tokens, size, *more in documents:
            bucket = max(0, tokens - 1).bit_length()
            self._lengths[bucket] = self._lengths.get(bucket, 0) + 1
            domain, language = more[1:3] if len(more) > 2 else ("", "")
            fields = countable_fields(more[3]) if len(more) > 3 else {}
            for name, totals in (
                (Document(source, "").top_level, self._sources),
                (domain, self._domains),
                (language, self._languages),
                *(
                    (value, self._fields.setdefault(field, {}))
                    for field, value in fields.items()
                    if field != "domain"
                ),
            ):
                if name and (name in totals or len(totals) <= MOST_VALUES):
                    total = totals.setdefault(name, [0, 0, 0])
                    for at, value in enumerate((1, size, tokens)):
                        total[at] += value

    def join(self, other: "Statistics") -> None:
        """Add what another one has counted."""
        self._uses += other._uses
        for bucket, count in other._lengths.items():
            self._lengths[bucket] = self._lengths.get(bucket, 0) + count
        pairs = [
            (self._sources, other._sources),
            (self._domains, other._domains),
            (self._languages, other._languages),
            *((self._fields.setdefault(name, {}), totals) for name, totals in other._fields.items()),
        ]
        for mine, theirs in pairs:
            for name, total in theirs.items():
                mine[name] = [a + b for a, b in zip(mine.get(name, (0, 0, 0)), total, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """`lengths`: [most tokens, documents]; `sources`: the largest, as [name, documents, bytes, tokens], and
        how many more there are; the same of `domains` and `languages`, where they are known; `vocabulary`, if there is
        one: ids that occur, and the commonest as [piece, times]."""
        tables: dict[str, Any] = {}
        for name, totals in (
            ("sources", self._sources),
            ("domains", self._domains),
            ("languages", self._languages),
        ):
            if totals or name == "sources":
                tables[name] = _largest(totals)
                tables[f"more_{name}"] = max(0, len(totals) - LARGEST)
        if self._fields:
            tables["fields"] = {name: _largest(totals) for name, totals in self._countable()}
        vocabulary = {"vocabulary": self._vocabulary(self._tokenizer)} if self._tokenizer else {}
        return {
            "lengths": [[2**bucket, count] for bucket, count in sorted(self._lengths.items())],
            **tables,
            **vocabulary,
        }

    def token_shares(self) -> dict[str, Any]:
        """For the manifest: by domain, language and the values of fields, all tokens and the largest, as above."""
        found = {"domain": self._domains, "language": self._languages, **dict(self._countable())}
        return {
            name: [sum(total[2] for total in totals.values()), _largest(totals)]
            for name, totals in found.items()
            if totals
        }

    def _countable(self) -> Iterator[tuple[str, dict[str, list[int]]]]:
        """Fields that have few enough values to be counted."""
        return ((name, totals) for name, totals in self._fields.items() if len(totals) <= MOST_VALUES)

    def _vocabulary(self, tokenizer: Tokenizer) -> dict[str, Any]:
        order = np.argsort(-self._uses, kind="stable")[:LARGEST].tolist()
        return {
            "size": len(self._uses),
            "used": int((self._uses > 0).sum()),
            "used_100_times": int((self._uses >= 100).sum()),
            "common": [[self._spelled(tokenizer, token), int(self._uses[token])] for token in order],
        }

    def _spelled(self, tokenizer: Tokenizer, token: int) -> str:
        """The text that a token stands for, as far as it is known."""
        known = self._bytes[token] if self._bytes else b""
        return known.decode("utf-8", "backslashreplace") if known else tokenizer.id_to_piece(token)


def _largest(totals: dict[str, list[int]]) -> list[list[Any]]:
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    return [[each, *total] for each, total in largest[:LARGEST]]
