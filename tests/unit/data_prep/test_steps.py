"""Repair, languages, HTML, normal forms and redaction: what is changed, what is left alone, what is counted."""

import io
import random
import re
import tokenize
from importlib import resources
from pathlib import Path

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.base import CountingFilter, pass_through
from megatfm.data_prep.filters.text import _ODD, REPAIR, FixUnicode, _load_identifier, fix_text
from tests.support.prep_files import apply_step, build_step, random_pages

MENDED = {
    "mojibake": ("schÃ¶n â€“ voilÃ\xa0", "schön – voilà"),
    "line breaks": ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
    "byte order mark": ("\ufefftext", "text"),
    "controls": ("a\x00b\x07c\x7f", "abc"),
    "terminal colours": ("\x1b[31mred\x1b[0m", "red"),
}
LEFT_ALONE = {
    "quotes": "print(“curly”, 'straight', ‘single’)", "entities": "<b>&amp;&lt;&eacute;</b> and &amp; alone",
    "escapes": r"'\u00e9' '\xc3\xa9' '\x1b[0m' \r\n", "ligatures": "ﬁ ﬂ", "widths": "ＡＢＣ ｶﾀｶﾅ",
    "normal form": "e\u0301 \u1fd3 Å \u212b", "white space": "\tif x:\n\t\treturn \x0c\n  \n\n",
    "emoji": "👩\u200d👩\u200d👧 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
}  # fmt: skip


@pytest.mark.parametrize("name", MENDED)
def test_broken_unicode_is_mended(name: str) -> None:
    broken, right = MENDED[name]
    step = CountingFilter(FixUnicode())
    assert step(Document("x", broken)) == Document("x", right)
    assert step.counts.changed == 1
    assert (step.counts.bytes_in, step.counts.bytes_out) == (len(broken.encode()), len(right.encode()))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_sound_unicode_is_left_alone(name: str) -> None:
    step = CountingFilter(FixUnicode())
    assert step(Document("x", LEFT_ALONE[name])) == Document("x", LEFT_ALONE[name])
    assert step.counts.changed == 0


def test_the_short_cut_for_ascii_changes_nothing() -> None:
    for code in range(128):
        text = f"a{chr(code)}b{chr(code)}"
        step = CountingFilter(FixUnicode())
        assert step(Document("x", text)) == Document("x", ftfy.fix_text(text, REPAIR))


def test_characters_that_skip_ftfy_are_those_that_it_leaves_alone() -> None:
    """Every character: those that a fixer touches by themselves are known, in a line of their own."""
    fixers = (
        ftfy.fixes.fix_c1_controls, ftfy.fixes.fix_line_breaks, ftfy.fixes.fix_surrogates,
        ftfy.fixes.remove_terminal_escapes, ftfy.fixes.remove_control_chars,
    )  # fmt: skip
    calm = "".join(chr(code) for code in range(0x110000) if not _ODD.search(chr(code)))
    assert len(calm) > 1_100_000
    for fixer in fixers:
        assert fixer(calm) == calm
    for code in range(0x110000):
        if _ODD.search(chr(code)) and not 0xD800 <= code < 0xE000:
            text = f"a{chr(code)}b"
            assert fix_text(text) == ftfy.fix_text(text, REPAIR)


_BROKEN = st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=12).map(
    lambda text: text.encode().decode("latin-1")
)
_WINDOWS = st.sampled_from(["schön – voilà", "“naïve” café…", "Ελλάδα", "żółć", "東京"]).map(
    lambda text: text.encode().decode("windows-1252", "replace")
)
_PLAIN = st.sampled_from(["plain words ", "\n", "\r\n", "\r", "\n\n", " ", "é", "\x85", "\u2028", "\x1b[0m", "\xa0"])


@given(st.lists(st.one_of(_BROKEN, _WINDOWS, _PLAIN, st.text(max_size=6)), max_size=25).map("".join))
@settings(max_examples=300, deadline=None)
def test_fixing_unicode_is_ftfy_on_the_whole_text(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text, REPAIR)


