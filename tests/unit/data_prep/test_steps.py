"""Repair and exact duplicates: what is mended, what is left alone, what is counted."""

import hashlib
import io
import tokenize
from pathlib import Path

import ftfy
import pytest

from data_prep.documents import Document
from data_prep.steps import ExactDuplicates, FixUnicode, pass_through
from data_prep.steps.unicode import REPAIR

MENDED = {
    "mojibake": ("schÃ¶n â€“ voilÃ\xa0", "schön – voilà"),
    "line breaks": ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
    "byte order mark": ("\ufefftext", "text"),
    "controls": ("a\x00b\x07c\x7f", "abc"),
    "terminal colours": ("\x1b[31mred\x1b[0m", "red"),
}
LEFT_ALONE = {
    "quotes": "print(“curly”, 'straight', ‘single’)",
    "entities": "<b>&amp;&lt;&eacute;</b> and &amp; alone",
    "escapes": r"'\u00e9' '\xc3\xa9' '\x1b[0m' \r\n",
    "ligatures": "ﬁ ﬂ",
    "widths": "ＡＢＣ ｶﾀｶﾅ",
    "normal form": "e\u0301 \u1fd3 Å \u212b",
    "white space": "\tif x:\n\t\treturn \x0c\n  \n\n",
    "emoji": "👩\u200d👩\u200d👧 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
}


@pytest.mark.parametrize("name", MENDED)
def test_what_is_mended(name: str) -> None:
    broken, right = MENDED[name]
    step = FixUnicode()
    assert step(Document("x", broken)) == Document("x", right)
    assert step.counts.changed == 1
    assert (step.counts.bytes_in, step.counts.bytes_out) == (len(broken.encode()), len(right.encode()))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name: str) -> None:
    step = FixUnicode()
    assert step(Document("x", LEFT_ALONE[name])) == Document("x", LEFT_ALONE[name])
    assert step.counts.changed == 0


def test_the_short_cut_for_ascii_changes_nothing() -> None:
    for code in range(128):
        text = f"a{chr(code)}b{chr(code)}"
        step = FixUnicode()
        assert step(Document("x", text)) == Document("x", ftfy.fix_text(text, REPAIR))


def test_source_code_keeps_its_tokens() -> None:
    for path in sorted(Path(tokenize.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not text.isascii():
            fixed = FixUnicode()(Document(path.name, text))
            assert fixed is not None
            assert list(tokenize.generate_tokens(io.StringIO(fixed.text).readline)) == list(
                tokenize.generate_tokens(io.StringIO(text).readline)
            )


def test_what_holds_nothing_but_rubbish_is_dropped() -> None:
    step = FixUnicode()
    assert step(Document("rubbish", "\ufeff\x01\x02 ")) is None
    assert step.counts.dropped["empty once repaired"].examples == ["rubbish"]


def test_the_first_of_identical_texts_stays() -> None:
    texts = ["a", "b", "a", "c", "b", "a", "a "]
    step = ExactDuplicates()
    kept = list(pass_through([step], (Document(str(number), text) for number, text in enumerate(texts))))
    # The reference: first appearances by SHA-256.
    first = {
        hashlib.sha256(text.encode()).digest(): number for number, text in reversed(list(enumerate(texts)))
    }
    assert [int(document.source) for document in kept] == sorted(first.values())
    assert step.counts.dropped["same text"].examples == ["2 = 0", "4 = 1", "5 = 0"]
    assert step.counts.documents_in == 7


def test_steps_count_what_the_steps_before_them_passed_on() -> None:
    steps = [FixUnicode(), ExactDuplicates()]
    documents = [Document("1", "x\r\n"), Document("2", "x\n"), Document("3", "\x01")]
    assert list(pass_through(steps, documents)) == [Document("1", "x\n")]
    assert [step.counts.documents_in for step in steps] == [3, 2]
    assert [step.counts.documents_out for step in steps] == [2, 1]


def test_only_so_many_examples_are_kept() -> None:
    step = ExactDuplicates()
    list(pass_through([step], (Document(str(number), "x") for number in range(50))))
    dropped = step.counts.dropped["same text"]
    assert (dropped.documents, dropped.bytes, len(dropped.examples)) == (49, 49, 10)
