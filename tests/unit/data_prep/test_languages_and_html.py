"""Languages, HTML and normal forms."""

import random
from importlib import resources
from pathlib import Path

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from megatfm.data_prep.documents import Document
from megatfm.data_prep.filters.text import _identifier
from tests.support.cleaning_rules import random_pages, rule, rule_outcome


def test_html_becomes_its_text() -> None:
    nav, main = "<nav><a href='/'>Home</a></nav>", "<main><h1>Title</h1><p>A &amp; B are here.</p></main>"
    page = f"<html><body>{nav}{main}</body></html>"
    text, _ = rule_outcome(rule("html"), page)
    assert text is not None
    assert "A & B are here." in text
    assert "Home" not in text
    assert "Home" in (rule_outcome(rule("html", main_content=False), page)[0] or "")
    for plain in ("a < b and c > d", "#include <stdio.h>\nint x;", "List<String> a"):
        assert rule_outcome(rule("html"), plain)[0] == plain
    assert rule_outcome(rule("html"), "<html><head></head><body><p></p></body></html>") == (
        None,
        "no_content",
    )


def test_language_filter_keeps_its_languages() -> None:
    texts = {
        "en": "The quick brown fox jumps over the lazy dog, and nobody knows why it would do so.",
        "de": "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß, warum er das tut.",
        "fr": "Le rapide renard brun saute par-dessus le chien paresseux, et personne ne sait pourquoi.",
        "ru": "Быстрая коричневая лиса прыгает через ленивую собаку, и никто не знает почему.",
    }
    each = rule("language", languages=["en", "ru"])
    kept = [each(Document(name, text)) for name, text in texts.items()]
    assert [document.language for document in kept if document] == ["en", "ru"]
    assert each.counts.found == dict.fromkeys(texts, 1)
    assert set(each.counts.dropped) == {"language_de", "language_fr"}
    assert rule_outcome(rule("language", language_threshold=1.0), "ok")[1] == "language_threshold"


def test_languages_and_probabilities_are_those_of_the_library() -> None:
    reference, actual = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True), _identifier()
    rng = random.Random(0)
    blocks = [(32, 127), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (0, 32)]
    texts = ["", "a", "é", "ABC DEF", "e\u0301", "\x00" * 9]
    texts.append(
        "これはとてもいい本でした。ありがとうございます。"
    )  # the longest n-grams are two such letters
    for _ in range(300):
        some = rng.sample(blocks, rng.randrange(1, 3))
        texts.append("".join(chr(rng.randrange(*rng.choice(some))) for _ in range(rng.randrange(40))))
    texts += [page[:at] for page in random_pages(40) for at in (7, 1000)]
    folder = Path(str(resources.files("megatfm.data_prep")))
    texts += [path.read_text()[:2000] for path in sorted(folder.rglob("*.py"))]
    assert len({actual.classify(text)[0] for text in texts}) > 20
    for text in texts:
        assert actual.rank(text) == reference.rank(text), text


def test_a_language_is_that_of_most_of_the_text() -> None:
    """What is in the middle, or at one end, may be in another."""
    english = "Nobody knows why the quick brown fox would jump over the lazy dog at such an hour. " * 60
    german = "Niemand weiß, warum der schnelle braune Fuchs über den faulen Hund gesprungen ist. " * 15
    half = len(english) // 2
    for text in (english[:half] + german + english[half:], german + english, english + german):
        kept = rule("language")(Document("x", text))
        assert kept is not None
        assert kept.language == "en"


def test_normalize_gives_unicode_normal_forms() -> None:
    assert rule_outcome(rule("normalize"), "e\u0301")[0] == "é"
    assert rule_outcome(rule("normalize", form="NFKC"), "ﬁ ＡＢ")[0] == "fi AB"
