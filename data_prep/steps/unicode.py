"""Repair of text that was broken on its way."""

import re
from dataclasses import replace

import ftfy
from ftfy.badness import is_bad
from ftfy.chardata import CONTROL_CHARS

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document

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
# What ftfy's fixers look for besides mojibake: control characters of both kinds, line breaks other than \n, halves of
# surrogate pairs. A line without these that does not look like mojibake is one that ftfy leaves alone.
_ODD = re.compile(f"[{re.escape(''.join(map(chr, CONTROL_CHARS)))}\r\x80-\x9f\u2028\u2029\ud800-\udfff]")

_LINE = re.compile(r"[^\n]*\n|[^\n]+")


class FixUnicode:
    """Repairs mojibake, stray control characters, byte order marks, surrogates and foreign line breaks."""

    def __init__(self) -> None:
        self.counts = StepStats("fix unicode")

    def __call__(self, document: Document) -> Document | None:
        self.counts.count_input(document.text_bytes)
        text = fix_text(document.text)
        if text is document.text:
            self.counts.count_kept(document.text_bytes)
            return document
        fixed = replace(document, text=text)
        if not fixed.text.strip():
            self.counts.count_dropped("empty once repaired", document.text_bytes, document.id)
            return None
        self.counts.changed += 1
        self.counts.count_kept(fixed.text_bytes)
        return fixed


def fix_text(text: str) -> str:
    """The text as `ftfy.fix_text` would give it back, the same object if that is equal.

    ftfy repairs line by line, each by itself, so it is only asked for the lines that it could change.
    """
    is_odd = _ODD.search(text) is not None
    if text.isascii() and not is_odd:
        return text
    lines = _LINE.findall(text)
    changed = False
    for number, line in enumerate(lines):
        if (not line.isascii() or is_odd) and (_ODD.search(line) or is_bad(line)):
            lines[number] = ftfy.fix_text(line, REPAIR)
            changed = changed or lines[number] != line
    return "".join(lines) if changed else text
