"""The steps of `[[steps]]`: each rule against its definition, or against datatrove, which no one here wrote."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import datatrove.pipeline.filters.c4_filters as their_c4
import datatrove.pipeline.filters.fineweb_quality_filter as their_fineweb
import datatrove.pipeline.filters.gopher_quality_filter as their_quality
import datatrove.pipeline.filters.gopher_repetition_filter as their_repetition
import pytest
from datatrove.data import Document as TheirDocument
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from pydantic import TypeAdapter

from megatfm.config.prep_steps import StepConfig
from megatfm.data_prep.documents import Document
from megatfm.data_prep.filters.base import PipelineStep, filter_names, make_filter
from megatfm.data_prep.filters.repetition import _Runs
from megatfm.data_prep.filters.text import _identifier
from megatfm.errors import UsageError

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "cat",
    "sat",
    "on",
    "mat",
    "with",
    "that",
    "have",
    "be",
    "to",
    "it's",
    "über",
    "naïve",
    "3",
    "14",
    "x9",
    "#tag",
    "wait…",
    "so...",
    "quick",
    "brown",
]
ENDS = (
    ".",
    "!",
    "?",
    '"',
    "'",
    "",
    "",
    "...",
    "…",
    ",",
    "。",
    "؟",
    "।",
)


@pytest.fixture(autouse=True)
def same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """datatrove cuts words by spaCy; the rules are compared, so both cut at white space."""
    for module in (their_quality, their_repetition, their_fineweb):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: text.split())
    # Sentences by their marks, as here.
    monkeypatch.setattr(
        their_c4, "split_into_sentences", lambda text, language: re.findall(r"[.!?]+[\"')\]]*(?=\s|$)", text)
    )


def step(name: str, **settings: Any) -> PipelineStep:
    return make_filter(TypeAdapter(StepConfig).validate_python({"name": name, **settings}))


def outcome(each: PipelineStep, text: str, url: str = "") -> tuple[str | None, str]:
    """What is left of a text, and why nothing is."""
    result = each(Document("x", text, url))
    return (result.text if result else None), next(iter(each.counts.dropped), "")


def pages(count: int, seed: int = 0) -> Iterator[str]:
    """Texts of all kinds of bad: repeated words, lines and paragraphs, bullets, fragments, mixed with good ones."""
    rng = random.Random(seed)
    for _ in range(count):
        words = rng.sample(WORDS, rng.randrange(3, len(WORDS)))
        lines: list[str] = []
        for _ in range(rng.randrange(1, 25)):
            if lines and rng.random() < rng.choice((0, 0.2, 0.5)):
                lines.append(rng.choice(lines))
                continue
            line = " ".join(rng.choices(words, k=rng.choice((1, 3, 8, 20))))
            bullet = rng.choice(("", "", "", "• ", "- "))
            lines.append(bullet + line + rng.choice(ENDS))
        yield "".join(line + rng.choice(("\n", "\n\n")) for line in lines).strip()


def about_cookies(count: int) -> Iterator[str]:
    ends = (" uses cookies.", " by Javascript { }.", " { }", " lorem ipsum", " as ever.")
    rng = random.Random(2)
    for text in pages(count):
        yield "\n".join(line + rng.choice(ends) * (rng.random() < 0.2) for line in text.split("\n"))


def blank_free(count: int) -> Iterator[str]:
    return (re.sub(r"\n+", "\n", text) for text in pages(count, seed=1))


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Iterator[str]], dict[str, Any]]] = {
    "gopher_repetition": (their_repetition.GopherRepetitionFilter, pages, {}),
    # Lines between blank lines, and words of nothing but punctuation, count differently there.
    "gopher_quality": (
        lambda: their_quality.GopherQualityFilter(min_doc_words=20),
        lambda count: (re.sub(r"(?<!\S)[•-](?!\S)", "•the", text) for text in blank_free(count)),
        {"min_doc_words": 20},
    ),
    "fineweb": (
        lambda: their_fineweb.FineWebQualityFilter(None, char_duplicates_ratio=0.1),
        pages,
        {},
    ),
    "c4": (
        lambda: their_c4.C4QualityFilter(min_num_sentences=3, min_words_per_line=5),
        about_cookies,
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_agree_with_datatrove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_theirs, texts, settings = CASES[name]
    theirs = make_theirs()
    if name == "fineweb":
        theirs.stop_chars = (*theirs.stop_chars, '"', "'")  # as the code that made FineWeb
    monkeypatch.setattr(their_c4, "END_PUNCTUATION", (".", "?", "!", '"'))  # C4 has no apostrophe
    kept, reasons = 0, set()
    for text in texts(400):
        document = TheirDocument(text, "x")
        verdict = theirs.filter(document)
        ours, why = outcome(step(name, **settings), text)
        assert (ours is not None) == (verdict is True), (text, verdict, why)
        kept += ours is not None
        if verdict is True:
            assert ours is not None
            if name == "c4":
                assert ours == document.text
        else:
            reasons.add((verdict[1], why))
    # Each of their reasons is one of ours, and there are both kinds of pages.
    assert len({theirs for theirs, _ in reasons}) == len(reasons) >= (2 if name != "c4" else 1)
    assert 20 < kept < 390


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("A { in a line without an end\nOne two three four five. A. B.", "One two three four five. A. B."),
        ("Lorem ipsum without an end\nOne two three four five. A. B.", "One two three four five. A. B."),
        (
            "Enable Javascript { here } and now.\nOne two three four five. A. B.",
            "One two three four five. A. B.",
        ),
        ("One [1] two three four.\nOne two three four five. A. B.", "One two three four five. A. B."),
        ("One two 'three four five'\u2028One two three four five. A. B.", "One two three four five. A. B."),
        ("One two three {four} five. A. B.", None),
        ("One two three lorem ipsum five. A. B.", None),
    ],
)
def test_what_the_paper_leaves_open_is_as_in_the_code_that_made_c4(text: str, left: str | None) -> None:
    assert outcome(step("c4"), text)[0] == left


def test_a_run_of_dots_is_looked_at_once() -> None:
    """Looked at from each dot on, these would take an hour."""
    text = f"One two three four five{'.' * 10**6}x. A. B."
    assert outcome(step("c4", max_word_length=10**8), text)[0] == text


SHORT = "It is so. "
DROPPED = {
    "c4": [
        ("lorem_ipsum", f"Some LOREM ipsum text is here.\n{SHORT * 9}"),
        ("curly_bracket", f"function is a word here {{}}.\n{SHORT * 9}"),
        ("too_few_sentences", "This line has five words indeed.\n"),
    ],
    "gopher_quality": [
        ("gopher_short_doc", "the and " * 24),
        ("gopher_below_avg_threshold", "a b c " * 30),
        ("gopher_above_avg_threshold", "incomprehensibilities " * 60),
        ("gopher_too_many_hashes", "the and #tag " * 40),
        ("gopher_too_many_ellipsis", "the and wait... " * 40),
        ("gopher_below_alpha_threshold", "the and with 1234 5678 " * 20),
        ("gopher_enough_stop_words", "cats like their warm milk " * 20),
        ("gopher_too_many_bullets", "• the and with that have\n" * 20),
        (
            "gopher_too_many_end_ellipsis",
            "the and with that have been here all along for a very long time...\n" * 20,
        ),
    ],
    "fineweb": [
        (
            "line_punct_ratio",
            "some words that are long enough to be a line here\n" * 10,
        ),
        ("short_line_ratio", "".join(f"short {n}.\n" for n in range(9))),
        ("list_ratio", "".join(f"{n:x>40}.\n" for n in range(9))),
    ],
}


@pytest.mark.parametrize(
    ("name", "why", "text"), [(name, *case) for name, cases in DROPPED.items() for case in cases]
)
def test_rules_drop_for_each_reason(name: str, why: str, text: str) -> None:
    each = step(name)
    assert outcome(each, text) == (None, why)
    (example,) = each.counts.dropped[why].examples
    assert example.startswith("x: ")
    assert example[3:8] in text


def test_ngrams_by_definition() -> None:
    """Against counters over joined words, for texts with many repeats; with limits that bounds can decide and ones that
    only counting can."""
    rng = random.Random(0)
    over = 0
    for _ in range(150):
        words = rng.choices(WORDS[: rng.randrange(2, len(WORDS))], k=rng.randrange(1, 60))
        words += words[: rng.randrange(20)]
        runs, limited = _Runs(words), _Runs(words)
        for n in range(2, 11):
            runs.grow()
            grams = [" ".join(words[at : at + n]) for at in range(len(words) - n + 1)]
            top, times = Counter(grams).most_common(1)[0] if grams else ("", 0)
            assert runs.top_characters() == len(top) * times
            repeated = their_repetition.find_all_duplicate(words, n)
            assert runs.repeated_characters() == repeated
            near = rng.choice((-3, -1, 0, 0.5, 1, 40))
            for each in (limited, _Runs(words)):
                assert each.top_is_over(n, len(top) * times + near) == (near < 0)
                assert each.repeated_are_over(n, repeated + near) == (near < 0)
            over += limited.n < n
        # One limit among loose ones, unless the words of a run overlap and come to more than the text.
        text = " ".join(words)
        top_over = any(_Runs(words).top_is_over(n, len(text)) for n in (2, 3, 4))
        for n in range(5, 11):
            share = their_repetition.find_all_duplicate(words, n) / len(text)
            loose = {
                "dup_line_frac": 1,
                "dup_para_frac": 1,
                "dup_line_char_frac": 1,
                "top_n_grams": [1, 1, 1],
            }
            most = [0.5 * share if each == n else 1.0 for each in range(5, 11)]
            assert (outcome(step("gopher_repetition", **loose, dup_n_grams=most), text)[0] is None) == (
                share > 0 or top_over
            )
    assert over > 300, "bounds decided that often"


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
def test_redaction(text: str) -> None:
    each = step("pii")
    assert outcome(each, text)[0] == REDACTED[text]
    assert sum(each.counts.found.values()) == len(re.findall(r"<(?:EMAIL|IP|PHONE)>", REDACTED[text]))
    assert outcome(step("pii", email="", ip="", phone=""), text)[0] == text


CAUGHT = {
    "<PHONE>": [
        "020 7946 0958",
        "(020) 7946 0958",
        "01 23 45 67 89",
        "06.12.34.56.78",
        "+351 912 345 678",
        "+49 (0)30 1234567",
        "+39 06 1234 5678",
        "+1 212-555-0123",
        "+86 138 0013 8000",
    ],
    "tel: <PHONE>": ["tel: 030/1234567", "tel: 5550123", "tel: 13800138000"],
    "Call <PHONE>": ["Call 555-0123", "Call (555) 0123 4567"],
    "电话：<PHONE>": ["电话：13800138000"],
    "<SSN>": ["219-09-9999", "078-05-1120"],
    "<SECRET>": [
        f"SG.{'a1_-' * 5}ab.{'b2-_' * 10}abc",
        f"sk-proj-{'aB3_' * 12}",
        f"sk-svcacct-{'aB3-' * 30}ab",
        f"sk-or-v1-{'0af9' * 16}",
    ],
    "<EMAIL>": ["me@2x.org", "a.git@github.com", "git.user@github.com"],
    "<IP>": ["8.8.4.4"],
}
LEFT = [
    "image@2x.png",
    "logo@3x.jpeg, icon@1.5x.svg",
    "git@github.com:",
    "git clone git@github.com:owner/name.git",
    "scp me@host.example.com:folder/file .",
    "+15 000 000 people",
    "+20 000 000 of them",
    "+33 500 000 visitors",
    "+351 000 000",
    "section 3.4.5.6",
    "Section 3.4.5.6 and version 8.8.8.8",
    "see §8.8.4.4",
    "000-12-3456 666-12-3456 900-12-3456 219-00-9999 219-09-0000",
    "1-219-09-9999",
    "10 000 000 000",
    "0.12 34 56 78",
    "2024-01-15 12:30:45, 01.02.2003",
    "sk-learn-contrib is a name, task-proj-x too",
    "call 3 of 12, text 1984, phone 7",
]


@pytest.mark.parametrize(
    ("stands", "text"), [(stands, text) for stands, some in CAUGHT.items() for text in some]
)
def test_what_redaction_catches(stands: str, text: str) -> None:
    assert outcome(step("pii"), f"It is {text}, they say.")[0] == f"It is {stands}, they say."


@pytest.mark.parametrize("text", LEFT)
def test_what_redaction_leaves(text: str) -> None:
    assert outcome(step("pii"), f"It is {text}, they say.")[0] == f"It is {text}, they say."


def test_redaction_takes_no_time_on_long_runs() -> None:
    """Patterns that try each place anew would take hours."""
    for text in (
        "a" * 10**6,
        "1" * 10**6,
        "1." * 5 * 10**5,
        "a:" * 5 * 10**5,
        "+1 " * 3 * 10**5,
        "a.b@" * 2 * 10**5,
        "0 " * 5 * 10**5,
        "tel: " * 2 * 10**5,
        "call 1" * 2 * 10**5,
        "(0" * 5 * 10**5,
        "12-" * 3 * 10**5,
    ):
        step("pii")(Document("x", text))


def test_html() -> None:
    nav, main = "<nav><a href='/'>Home</a></nav>", "<main><h1>Title</h1><p>A &amp; B are here.</p></main>"
    page = f"<html><body>{nav}{main}</body></html>"
    text, _ = outcome(step("html"), page)
    assert text is not None
    assert "A & B are here." in text
    assert "Home" not in text
    assert "Home" in (outcome(step("html", main_content=False), page)[0] or "")
    for plain in ("a < b and c > d", "#include <stdio.h>\nint x;", "List<String> a"):
        assert outcome(step("html"), plain)[0] == plain
    assert outcome(step("html"), "<html><head></head><body><p></p></body></html>") == (None, "no_content")


def test_languages() -> None:
    texts = {
        "en": "The quick brown fox jumps over the lazy dog, and nobody knows why it would do so.",
        "de": "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß, warum er das tut.",
        "fr": "Le rapide renard brun saute par-dessus le chien paresseux, et personne ne sait pourquoi.",
        "ru": "Быстрая коричневая лиса прыгает через ленивую собаку, и никто не знает почему.",
    }
    each = step("language", languages=["en", "ru"])
    kept = [each(Document(name, text)) for name, text in texts.items()]
    assert [document.language for document in kept if document] == ["en", "ru"]
    assert each.counts.found == dict.fromkeys(texts, 1)
    assert set(each.counts.dropped) == {"language_de", "language_fr"}
    assert outcome(step("language", language_threshold=1.0), "ok")[1] == "language_threshold"


def test_languages_and_probabilities_are_those_of_the_library() -> None:
    theirs, ours = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True), _identifier()
    rng = random.Random(0)
    blocks = [(32, 127), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (0, 32)]
    texts = ["", "a", "é", "ABC DEF", "e\u0301", "\x00" * 9]
    texts.append(
        "これはとてもいい本でした。ありがとうございます。"
    )  # the longest n-grams are two such letters
    for _ in range(300):
        some = rng.sample(blocks, rng.randrange(1, 3))
        texts.append("".join(chr(rng.randrange(*rng.choice(some))) for _ in range(rng.randrange(40))))
    texts += [page[:at] for page in pages(40) for at in (7, 1000)]
    folder = Path(str(resources.files("megatfm.data_prep")))
    texts += [path.read_text()[:2000] for path in sorted(folder.rglob("*.py"))]
    assert len({ours.classify(text)[0] for text in texts}) > 20
    for text in texts:
        assert ours.rank(text) == theirs.rank(text), text


def test_a_language_is_that_of_most_of_the_text() -> None:
    """What is in the middle, or at one end, may be in another."""
    english = "Nobody knows why the quick brown fox would jump over the lazy dog at such an hour. " * 60
    german = "Niemand weiß, warum der schnelle braune Fuchs über den faulen Hund gesprungen ist. " * 15
    half = len(english) // 2
    for text in (english[:half] + german + english[half:], german + english, english + german):
        kept = step("language")(Document("x", text))
        assert kept is not None
        assert kept.language == "en"


def test_normal_forms() -> None:
    assert outcome(step("normalize"), "e\u0301")[0] == "é"
    assert outcome(step("normalize", form="NFKC"), "ﬁ ＡＢ")[0] == "fi AB"


def test_blocked_urls(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("# no\nbad.com\nhttps://www.mixed.org/bad/  # only this\n")
    for url, why in {
        "http://bad.com/": "domain",
        "https://www.sub.BAD.com:8080/x": "domain",
        "https://notbad.com/": "",
        "https://mixed.org/good": "",
        "http://mixed.org/bad/page": "url",
        "http://[broken/": "",
        "": "",
    }.items():
        assert outcome(step("url_filter", file=str(path)), "text", url)[1] == why, url


def test_blocked_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("darn\nFoo bar\nc++\n")
    each = lambda **settings: step("c4_badwords", file=str(path), **settings)  # noqa: E731
    for text, found in {
        "Darn!": True,
        "darned": False,
        "a FOO BAR": True,
        "foobar": False,
        "in C++.": True,
    }.items():
        assert (outcome(each(), text)[0] is None) == found, text
    assert outcome(each(whole_words=False), "darned")[1] == "document_removed_with_badwords"
    with pytest.raises(UsageError, match=r"none\.txt: can't be read"):
        step("c4_badwords", file=str(tmp_path / "none.txt"))
    path.write_text("\n\n")
    with pytest.raises(UsageError, match="this list is empty"):
        each()


def test_decontamination_by_definition(tmp_path: Path) -> None:
    """Against sets of tuples of words."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 30))) for _ in range(40)]
    (tmp_path / "set.jsonl").write_text("".join(f'{{"q": {{"a": ["{text}"]}}}}\n' for text in sentences))
    each = step("decontaminate", files=[str(tmp_path / "set.jsonl")], n_grams=9, min_words=5)

    def grams(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    dropped = 0
    for _ in range(300):
        if rng.random() < 0.5:
            piece = rng.choice(sentences).upper().split()
            cut = rng.randrange(len(piece))
            words = [
                *rng.choices(WORDS, k=9),
                *piece[cut : cut + rng.randrange(1, 14)],
                *rng.choices(WORDS, k=9),
            ]
        else:
            words = rng.choices(WORDS, k=30)
        text = " — ".join(words)
        mine = grams(text)
        hit = False
        for sentence in map(grams, sentences):
            length = min(9, len(sentence)) if len(sentence) >= 5 else 0
            runs = (
                {tuple(sentence[at : at + length]) for at in range(len(sentence) - length + 1)}
                if length
                else set()
            )
            hit |= any(tuple(mine[at : at + length]) in runs for at in range(len(mine) - length + 1))
        assert (each(Document("x", text)) is None) == hit
        dropped += hit
    assert 20 < dropped < 270


def test_decontamination_says_what_it_can_not_look_for(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("three short words")
    with pytest.raises(UsageError, match="none of 1 texts has 8 words or more"):
        step("decontaminate", files=[str(path)])
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    with pytest.raises(UsageError, match=r"bad\.jsonl: line 2 is not JSON"):
        step("decontaminate", files=[str(tmp_path / "bad.jsonl")])
    (tmp_path / "some.jsonl").write_text('["short", "one two three four five six seven eight nine"]')
    each = step("decontaminate", files=[str(tmp_path / "some.jsonl")])
    assert each.notes == [
        "decontamination: 1 of 2 evaluation texts are too short to be looked for, with fewer than 8 words "
        "(decontaminate.min_words); the longest is 'short'"
    ]


def test_samples_are_fixed_and_grow() -> None:
    def kept(**settings: Any) -> set[str]:
        each = step("sample", **settings)
        names = [f"{folder}/{number}" for folder in ("web", "books") for number in range(500)]
        return {name for name in names if each(Document(name, "x"))}

    some, more = kept(rate=0.3), kept(rate=0.5)
    assert 230 < len(some) < 370
    assert some < more
    assert kept(rate=0.3, seed=1) != some
    mixed = kept(rate_by_path={"web/*": 0.1})
    assert sum(name.startswith("books") for name in mixed) == 500
    assert 25 < sum(name.startswith("web") for name in mixed) < 80


def test_every_step_counts_what_went_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("cat sat on mat with that have\n")
    for name in set(filter_names()) - {
        "metadata_filter",
        "linear_classifier",
        "fasttext",
        "presidio",
        "perplexity",
        "classifier",
    }:
        listed = {"file": str(tmp_path / "list")} if name in ("url_filter", "c4_badwords") else {}
        against = {"files": [str(tmp_path / "list")], "min_words": 5} if name == "decontaminate" else {}
        each = step(name, **listed, **against)
        left = [document for text in pages(40) if (document := each(Document("x", text)))]
        counts = each.counts
        assert counts.documents_in == 40
        assert counts.documents_out == len(left) == 40 - sum(d.documents for d in counts.dropped.values())
        assert counts.bytes_out == sum(document.text_bytes for document in left)
        assert counts.bytes_in == sum(len(text.encode()) for text in pages(40))
