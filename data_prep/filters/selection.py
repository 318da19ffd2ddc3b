"""Select documents by URL, words, metadata, random sample, and overlap with evaluation sets."""

import re
import unicodedata
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from blake3 import blake3

from megatfm.config.prep_steps import (
    C4BadWordsConfig,
    DecontaminateConfig,
    MetadataFilterConfig,
    SampleConfig,
    UrlFilterConfig,
)
from megatfm.data_prep.dedup.hashing import Hashes, hash_ngram, hash_ngrams, hash_words
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import STEPS
from megatfm.data_prep.readers.text import read_json_lines
from megatfm.errors import MegatfmError, UsageError


@STEPS.register("url_filter")
class UrlFilter:
    """Drops documents from listed domains, and those whose URL begins with a listed prefix."""

    title = "URL filter"

    def __init__(self, config: UrlFilterConfig) -> None:
        entries = {_normalize_url(line) for line in read_list(config.file, "#")}
        self._domains = frozenset(entry for entry in entries if "/" not in entry)
        self._url_prefixes = tuple(sorted(entries - self._domains))

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if not document.url:
            counts.count_event("without_url")
            return document
        address = _normalize_url(document.url)
        labels = _parse_host(document.url).split(".")
        if any(".".join(labels[level:]) in self._domains for level in range(len(labels))):
            return "domain"
        return "url" if address.startswith(self._url_prefixes) else document


@STEPS.register("c4_badwords")
class C4BadWords:
    """Drops documents that contain a listed word or phrase."""

    title = "C4 badwords"

    def __init__(self, config: C4BadWordsConfig) -> None:
        words = sorted({line.lower() for line in read_list(config.file)}, key=lambda word: (-len(word), word))
        either = "|".join(map(re.escape, words))
        self._pattern = re.compile(rf"(?<!\w)(?:{either})(?!\w)" if config.whole_words else either)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        match = self._pattern.search(document.text.lower())
        return document if match is None else "document_removed_with_badwords"


