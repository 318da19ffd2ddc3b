"""The steps of `[[steps]]`: each rule against its definition, or against datatrove, which no one here wrote."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datatrove.pipeline.filters.c4_filters as their_c4
import datatrove.pipeline.filters.fineweb_quality_filter as their_fineweb
import datatrove.pipeline.filters.gopher_quality_filter as their_quality
import datatrove.pipeline.filters.gopher_repetition_filter as their_repetition
import pytest
from datatrove.data import Document as TheirDocument

from megatfm.data_prep.documents import Document
from megatfm.data_prep.filters.base import _MODULES
from megatfm.data_prep.filters.repetition import _RepeatedNgrams
from megatfm.errors import UsageError
from tests.support.prep_files import WORDS, apply_step, build_step, random_pages


@pytest.fixture(autouse=True)
def same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """datatrove cuts words by spaCy; the rules are compared, so both cut at white space."""
    for module in (their_quality, their_repetition, their_fineweb):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: text.split())
    # Sentences by their marks, as here.
    monkeypatch.setattr(
        their_c4, "split_into_sentences", lambda text, language: re.findall(r"[.!?]+[\"')\]]*(?=\s|$)", text)
    )


def about_cookies(count: int) -> Iterator[str]:
    ends = (" uses cookies.", " by Javascript { }.", " { }", " lorem ipsum", " as ever.")
    rng = random.Random(2)
    for text in random_pages(count):
        yield "\n".join(line + rng.choice(ends) * (rng.random() < 0.2) for line in text.split("\n"))


def blank_free(count: int) -> Iterator[str]:
    return (re.sub(r"\n+", "\n", text) for text in random_pages(count, seed=1))


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Iterator[str]], dict[str, Any]]] = {
    "gopher_repetition": (their_repetition.GopherRepetitionFilter, random_pages, {}),
    # Lines between blank lines, and words of nothing but punctuation, count differently there.
    "gopher_quality": (
        lambda: their_quality.GopherQualityFilter(min_doc_words=20),
        lambda count: (re.sub(r"(?<!\S)[•-](?!\S)", "•the", text) for text in blank_free(count)),
        {"min_doc_words": 20},
    ),
    "fineweb": (lambda: their_fineweb.FineWebQualityFilter(None, char_duplicates_ratio=0.1), random_pages, {}),
    "c4": (lambda: their_c4.C4QualityFilter(min_num_sentences=3, min_words_per_line=5), about_cookies, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rules_agree_with_datatrove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_theirs, texts, settings = CASES[name]
    reference = make_theirs()
    if name == "fineweb":
        reference.stop_chars = (*reference.stop_chars, '"', "'")  # as the code that made FineWeb
    monkeypatch.setattr(their_c4, "END_PUNCTUATION", (".", "?", "!", '"'))  # C4 has no apostrophe
    n_kept, reasons = 0, set()
    for text in texts(400):
        document = TheirDocument(text, "x")
        verdict = reference.filter(document)
        actual, why = apply_step(build_step(name, **settings), text)
        assert (actual is not None) == (verdict is True), (text, verdict, why)
        n_kept += actual is not None
        if verdict is True:
            assert actual is not None
            if name == "c4":
                assert actual == document.text
        else:
            reasons.add((verdict[1], why))
    # Each of their reasons is one of ours, and there are both kinds of pages.
    assert len({reference for reference, _ in reasons}) == len(reasons) >= (2 if name != "c4" else 1)
    assert 20 < n_kept < 390


@pytest.mark.parametrize(("text", "left"), [
    ("A { in a line without an end\nOne two three four five. A. B.", "One two three four five. A. B."),
    ("Lorem ipsum without an end\nOne two three four five. A. B.", "One two three four five. A. B."),
    ("Enable Javascript { here } and now.\nOne two three four five. A. B.", "One two three four five. A. B."),
    ("One [1] two three four.\nOne two three four five. A. B.", "One two three four five. A. B."),
    ("One two 'three four five'\u2028One two three four five. A. B.", "One two three four five. A. B."),
    ("One two three {four} five. A. B.", None),
    ("One two three lorem ipsum five. A. B.", None),
])  # fmt: skip
def test_c4_s_rules_follow_its_code_where_the_paper_is_silent(text: str, left: str | None) -> None:
    assert apply_step(build_step("c4"), text)[0] == left


def test_a_run_of_dots_is_looked_at_once() -> None:
    """Looked at from each dot on, these would take an hour."""
    text = f"One two three four five{'.' * 10**6}x. A. B."
    assert apply_step(build_step("c4", max_word_length=10**8), text)[0] == text


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
        ("gopher_too_many_end_ellipsis", "the and with that have been here all along for a very long time...\n" * 20),
    ],
    "fineweb": [
        ("line_punct_ratio", "some words that are long enough to be a line here\n" * 10),
        ("short_line_ratio", "".join(f"short {n}.\n" for n in range(9))),
        ("list_ratio", "".join(f"{n:x>40}.\n" for n in range(9))),
    ],
}


@pytest.mark.parametrize(("name", "why", "text"), [(name, *case) for name, cases in DROPPED.items() for case in cases])
def test_rules_drop_for_each_reason(name: str, why: str, text: str) -> None:
    step = build_step(name)
    assert apply_step(step, text) == (None, why)
    (example,) = step.counts.dropped[why].examples
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
        runs, limited = _RepeatedNgrams(words), _RepeatedNgrams(words)
        for n in range(2, 11):
            runs.grow()
            grams = [" ".join(words[at : at + n]) for at in range(len(words) - n + 1)]
            top, times = Counter(grams).most_common(1)[0] if grams else ("", 0)
            assert runs.count_top_characters() == len(top) * times
            repeated = their_repetition.find_all_duplicate(words, n)
            assert runs.count_repeated_characters() == repeated
            near = rng.choice((-3, -1, 0, 0.5, 1, 40))
            for step in (limited, _RepeatedNgrams(words)):
                assert step.is_top_over(n, len(top) * times + near) == (near < 0)
                assert step.are_repeated_over(n, repeated + near) == (near < 0)
            over += limited.n < n
        # One limit among loose ones, unless the words of a run overlap and come to more than the text.
        text = " ".join(words)
        top_over = any(_RepeatedNgrams(words).is_top_over(n, len(text)) for n in (2, 3, 4))
        for n in range(5, 11):
            share = their_repetition.find_all_duplicate(words, n) / len(text)
            loose = {
                "dup_line_frac": 1, "dup_para_frac": 1, "dup_line_char_frac": 1, "top_n_grams": [1, 1, 1],
            }  # fmt: skip
            most = [0.5 * share if step == n else 1.0 for step in range(5, 11)]
            assert (apply_step(build_step("gopher_repetition", **loose, dup_n_grams=most), text)[0] is None) == (
                share > 0 or top_over
            )
    assert over > 300, "bounds decided that often"


def test_lists_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors on Windows write such a mark; with it, the first entry would match nothing."""
    (tmp_path / "list").write_text("spam.example\n", encoding="utf-8-sig")
    step = build_step("url_filter", file=str(tmp_path / "list"))
    assert apply_step(step, "text", "http://spam.example/")[1] == "domain"


