"""Steps that documents pass through one at a time: one in a file, found by the name in `[[steps]]`."""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module

from megatfm.config.base import Section
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.blocked import BlockedUrls, BlockedWords
from megatfm.data_prep.steps.c4 import C4
from megatfm.data_prep.steps.decontaminate import Decontaminate
from megatfm.data_prep.steps.fineweb import FineWeb
from megatfm.data_prep.steps.gopher import GopherQuality
from megatfm.data_prep.steps.html import Html
from megatfm.data_prep.steps.language import Language
from megatfm.data_prep.steps.linear import LinearClassifierFilter
from megatfm.data_prep.steps.normalize import Normalize
from megatfm.data_prep.steps.redact import Redact
from megatfm.data_prep.steps.registry import STEPS
from megatfm.data_prep.steps.repetition import GopherRepetition
from megatfm.data_prep.steps.rule import CountingFilter, Filter, PipelineStep
from megatfm.data_prep.steps.sample import Sample
from megatfm.data_prep.steps.unicode import FixUnicode
from megatfm.data_prep.steps.where import MetadataFilter

__all__ = ["STEPS", "CountingFilter", "Filter", "FixUnicode", "PipelineStep", "make", "pass_through"]

_RULES: dict[str, type[Filter]] = {
    "normalize": Normalize,
    "html": Html,
    "language": Language,
    "gopher_quality": GopherQuality,
    "gopher_repetition": GopherRepetition,
    "c4": C4,
    "fineweb": FineWeb,
    "blocked_urls": BlockedUrls,
    "blocked_words": BlockedWords,
    "redact": Redact,
    "decontaminate": Decontaminate,
    "linear": LinearClassifierFilter,
    "where": MetadataFilter,
    "sample": Sample,
}
for _name, _rule in _RULES.items():
    STEPS.register(_name)(_rule)

# Imported when a config names them: their libraries are large, or need not be there.
_LAZY_MODULES = {
    "fasttext": "megatfm.data_prep.steps.fast_text",
    "presidio": "megatfm.data_prep.steps.presidio",
    "classifier": "megatfm.data_prep.models.classifier",
    "perplexity": "megatfm.data_prep.models.perplexity",
}


def make(config: Section) -> CountingFilter:
    """The step that a table of `[[steps]]` asks for. Raises UsageError for a name that nothing has, or a list or file
    that can't be used."""
    name: str = getattr(config, "name")  # noqa: B009 (all sections of steps have one)
    if name in _LAZY_MODULES:
        import_module(_LAZY_MODULES[name])
    return CountingFilter(STEPS.get(name)(config))


def pass_through(steps: Sequence[PipelineStep], documents: Iterable[Document]) -> Iterator[Document]:
    """The documents that all steps keep, as the steps leave them."""
    for document in documents:
        passed: Document | None = document
        for step in steps:
            if passed is not None:
                passed = step(passed)
        if passed is not None:
            yield passed