def read_list(path: str, remark: str = "") -> list[str]:
    """Read the lines of a file, without empty ones and comments. Raises UsageError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read ({error}): give a list, one entry in a line") from None
    if remark:
        lines = [line.partition(remark)[0] for line in lines]
    entries = [line.strip() for line in lines if line.strip()]
    if not entries:
        raise UsageError(f"{path}: this list is empty: fill it, or leave the step out")
    return entries


def _parse_host(url: str) -> str:
    try:
        return _decode_host(urlsplit(url if "//" in url else f"//{url}").hostname or "").rstrip(".")
    except ValueError:  # such as a bracket without its other half
        return ""


def _normalize_url(url: str) -> str:
    """Return a URL without scheme, user, usual port and `www.`, in lower case up to the path; a domain has no slash."""
    bare_url = re.sub(r"^(?:[a-z][a-z0-9+.-]*:)?//", "", url.strip(), flags=re.IGNORECASE)
    authority = re.split(r"[/?#]", bare_url, maxsplit=1)[0]
    path = bare_url[len(authority) :].partition("#")[0].removeprefix("/")
    name, _, port = _decode_host(authority.rpartition("@")[2]).partition(":")
    host = name.removesuffix(".").removeprefix("www.") + (f":{port}" if port not in ("", "80", "443") else "")
    return f"{host}/{path}" if path else host


def _decode_host(host: str) -> str:
    """Return a host in lower case, with its punycode (RFC 3492) decoded, so that both spellings of a name are equal."""
    labels = unicodedata.normalize("NFKC", host).lower().replace("\u3002", ".").split(".")
    return ".".join(map(_decode_label, labels))


def _decode_label(label: str) -> str:
    if not label.startswith("xn--"):
        return label
    try:
        return unicodedata.normalize("NFKC", label[4:].encode("ascii").decode("punycode")).lower()
    except UnicodeError:  # no punycode
        return label


@STEPS.register("decontaminate")
class Decontaminate:
    """Drops documents that share an n-gram of words with an evaluation text (Brown et al. 2020, appendix C).

    Unlike in the paper, the complete document is dropped. N-grams are compared by 64-bit hashes (see
    `megatfm.data_prep.dedup.hashing`), without case, punctuation and invisible characters.
    """

    title = "decontamination"

    def __init__(self, config: DecontaminateConfig) -> None:
        ngrams: dict[int, set[int]] = {}
        too_short, texts = list[str](), 0
        for text in (text for path in config.files for text in _read_texts(Path(path))):
            texts += 1
            words, _ = hash_words([text])
            if len(words) < min(config.min_words, config.n_grams):
                too_short.append(text)
            elif len(words) < config.n_grams:
                ngrams.setdefault(len(words), set()).add(int(hash_ngram(words)))
            else:
                hashes, _ = hash_ngrams(words, np.array([0, len(words)]), config.n_grams)
                ngrams.setdefault(config.n_grams, set()).update(hashes.tolist())
        if not ngrams:
            raise UsageError(
                f"{', '.join(config.files)}: none of {texts} texts has {config.min_words} words or more: give "
                "other files, or lower min_words of decontaminate"
            )
        self.notes = [_describe_too_short(too_short, texts, config)] if too_short else []
        self._ngrams: dict[int, Hashes] = {
            length: np.array(sorted(hashes), np.uint64) for length, hashes in sorted(ngrams.items())
        }

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        words, offsets = hash_words([document.text])
        for length, known_hashes in self._ngrams.items():
            if len(words) < length:
                break
            hashes, _ = hash_ngrams(words, offsets, length)
            indices = np.minimum(np.searchsorted(known_hashes, hashes), len(known_hashes) - 1)
            if (known_hashes[indices] == hashes).any():
                return "contaminated"
        return document


def _describe_too_short(too_short: list[str], texts: int, config: DecontaminateConfig) -> str:
    """Return a note on evaluation texts that are too short to be found, with the longest of them."""
    longest = " ".join(max(too_short, key=len).split())
    return (
        f"{len(too_short)} of {texts} evaluation texts are too short to be searched for, with fewer than "
        f"{min(config.min_words, config.n_grams)} words (decontaminate.min_words); the longest is "
        f"{longest[:80]!r}{'…' if len(longest) > 80 else ''}"
    )


def _read_texts(path: Path) -> Iterator[str]:
    """Read the texts of an evaluation set."""
    try:
        if ".jsonl" in path.suffixes:
            for _, record in read_json_lines(path):
                yield from _iter_strings(record)
        else:
            yield path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read ({error}): give the files of evaluation sets") from None
    except MegatfmError as error:
        raise UsageError(str(error)) from None


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _iter_strings(child)


@STEPS.register("metadata_filter")
class MetadataFilter:
    """Keeps documents by the value of a field: listed values, or a range."""

    title: str

    def __init__(self, config: MetadataFilterConfig) -> None:
        self._config = config
        self.title = f"metadata filter: {config.field}"

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        config, value = self._config, document.get(self._config.field)
        if value is None:
            return document if config.missing == "keep" else f"no_{config.field}"
        if config.allowed and value not in config.allowed:
            return f"{config.field}_not_allowed"
        if value in config.denied:
            return f"{config.field}_denied"
        for limit, sign in ((config.min, 1), (config.max, -1)):
            if limit is None:
                continue
            if not _is_comparable(value, limit):
                return f"{config.field}_not_comparable"
            if (value < limit) if sign > 0 else (value > limit):
                return f"{config.field}_{'below_min' if sign > 0 else 'above_max'}"
        return document


def _is_comparable(value: Any, limit: float | str) -> bool:
    return isinstance(value, str) if isinstance(limit, str) else type(value) in (int, float)


@STEPS.register("sample")
class SampleDocuments:
    """Keeps documents by a hash of (seed, source): the same on any machine, and a larger share keeps the same and more.

    To repeat documents, use the mixture of the training config.
    """

    title = "sample"

    def __init__(self, config: SampleConfig) -> None:
        self._config = config
        self._rate_by_path = tuple(config.rate_by_path.items())

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        file = document.file
        keep = next((keep for pattern, keep in self._rate_by_path if fnmatchcase(file, pattern)), self._config.rate)
        digest = blake3(f"{self._config.seed}:{document.id}".encode()).digest(8)
        return document if int.from_bytes(digest, "big") < keep * 2**64 else "not_sampled"
