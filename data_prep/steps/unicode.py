"""Repair of text that was broken on its way."""

import re
from dataclasses import replace

import ftfy

from data_prep.counts import Counts
from data_prep.documents import Document

# Repair only what was broken on the way to us. What an author may have meant stays: in source code an &amp; a
# curly quote, a ligature or a full-width letter is data. So is the normal form: in the standard library NFC
# would change exactly one file, re/_casefix.py, a table of letters that differ in nothing else.
REPAIR = ftfy.TextFixerConfig(
    unescape_html=False,
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    normalization=None,
    explain=False,
)
# Plain ASCII needs repair only if it has control characters; ftfy is spared the rest, most of a code corpus.
_ASCII_CONTROL = re.compile(r"[\x00-\x08\x0b\r\x0e-\x1f\x7f]")


class FixUnicode:
    """Repairs mojibake, stray control characters, byte order marks, surrogates and foreign line breaks."""

    def __init__(self) -> None:
        self.counts = Counts("fix unicode")

    def __call__(self, document: Document) -> Document | None:
        self.counts.take(document.text_bytes)
        if document.text.isascii() and not _ASCII_CONTROL.search(document.text):
            self.counts.keep(document.text_bytes)
            return document
        fixed = replace(document, text=ftfy.fix_text(document.text, REPAIR))
        if not fixed.text.strip():
            self.counts.drop("empty once repaired", document.text_bytes, document.source)
            return None
        self.counts.changed += fixed.text != document.text
        self.counts.keep(fixed.text_bytes)
        return fixed
