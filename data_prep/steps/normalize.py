"""Unicode normal forms."""

import unicodedata
from dataclasses import replace

from megatfm.config.prep_steps import NormalizeConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document


class Normalize:
    """Text in a normal form (Unicode Standard Annex 15), by the tables of this Python."""

    title = "normal form"

    def __init__(self, config: NormalizeConfig) -> None:
        self._form = config.form

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        if document.text.isascii() or unicodedata.is_normalized(self._form, document.text):
            return document
        return replace(document, text=unicodedata.normalize(self._form, document.text))
