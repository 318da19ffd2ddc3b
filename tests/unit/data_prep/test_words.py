"""Words of every script: by a definition of names and categories of characters, in all spellings, found again."""

import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from megatfm.config.prep_steps import DecontaminateConfig
from megatfm.data_prep.dedup.hashing import compute_signatures, ngram_hashes, word_hashes
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.selection import Decontaminate

# Article 1 of the Universal Declaration of Human Rights.
ARTICLES = {
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
    "人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม "
    "และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्धि और अन्तरात्मा की "
    "देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए।",
    "Arabic": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميراً وعليهم أن يعامل "
    "بعضهم بعضاً بروح الإخاء.",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
}
SPELLINGS = {
    "as it is": lambda text: text,
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKD": lambda text: unicodedata.normalize("NFKD", text),
    "capitals": str.upper,
    "zero-width spaces": lambda text: re.sub("(.{3})", "\\1\u200b", text),
    "soft hyphens": lambda text: re.sub("(.{5})", "\\1\u00ad", text),
    "emphasis": lambda text: " ".join(f"_{word}_" for word in text.split(" ")),
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "selectors": lambda text: text.replace("人", "人\ufe00").replace("a", "a\ufe0f"),
    "vowel points": lambda text: text.replace("ل", "لِ").replace("م", "ـمُ"),
    "lines": lambda text: text.replace(" ", "\r\n\t"),
}


def split(text: str) -> list[str]:
    """Words by the names of characters; of Thai and its like one for each character, as where these are cut is left
    to a hash."""
    words, last = [""], ""
    for character in unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()):
        name, category = unicodedata.name(character, ""), unicodedata.category(character)
        if category == "Cf" or "VARIATION SELECTOR" in name or character == "ـ":
            continue
        if category[0] not in "LMN":
            words, last = [*words, ""], ""
            continue
        kind = re.match("CJK|HIRAGANA|KATAKANA|THAI|", name)
        assert kind
        if kind[0] or last:
            words.append("")
        words[-1] += character
        last = kind[0]
    return [word for word in words if word]


def test_words_and_runs_by_definition() -> None:
    """Equal hashes for equal words and runs, and only for those; texts apart from one another."""
    rng = random.Random(0)
    alphabet = [
        *"aZ9_ .,-\n\tßſﬁＡ²",
        "é",
        "e\u0301",
        "Ж",
        "東",
        "ッ",
        "ー",
        "—",
        "’",
        "İ",
        "😀",
        "x" * 9,
        "y" * 17,
        " ",
    ]
    alphabet += ["\u200b", "\u00ad", "\u200d", "हि", "न्दी", "م", "ـ", "가", "①", "\ufe0f", "\U00020000", "𝐱"]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(400)]
    hashes, offsets = word_hashes(texts)
    words = [split(text) for text in texts]
    assert np.diff(offsets).tolist() == list(map(len, words))
    flat = [word for item in words for word in item]
    assert len(set(zip(flat, hashes.tolist(), strict=True))) == len(set(flat)) == len(set(hashes.tolist()))
    for length in (1, 2, 5):
        runs, begins = ngram_hashes(hashes, offsets, length)
        expected = [
            [tuple(word[at : at + length]) for at in range(max(1, len(word) - length + 1))] if word else []
            for word in words
        ]
        assert np.diff(begins).tolist() == list(map(len, expected))
        flat_runs = [run for item in expected for run in item]
        pairs = set(zip(flat_runs, runs.tolist(), strict=True))
        assert len(pairs) == len(set(flat_runs)) == len(set(runs.tolist()))


def some_text(language: str, characters: int, seed: int) -> str:
    """A text of the characters of a language, in words where it has any."""
    rng, letters = random.Random(seed), sorted(set(ARTICLES[language]) - {" "})
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(characters // 5)]
    return ("" if language in ("Chinese", "Japanese", "Thai") else " ").join(words)[:characters]


@pytest.mark.parametrize("language", [*ARTICLES])
def test_an_evaluation_text_is_found_in_every_spelling(language: str, tmp_path: Path) -> None:
    article = ARTICLES[language]
    (tmp_path / "set.txt").write_text(article)
    rule = Decontaminate(DecontaminateConfig(name="decontaminate", files=(str(tmp_path / "set.txt"),)))
    begin, end = (some_text(language, 500, seed) for seed in (1, 2))
    gap = "" if language in ("Chinese", "Japanese", "Thai") else " "
    for name, spelled in SPELLINGS.items():
        for text in (article, article[len(article) // 8 :]):
            text = gap.join((begin, spelled(text), end))
            assert isinstance(rule.apply(Document("x", text), StepStats("x")), str), name
    for seed in range(20):
        text = some_text(language, 2000, seed)
        assert isinstance(rule.apply(Document("x", text), StepStats("x")), Document), "others stay"


@pytest.mark.parametrize("language", [*ARTICLES])
@pytest.mark.parametrize("share", [0.002, 0.005, 0.02])
def test_texts_that_differ_a_little_are_near(language: str, share: float) -> None:
    """Against the exact similarity of the sets of runs of five words, or of Thai of twenty characters."""
    rng, text = random.Random(5), some_text(language, 3000, 3)
    letters = [*text]
    for at in rng.sample(range(len(letters)), round(share * len(letters))):
        letters[at] = rng.choice(text)
    a, b, other = compute_signatures([text, "".join(letters), some_text(language, 3000, 4)], 5, 1024)
    x, y = (split(item) for item in (text, "".join(letters)))
    length = 20 if language == "Thai" else 5
    first, second = (
        {tuple(item[at : at + length]) for at in range(len(item) - length + 1)} for item in (x, y)
    )
    exact = len(first & second) / len(first | second)
    assert abs((a == b).mean() - exact) < (0.12 if language == "Thai" else 0.05)
    assert (a == other).mean() < 0.05
