"""Documents by what is said of them."""

from typing import Any

from megatfm.config.prep_steps import WhereConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document


class MetadataFilter:
    """Keeps documents whose field has one of some values, or lies between two."""

    title = "where"

    def __init__(self, config: WhereConfig) -> None:
        self._config = config
        self.title = f"where {config.field}"

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        config, value = self._config, document.get(self._config.field)
        if value is None:
            return document if config.missing == "keep" else f"has no {config.field}"
        if config.is_in and value not in config.is_in:
            return f"has another {config.field}"
        if value in config.is_not:
            return f"has an unwanted {config.field}"
        for limit, sign in ((config.at_least, 1), (config.at_most, -1)):
            if limit is None:
                continue
            if not _comparable(value, limit):
                return f"has a {config.field} that can't be compared"
            if (value < limit) if sign > 0 else (value > limit):
                return f"has too {'small' if sign > 0 else 'large'} a {config.field}"
        return document


def _comparable(value: Any, limit: float | str) -> bool:
    return isinstance(value, str) if isinstance(limit, str) else type(value) in (int, float)
