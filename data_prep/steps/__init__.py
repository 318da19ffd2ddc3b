"""Steps that documents pass through one at a time, found by the name in `[[steps]]`."""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module

from data_prep.documents import Document
from data_prep.steps.blocked import BlockedUrls, BlockedWords
from data_prep.steps.c4 import C4
from data_prep.steps.decontaminate import Decontaminate
from data_prep.steps.fineweb import FineWeb
from data_prep.steps.gopher import GopherQuality
from data_prep.steps.html import Html
from data_prep.steps.language import Language
from data_prep.steps.linear import Linear
from data_prep.steps.normalize import Normalize
from data_prep.steps.redact import Redact
from data_prep.steps.registry import STEPS
from data_prep.steps.repetition import GopherRepetition
from data_prep.steps.rule import Counted, DocumentStep, Rule
from data_prep.steps.sample import Sample
from data_prep.steps.unicode import FixUnicode
from data_prep.steps.where import Where
from megatfm.config.base import Section

__all__ = ["STEPS", "Counted", "DocumentStep", "FixUnicode", "Rule", "make", "pass_through"]

_RULES: dict[str, type[Rule]] = {
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
    "linear": Linear,
    "where": Where,
    "sample": Sample,
}
for _name, _rule in _RULES.items():
    STEPS.register(_name)(_rule)

# Imported when a config names them: their libraries are large, or need not be there.
_LATER = {
    "fasttext": "data_prep.steps.fast_text",
    "presidio": "data_prep.steps.presidio",
    "classifier": "data_prep.models.classifier",
    "perplexity": "data_prep.models.perplexity",
}


def make(config: Section) -> Counted:
    """The step that a table of `[[steps]]` asks for. Raises UsageError for a name that nothing has, or a list or file
    that can't be used."""
    name: str = getattr(config, "name")  # noqa: B009 (all sections of steps have one)
    if name in _LATER:
        import_module(_LATER[name])
    return Counted(STEPS.get(name)(config))


def pass_through(steps: Sequence[DocumentStep], documents: Iterable[Document]) -> Iterator[Document]:
    """The documents that all steps keep, as the steps leave them."""
    for document in documents:
        passed: Document | None = document
        for step in steps:
            if passed is not None:
                passed = step(passed)
        if passed is not None:
            yield passed