def test_source_code_keeps_its_tokens() -> None:
    for path in sorted(Path(tokenize.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not text.isascii():
            fixed = CountingFilter(FixUnicode())(Document(path.name, text))
            assert fixed is not None
            assert list(tokenize.generate_tokens(io.StringIO(fixed.text).readline)) == list(
                tokenize.generate_tokens(io.StringIO(text).readline)
            )


def test_documents_of_rubbish_alone_are_dropped() -> None:
    step = CountingFilter(FixUnicode())
    assert step(Document("rubbish", "\ufeff\x01\x02 ")) is None
    assert step.counts.dropped["empty"].examples == ["rubbish: \ufeff\x01\x02"]


def test_steps_count_what_the_steps_before_them_passed_on() -> None:
    steps = [CountingFilter(FixUnicode()), CountingFilter(FixUnicode())]
    documents = [Document("1", "x\r\n"), Document("2", "x\n"), Document("3", "\x01")]
    assert list(pass_through(steps, documents)) == [Document("1", "x\n"), Document("2", "x\n")]
    assert [step.counts.documents_in for step in steps] == [3, 2]
    assert [step.counts.documents_out for step in steps] == [2, 2]
    assert [step.counts.changed for step in steps] == [1, 0]


def test_a_piece_stays_with_its_record_after_any_step() -> None:
    class Shorter:
        title = "shorter"

        def __init__(self, config: object) -> None: ...

        def apply(self, document: Document, counts: StepStats) -> Document | str:
            return Document(document.id, document.text[:3])

    left = CountingFilter(Shorter(None))(Document("a.jsonl#1.0", "a text", record="a.jsonl#1"))
    assert left == Document("a.jsonl#1.0", "a t", record="a.jsonl#1")


def test_html_becomes_its_text() -> None:
    nav, main = "<nav><a href='/'>Home</a></nav>", "<main><h1>Title</h1><p>A &amp; B are here.</p></main>"
    page = f"<html><body>{nav}{main}</body></html>"
    text, _ = apply_step(build_step("html"), page)
    assert text is not None
    assert "A & B are here." in text
    assert "Home" not in text
    assert "Home" in (apply_step(build_step("html", main_content=False), page)[0] or "")
    for plain in ("a < b and c > d", "#include <stdio.h>\nint x;", "List<String> a"):
        assert apply_step(build_step("html"), plain)[0] == plain
    assert apply_step(build_step("html"), "<html><head></head><body><p></p></body></html>") == (None, "no_content")


def test_language_filter_keeps_its_languages() -> None:
    texts = {
        "en": "The quick brown fox jumps over the lazy dog, and nobody knows why it would do so.",
        "de": "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß, warum er das tut.",
        "fr": "Le rapide renard brun saute par-dessus le chien paresseux, et personne ne sait pourquoi.",
        "ru": "Быстрая коричневая лиса прыгает через ленивую собаку, и никто не знает почему.",
    }
    pipeline_step = build_step("language", languages=["en", "ru"])
    results = [pipeline_step(Document(name, text)) for name, text in texts.items()]
    assert [document.language for document in results if document] == ["en", "ru"]
    assert pipeline_step.counts.found == dict.fromkeys(texts, 1)
    assert set(pipeline_step.counts.dropped) == {"language_de", "language_fr"}
    assert apply_step(build_step("language", language_threshold=1.0), "ok")[1] == "language_threshold"


def test_languages_and_probabilities_are_those_of_the_library() -> None:
    reference, actual = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True), _load_identifier()
    rng = random.Random(0)
    blocks = [(32, 127), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (0, 32)]
    texts = ["", "a", "é", "ABC DEF", "e\u0301", "\x00" * 9]
    texts.append("これはとてもいい本でした。ありがとうございます。")  # the longest n-grams are two such letters
    for _ in range(300):
        chosen_blocks = rng.sample(blocks, rng.randrange(1, 3))
        texts.append("".join(chr(rng.randrange(*rng.choice(chosen_blocks))) for _ in range(rng.randrange(40))))
    texts += [page[:at] for page in random_pages(40) for at in (7, 1000)]
    folder = Path(str(resources.files("megatfm.data_prep")))
    texts += [path.read_text()[:2000] for path in sorted(folder.rglob("*.py"))]
    assert len({actual.classify(text)[0] for text in texts}) > 20
    for text in texts:
        assert actual.rank(text) == reference.rank(text), text


def test_a_language_is_that_of_most_of_the_text() -> None:
    """A passage in another language, in the middle or at one end, changes nothing."""
    english = "Nobody knows why the quick brown fox would jump over the lazy dog at such an hour. " * 60
    german = "Niemand weiß, warum der schnelle braune Fuchs über den faulen Hund gesprungen ist. " * 15
    half = len(english) // 2
    for text in (english[:half] + german + english[half:], german + english, english + german):
        document = build_step("language")(Document("x", text))
        assert document is not None
        assert document.language == "en"


def test_normalize_gives_unicode_normal_forms() -> None:
    assert apply_step(build_step("normalize"), "e\u0301")[0] == "é"
    assert apply_step(build_step("normalize", form="NFKC"), "ﬁ ＡＢ")[0] == "fi AB"


# -------------------------------------------------------------------------------------------------- redaction


REDACTED = {
    "mail a.b+c@mail.example.co.uk, or <x@y.org>.": "mail <EMAIL>, or <<EMAIL>>.",
    "no@mail and @handle and a@b": "no@mail and @handle and a@b",
    "at 8.8.8.8 or 192.168.1.1 or 127.0.0.1 or 300.1.1.1": "at <IP> or 192.168.1.1 or 127.0.0.1 or 300.1.1.1",
    "version 1.2.3.4.5, 2001:4860:4860::8888, 12:30:45, fe80::1": "version 1.2.3.4.5, <IP>, 12:30:45, fe80::1",
    "+44 20 7946 0958 or (555) 123-4567 or 555-234-5678, 1.555.234.5678, 1 (555) 234-5678!": "<PHONE> or <PHONE> or "
    "<PHONE>, <PHONE>, <PHONE>!",
    "ISBN 978-3-16-148410-0, 2024-01-15, 1234567890, 555-123-45678, id 12-555-123-4567-8": "ISBN 978-3-16-148410-0, "
    "2024-01-15, 1234567890, 555-123-45678, id 12-555-123-4567-8",
    "a+b=c and 3+4, x[::2], 1::2": "a+b=c and 3+4, x[::2], 1::2",
}


@pytest.mark.parametrize("text", REDACTED)
def test_pii_is_redacted(text: str) -> None:
    step = build_step("pii")
    assert apply_step(step, text)[0] == REDACTED[text]
    assert sum(step.counts.found.values()) == len(re.findall(r"<(?:EMAIL|IP|PHONE)>", REDACTED[text]))
    assert apply_step(build_step("pii", email="", ip="", phone=""), text)[0] == text


CAUGHT = {
    "<PHONE>": ["020 7946 0958", "(020) 7946 0958", "01 23 45 67 89", "06.12.34.56.78", "+351 912 345 678",
                "+49 (0)30 1234567", "+39 06 1234 5678", "+1 212-555-0123", "+86 138 0013 8000"],
    "tel: <PHONE>": ["tel: 030/1234567", "tel: 5550123", "tel: 13800138000"],
    "Call <PHONE>": ["Call 555-0123", "Call (555) 0123 4567"],
    "电话：<PHONE>": ["电话：13800138000"],
    "<SSN>": ["219-09-9999", "078-05-1120"],
    "<SECRET>": [f"SG.{'a1_-' * 5}ab.{'b2-_' * 10}abc", f"sk-proj-{'aB3_' * 12}", f"sk-svcacct-{'aB3-' * 30}ab",
                 f"sk-or-v1-{'0af9' * 16}"],
    "<EMAIL>": ["me@2x.org", "a.git@github.com", "git.user@github.com"],
    "<IP>": ["8.8.4.4"],
}  # fmt: skip
LEFT = [
    "image@2x.png", "logo@3x.jpeg, icon@1.5x.svg", "git@github.com:", "git clone git@github.com:owner/name.git",
    "scp me@host.example.com:folder/file .", "+15 000 000 people", "+20 000 000 of them", "+33 500 000 visitors",
    "+351 000 000", "section 3.4.5.6", "Section 3.4.5.6 and version 8.8.8.8", "see §8.8.4.4",
    "000-12-3456 666-12-3456 900-12-3456 219-00-9999 219-09-0000", "1-219-09-9999", "10 000 000 000", "0.12 34 56 78",
    "2024-01-15 12:30:45, 01.02.2003", "sk-learn-contrib is a name, task-proj-x too",
    "call 3 of 12, text 1984, phone 7",
]  # fmt: skip


@pytest.mark.parametrize(("stands", "text"), [(stands, text) for stands, some in CAUGHT.items() for text in some])
def test_redaction_replaces_personal_data(stands: str, text: str) -> None:
    assert apply_step(build_step("pii"), f"It is {text}, they say.")[0] == f"It is {stands}, they say."


@pytest.mark.parametrize("text", LEFT)
def test_redaction_leaves_harmless_numbers(text: str) -> None:
    assert apply_step(build_step("pii"), f"It is {text}, they say.")[0] == f"It is {text}, they say."


def test_redaction_takes_no_time_on_long_runs() -> None:
    """Patterns that try each place anew would take an hour."""
    for part in ("a", "1", "1.", "a:", "+1 ", "a.b@", "0 ", "tel: ", "call 1", "(0", "12-"):
        build_step("pii")(Document("x", part * (400_000 // len(part))))
