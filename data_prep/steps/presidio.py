"""What Microsoft Presidio's recognisers find by form and checksum."""

from dataclasses import replace
from typing import Any

from megatfm.config.prep_scores import PresidioConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document
from megatfm.data_prep.steps.registry import STEPS
from megatfm.errors import UsageError


@STEPS.register("presidio")
class Presidio:
    """Replaces entities by their names, `<US_SSN>`."""

    title = "presidio"

    def __init__(self, config: PresidioConfig) -> None:
        self._config = config
        recognizers = _pattern_recognizers(config.language)
        known = sorted({name for each in recognizers for name in each.supported_entities})
        if unknown := [name for name in config.entities if name not in known]:
            raise UsageError(
                f"steps: presidio: no recogniser of {config.language!r} finds {unknown[0]!r} by its form; there are: "
                f"{', '.join(known)}"
            )
        wanted = set(config.entities)
        self._recognizers = [each for each in recognizers if wanted & set(each.supported_entities)]

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        text, wanted = document.text, list(self._config.entities)
        found = [
            (result.start, result.end, -result.score, result.entity_type)
            for each in self._recognizers
            for result in each.analyze(text, wanted, None) or ()
            if result.score >= self._config.min_score and result.entity_type in wanted
        ]
        parts, at = [], 0
        for start, end, _, name in sorted(found, key=lambda each: (each[0], -each[1], each[2])):
            if start >= at:
                parts += [text[at:start], f"<{name}>"]
                counts.count_event(name)
                at = end
        return replace(document, text="".join([*parts, text[at:]])) if parts else document


def _pattern_recognizers(language: str) -> list[Any]:
    try:
        from presidio_analyzer import PatternRecognizer, RecognizerRegistry
    except ImportError as error:
        raise UsageError(
            "steps: presidio: is not installed: pip install presidio-analyzer, or use `redact`, which needs nothing"
        ) from error
    registry = RecognizerRegistry(supported_languages=[language])
    registry.load_predefined_recognizers(languages=[language])
    # That of e-mail addresses would fetch a list of domains from the network.
    return [
        each
        for each in registry.recognizers
        if isinstance(each, PatternRecognizer) and "EMAIL_ADDRESS" not in each.supported_entities
    ]
