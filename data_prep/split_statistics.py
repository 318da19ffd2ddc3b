"""Statistics of a split's documents, for the report and the manifest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.inspect import MAX_VALUES, select_countable_fields
from megatfm.data_prep.documents import Document, TokenizedDocument
from megatfm.tokenizers import Tokenizer

MAX_LISTED = 12
"""Number of sources, values and tokens that a list of the largest has."""
Totals = dict[str, list[int]]
"""Value → its documents, bytes of text and tokens."""


class SplitStatistics:
    """Statistics of the documents of a split: lengths, sources, domains, languages, fields, use of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.token_bytes() if tokenizer else None
        self._uses = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.int64)
        self._lengths = Counter[int]()
        self._categories: dict[str, Totals] = {"sources": {}, "domains": {}, "languages": {}}
        self._fields: dict[str, Totals] = {}

    def add(self, ids: NDArray[Any], documents: Sequence[TokenizedDocument]) -> None:
        """Count documents. ids: of all documents, concatenated."""
        self._uses += np.bincount(ids, minlength=len(self._uses))
        sources, domains, languages = self._categories.values()
        for document in documents:
            self._lengths[max(0, document.n_tokens - 1).bit_length()] += 1
            fields = select_countable_fields(document.fields)
            if "domain" not in document.fields:  # that of the address, which is counted among the domains
                fields.pop("domain", None)
            for name, totals in (
                (Document(document.source, "").top_level, sources),
                (document.domain, domains),
                (document.language, languages),
                *((value, self._get_field_totals(field)) for field, value in fields.items()),
            ):
                if name and (name in totals or len(totals) <= MAX_VALUES):
                    total = totals.setdefault(name, [0, 0, 0])
                    for column, value in enumerate((1, document.text_bytes, document.n_tokens)):
                        total[column] += value

    def _get_field_totals(self, field: str) -> Totals:
        """Return the totals of a field; of the first MAX_VALUES fields, as hostile records may have any number."""
        if field not in self._fields and len(self._fields) >= MAX_VALUES:
            return {}
        return self._fields.setdefault(field, {})

    def merge(self, other: "SplitStatistics") -> None:
        """Add the counts of another instance."""
        self._uses += other._uses
        self._lengths += other._lengths
        for tables, other_tables in ((self._categories, other._categories), (self._fields, other._fields)):
            for name, other_totals in other_tables.items():
                totals = tables.setdefault(name, {})
                for value, total in other_totals.items():
                    totals[value] = [a + b for a, b in zip(totals.get(value, (0, 0, 0)), total, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON.

        lengths: [maximal tokens, documents]. sources: the largest as [name, documents, bytes, tokens], and the number
        of further ones; likewise domains and languages, if known. vocabulary, if there is a tokenizer: number of ids
        that occur, and the commonest as [piece, uses].
        """
        tables: dict[str, Any] = {}
        for name, totals in self._categories.items():
            if totals or name == "sources":
                tables[name] = _list_largest(totals)
                tables[f"more_{name}"] = max(0, len(totals) - MAX_LISTED)
        if self._fields:
            tables["fields"] = {name: _list_largest(totals) for name, totals in self._iter_countable_fields()}
        vocabulary = {"vocabulary": self._describe_vocabulary(self._tokenizer)} if self._tokenizer else {}
        return {
            "lengths": [[2**bucket, count] for bucket, count in sorted(self._lengths.items())],
            **tables,
            **vocabulary,
        }

    def list_token_counts(self) -> dict[str, Any]:
        """Return tokens in total and of the largest values, by domain, language and fields, for the manifest."""
        _, domains, languages = self._categories.values()
        totals_by_field = {"domain": domains, "language": languages, **dict(self._iter_countable_fields())}
        return {
            name: [sum(total[2] for total in totals.values()), _list_largest(totals)]
            for name, totals in totals_by_field.items()
            if totals
        }

    def _iter_countable_fields(self) -> Iterator[tuple[str, Totals]]:
        """Yield the fields that have few enough values to be counted."""
        return ((name, totals) for name, totals in self._fields.items() if len(totals) <= MAX_VALUES)

    def _describe_vocabulary(self, tokenizer: Tokenizer) -> dict[str, Any]:
        order = np.argsort(-self._uses, kind="stable")[:MAX_LISTED].tolist()
        return {
            "size": len(self._uses),
            "used": int((self._uses > 0).sum()),
            "used_100_times": int((self._uses >= 100).sum()),
            "common": [[self._decode_token(tokenizer, token), int(self._uses[token])] for token in order],
        }

    def _decode_token(self, tokenizer: Tokenizer, token: int) -> str:
        """Return the text of a token if its bytes are known, else its piece."""
        text_bytes = self._bytes[token] if self._bytes else b""
        return text_bytes.decode("utf-8", "backslashreplace") if text_bytes else tokenizer.id_to_piece(token)


def _list_largest(totals: Totals) -> list[list[Any]]:
    largest = sorted(totals.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    return [[value, *total] for value, total in largest[:MAX_LISTED]]
