"""Lists of what is not wanted: addresses and words."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from megatfm.config.prep_steps import BlockedUrlsConfig, BlockedWordsConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.errors import UsageError


class BlockedUrls:
    """Drops documents from listed domains, and those whose address begins as a listed one."""

    title = "blocked URLs"

    def __init__(self, config: BlockedUrlsConfig) -> None:
        entries = {_normalize_url(line) for line in read_list(config.file, "#")}
        self._domains = frozenset(entry for entry in entries if "/" not in entry)
        self._beginnings = tuple(sorted(entries - self._domains))

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if not document.url:
            counts.count_event("without an address")
            return document
        address = _normalize_url(document.url)
        labels = _host(document.url).split(".")
        if any(".".join(labels[at:]) in self._domains for at in range(len(labels))):
            return "comes from a blocked domain"
        return "has a blocked address" if address.startswith(self._beginnings) else document


class BlockedWords:
    """Drops documents that hold a listed word or phrase."""

    title = "blocked words"

    def __init__(self, config: BlockedWordsConfig) -> None:
        words = sorted({line.lower() for line in read_list(config.file)}, key=lambda word: (-len(word), word))
        either = "|".join(map(re.escape, words))
        self._pattern = re.compile(rf"(?<!\w)(?:{either})(?!\w)" if config.whole_words else either)

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        found = self._pattern.search(document.text.lower())
        return document if found is None else "has a blocked word"


def read_list(path: str, remark: str = "") -> list[str]:
    """The lines of a file, without empty ones and remarks; a UsageError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read ({error}): give a list, one entry in a line") from None
    if remark:
        lines = [line.partition(remark)[0] for line in lines]
    entries = [line.strip() for line in lines if line.strip()]
    if not entries:
        raise UsageError(f"{path}: this list is empty: fill it, or leave the step out")
    return entries


def _host(url: str) -> str:
    try:
        return (urlsplit(url if "//" in url else f"//{url}").hostname or "").rstrip(".")
    except ValueError:  # such as a bracket without its other half
        return ""


def _normalize_url(url: str) -> str:
    """An address without scheme and `www.`, in lower case up to the path; a domain alone has no slash."""
    rest = re.sub(r"^(?:[a-z][a-z0-9+.-]*:)?//", "", url.strip(), flags=re.IGNORECASE)
    host, slash, path = rest.partition("/")
    host = host.lower().removeprefix("www.")
    return f"{host}/{path}" if slash and path else host