def test_url_filter_drops_listed_addresses_however_they_are_spelled(tmp_path: Path) -> None:
    """Lists and crawls have names of other scripts as such or in punycode; a user or the usual port hides none."""
    path = tmp_path / "urls.txt"
    listed = "bad.com\nhttps://www.mixed.org/bad/  # only this\ndot.com.\nsearch.org?q=bad\n"
    listed += "xn--bcher-kva.de\nпример.рф\nfaß.de/bad\nplain.org/bad"
    path.write_text(f"# no\n{listed}\n", encoding="utf-8")
    for url, why in {
        "http://bad.com/": "domain",
        "https://www.sub.BAD.com:8080/x": "domain",
        "https://notbad.com/": "",
        "https://mixed.org/good": "",
        "http://mixed.org/bad/page": "url",
        "http://mixed.org./bad/page": "url",
        "http://bad.com.": "domain",
        "http://bad.com?a=1": "domain",
        "http://dot.com/": "domain",
        "http://search.org?q=bad&n=2": "url",
        "http://search.org/?q=bad": "url",
        "http://search.org?q=good": "",
        "http://[broken/": "",
        "": "",
        "http://bücher.de/": "domain",
        "http://www.BÜCHER.de/": "domain",
        "http://bu\u0308cher.de/": "domain",
        "http://xn--bcher-kva.de/": "domain",
        "http://a.xn--e1afmkfd.xn--p1ai/": "domain",
        "http://пример。рф/": "domain",
        "http://xn--fa-hia.de/bad/page": "url",
        "http://fass.de/bad": "",
        "http://xn--\u00fc.de/": "",
        "http://me:secret@plain.org:80/bad": "url",
        "http://plain.org:8080/bad": "",
    }.items():
        assert apply_step(build_step("url_filter", file=str(path)), "text", url)[1] == why, url


def test_badwords_filter_drops_listed_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("darn\nFoo bar\nc++\n")
    step = lambda **settings: build_step("c4_badwords", file=str(path), **settings)  # noqa: E731
    for text, result in {"Darn!": True, "darned": False, "a FOO BAR": True, "foobar": False, "in C++.": True}.items():
        assert (apply_step(step(), text)[0] is None) == result, text
    assert apply_step(step(whole_words=False), "darned")[1] == "document_removed_with_badwords"
    with pytest.raises(UsageError, match=r"none\.txt: can't be read"):
        build_step("c4_badwords", file=str(tmp_path / "none.txt"))
    path.write_text("\n\n")
    with pytest.raises(UsageError, match="this list is empty"):
        step()


def test_decontamination_by_definition(tmp_path: Path) -> None:
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 30))) for _ in range(40)]
    (tmp_path / "set.jsonl").write_text("".join(f'{{"q": {{"a": ["{text}"]}}}}\n' for text in sentences))
    step = build_step("decontaminate", files=[str(tmp_path / "set.jsonl")], n_grams=9, min_words=5)

    def grams(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    dropped = 0
    for _ in range(300):
        if rng.random() < 0.5:
            piece = rng.choice(sentences).upper().split()
            cut = rng.randrange(len(piece))
            words = [*rng.choices(WORDS, k=9), *piece[cut : cut + rng.randrange(1, 14)], *rng.choices(WORDS, k=9)]
        else:
            words = rng.choices(WORDS, k=30)
        text = " — ".join(words)
        grams_of_text = grams(text)
        hit = False
        for sentence in map(grams, sentences):
            length = min(9, len(sentence)) if len(sentence) >= 5 else 0
            runs = {tuple(sentence[at : at + length]) for at in range(len(sentence) - length + 1)} if length else set()
            hit |= any(tuple(grams_of_text[at : at + length]) in runs for at in range(len(grams_of_text) - length + 1))
        assert (step(Document("x", text)) is None) == hit
        dropped += hit
    assert 20 < dropped < 270


def test_decontamination_says_what_it_can_not_look_for(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("three short words")
    with pytest.raises(UsageError, match="none of 1 texts has 8 words or more"):
        build_step("decontaminate", files=[str(path)])
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    with pytest.raises(UsageError, match=r"bad\.jsonl: line 2 is not JSON"):
        build_step("decontaminate", files=[str(tmp_path / "bad.jsonl")])
    (tmp_path / "some.jsonl").write_text('["short", "one two three four five six seven eight nine"]')
    step = build_step("decontaminate", files=[str(tmp_path / "some.jsonl")])
    assert step.notes == [
        "decontamination: 1 of 2 evaluation texts are too short to be searched for, with fewer than 8 words "
        "(decontaminate.min_words); the longest is 'short'"
    ]


def test_samples_are_fixed_and_grow() -> None:
    def kept(**settings: Any) -> set[str]:
        step = build_step("sample", **settings)
        names = [f"{folder}/{number}" for folder in ("web", "books") for number in range(500)]
        return {name for name in names if step(Document(name, "x"))}

    fewer, more = kept(rate=0.3), kept(rate=0.5)
    assert 230 < len(fewer) < 370
    assert fewer < more
    assert kept(rate=0.3, seed=1) != fewer
    mixed = kept(rate_by_path={"web/*": 0.1})
    assert sum(name.startswith("books") for name in mixed) == 500
    assert 25 < sum(name.startswith("web") for name in mixed) < 80


def test_every_step_counts_what_went_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("cat sat on mat with that have\n")
    for name in {name for names in _MODULES.values() for name in names} - {
        "metadata_filter", "linear_classifier", "fasttext", "presidio", "perplexity", "classifier",
    }:  # fmt: skip
        listed = {"file": str(tmp_path / "list")} if name in ("url_filter", "c4_badwords") else {}
        against = {"files": [str(tmp_path / "list")], "min_words": 5} if name == "decontaminate" else {}
        step = build_step(name, **listed, **against)
        left = [document for text in random_pages(40) if (document := step(Document("x", text)))]
        counts = step.counts
        assert counts.documents_in == 40
        assert counts.documents_out == len(left) == 40 - sum(d.documents for d in counts.dropped.values())
        assert counts.bytes_out == sum(document.text_bytes for document in left)
        assert counts.bytes_in == sum(len(text.encode()) for text in random_pages(40))
