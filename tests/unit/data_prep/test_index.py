"""Later rows, rows that are alike, and words of every script, against their definitions."""

import random
import re
import tracemalloc
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatfm.config.prep_steps import DecontaminateConfig
from megatfm.data_prep.dedup import key_table as index_module
from megatfm.data_prep.dedup.clusters import mark_near_duplicates, spanning_forest
from megatfm.data_prep.dedup.first_occurrence import group_equal_keys, mark_repeats
from megatfm.data_prep.dedup.hashing import compute_signatures, hash_ngrams, hash_words
from megatfm.data_prep.dedup.key_table import DedupContext, KeyTable, Partitioning, write_keys
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.filters.selection import Decontaminate
from tests.support.prep_files import run_tasks_in_random_order

MANY = 2**30
Marks = NDArray[np.uint8]


def marked(
    folder: Path,
    values: NDArray[Any],
    find: Callable[[KeyTable, DedupContext], StageResult],
    memory: int = MANY,
    sizes: Sequence[int] = (),
) -> tuple[Marks, StageResult]:
    """The marks of rows that lie in parts of these sizes and the rest, and what is told of them."""
    folder.mkdir(exist_ok=True)
    edges = np.cumsum([0, *sizes, len(values) - sum(sizes)]).tolist()
    files = [folder / f"rows.{number}" for number in range(len(edges) - 1)]
    for file, begin, end in zip(files, edges, edges[1:], strict=False):
        write_keys(file, [values[begin:end]])
    rows = KeyTable(files, values.dtype.str, values.shape[1], np.diff(edges).tolist())
    index = DedupContext(folder, memory, run_tasks_in_random_order)
    message = find(rows, index)
    return index.open_marks(len(rows), message["marks_per_file"]).read(0, len(rows))[:, 0], message


def later_by_definition(values: NDArray[Any]) -> list[bool]:
    earlier: set[bytes] = set()
    return [key in earlier or bool(earlier.add(key)) for key in (row.tobytes() for row in values)]


SIZES: list[tuple[int, ...]] = [(), (0, 1, 0, 90), (600,)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("memory", [MANY, 6000])
@pytest.mark.parametrize("kinds", [1, 40, 10**9])
def test_all_but_the_first_of_a_key_are_marked(tmp_path: Path, sizes: tuple[int, ...], memory: int, kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    stock = rng.integers(0, 2**64, min(kinds, 900), np.uint64)
    values = rng.choice(stock, (600, 1))
    values[rng.random(600) < 0.3] = stock[0]  # one that a third of all rows have
    values[-1], values[5] = 2**64 - 1, 0
    marks, _ = marked(tmp_path, values, mark_repeats, memory, sizes)
    assert marks.tolist() == later_by_definition(values)


@pytest.mark.parametrize("memory", [MANY, 20_000])
def test_later_ones_of_two_numbers(tmp_path: Path, memory: int) -> None:
    """Half of a key is not enough, and the examples name the very first."""
    values = np.random.default_rng(0).integers(0, 30, (3000, 2)).astype("<u8")
    values[:, 0] *= 2**59 // 3
    marks, message = marked(tmp_path, values, mark_repeats, memory, (1500,))
    assert marks.tolist() == later_by_definition(values)
    first: dict[bytes, int] = {}
    for number, row in enumerate(values):
        first.setdefault(row.tobytes(), number)
    later = np.flatnonzero(marks)[:10].tolist()
    assert message["examples"] == [[number, first[values[number].tobytes()]] for number in later]


def test_hashes_of_a_few_ranges_only(tmp_path: Path) -> None:
    """A range may hold all hashes that are close to one another: it is halved until they fit."""
    values = np.repeat(np.arange(300, dtype="<u8")[:, None], 2, axis=0)
    marks, _ = marked(tmp_path, values, mark_repeats, 4000)
    assert marks.tolist() == [0, 1] * 300


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("find", [mark_repeats, lambda rows, index: mark_near_duplicates(rows, index, 1, 0.75)])
def test_next_to_nothing(tmp_path: Path, count: int, find: Any) -> None:
    marks, _ = marked(tmp_path, np.zeros((count, 1), "<u8"), find, 1000, (0,))
    assert marks.tolist() == [0] * count


def test_equal_keys_in_one_array() -> None:
    hashes = np.array([5, 3, 5, 3, 3, 9], np.uint64)
    check = np.array([1, 1, 1, 2, 1, 1], np.uint64)
    firsts, later, of_later = group_equal_keys(hashes)
    assert firsts.tolist() == [1, 0, 5]
    assert sorted(zip(later.tolist(), of_later.tolist(), strict=True)) == [(2, 0), (3, 1), (4, 1)]
    firsts, later, of_later = group_equal_keys(hashes, check)
    assert firsts.tolist() == [1, 3, 0, 5]
    assert sorted(zip(later.tolist(), of_later.tolist(), strict=True)) == [(2, 0), (4, 1)]


def alike_by_definition(signs: NDArray[Any], bands: int, similarity: float, small: int = 32) -> list[bool]:
    """The rule, bucket by bucket, and then groups by repeated joining."""
    above = list(range(len(signs)))

    def root(number: int) -> int:
        while above[number] != number:
            number = above[number]
        return number

    def join(a: int, b: int) -> bool:
        is_near = bool((signs[a] == signs[b]).mean() >= similarity)
        if is_near:
            low, high = sorted((root(a), root(b)))
            above[high] = low
        return is_near

    width = signs.shape[1] // bands
    for band in range(bands):
        buckets: dict[bytes, list[int]] = {}
        for number, row in enumerate(signs[:, band * width : (band + 1) * width]):
            buckets.setdefault(row.tobytes(), []).append(number)
        for bucket in buckets.values():
            left = bucket
            while len(left) > small:
                left = [number for number in left if not join(left[0], number)]
            for at, number in enumerate(left):
                for other in left[:at]:
                    join(other, number)
    return [above[number] != number for number in range(len(signs))]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("memory", [MANY, 20_000])
@pytest.mark.parametrize("kinds", [3, 60, 300])
def test_rows_that_are_alike(tmp_path: Path, sizes: tuple[int, ...], memory: int, kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    stock = rng.integers(0, 2**32, (kinds, 12)).astype("<u4")
    signs = stock[rng.integers(0, kinds, 600)]
    signs[:, :2] = signs[:, :2] % 3  # so that a band has large buckets of what is not alike
    for _ in range(3):
        signs[np.arange(600), rng.integers(0, 12, 600)] = rng.integers(0, 2, 600)
    expected = alike_by_definition(signs, 4, 0.75)
    marks, _ = marked(tmp_path, signs, lambda rows, index: mark_near_duplicates(rows, index, 4, 0.75), memory, sizes)
    assert marks.tolist() == expected
    assert 0.1 < np.mean(expected) < 1
    assert Counter(path.name.split(".")[0] for path in tmp_path.iterdir())["rest"] == 0


@pytest.mark.parametrize("memory", [MANY, 20_000])
def test_long_chain_of_near_duplicates_is_one_cluster(tmp_path: Path, memory: int) -> None:
    """Rows of which each is alike to two others only, in an order by chance: one cluster, and one that is apart."""
    length = 400
    chain = np.arange(length)[:, None] * 1000 + np.arange(8)
    signs = np.concatenate([chain.astype("<u4"), np.arange(8, dtype="<u4")[None] + 5])
    signs[1:length:2, :4] = signs[: length - 1 : 2, :4]  # a row's first half is that of the one before it,
    signs[2:length:2, 4:] = signs[1 : length - 1 : 2, 4:]  # and its second that of the one behind it
    signs = signs[np.random.default_rng(0).permutation(len(signs))]
    marks, _ = marked(tmp_path, signs, lambda rows, index: mark_near_duplicates(rows, index, 2, 0.5), memory, (150,))
    assert marks.tolist() == alike_by_definition(signs, 2, 0.5)
    assert marks.sum() == length - 1


def test_a_tree_joins_what_the_edges_join() -> None:
    rng = np.random.default_rng(0)
    edges = np.sort(rng.integers(0, 300, (200, 2)) * 10**9, axis=1)
    actual = spanning_forest(edges)
    groups = {row: {row} for row in edges.ravel().tolist()}
    for a, b in edges.tolist():
        joined = groups[a] | groups[b]
        for row in joined:
            groups[row] = joined
    expected = {(min(group), row) for row, group in groups.items() if row != min(group)}
    assert set(map(tuple, actual.tolist())) == expected
    assert len(actual) == len(expected)
    assert len(spanning_forest(edges[:0])) == 0


def test_rows_are_divided_by_what_there_is() -> None:
    """A chunk and a range fit the memory, and there are enough tasks for many processes where rows are many."""
    small = Partitioning.fit_memory(10**6, 2**20, 100, 100)
    assert small.chunk_rows * 100 <= 2**20
    assert 10**6 / small.ranges * 100 <= 2**20
    assert Partitioning.fit_memory(10**9, 2**30, 100, 100).chunks >= index_module.MIN_PARTS
    assert Partitioning.fit_memory(1000, 2**30, 100, 100) == Partitioning(1000, index_module.PART_ROWS, 1)


@pytest.mark.parametrize("memory", [2**20, 2**22])
@pytest.mark.parametrize("kind", ["later", "alike"])
def test_the_memory_of_a_task_is_bounded(tmp_path: Path, memory: int, kind: str) -> None:
    """Python's and NumPy's memory, by tracemalloc; the rows take 3 and 9 MB, and a third of them are one."""
    rng = np.random.default_rng(0)
    find: Callable[[KeyTable, DedupContext], StageResult]
    if kind == "later":
        values, find = rng.integers(0, 2**64, (400_000, 1), np.uint64), mark_repeats
    else:
        values = rng.integers(0, 2**32, (20_000, 112), np.uint32)
        find = lambda rows, index: mark_near_duplicates(rows, index, 14, 0.75)  # noqa: E731
    values[::3] = values[0]
    write_keys(tmp_path / "rows", [values])
    rows = KeyTable([tmp_path / "rows"], values.dtype.str, values.shape[1], [len(values)])
    expected = np.arange(len(values)) % 3 == 0
    expected[0] = False
    peaks = []

    def measured(step: str, count: int, total: int, work: Any, join: Any = lambda _: {}) -> StageResult:
        message = []
        for number in range(count):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            message.append(work(number, lambda _: None))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return join(message)

    index = DedupContext(tmp_path, memory, measured)
    tracemalloc.start()
    try:
        message = find(rows, index)
    finally:
        tracemalloc.stop()
    assert np.array_equal(index.open_marks(len(rows), message["marks_per_file"]).read(0, len(rows))[:, 0], expected)
    assert memory / 2 < max(peaks) < 1.2 * memory


# ------------------------------------------------------------------------------------------------------ words


# Article 1 of the Universal Declaration of Human Rights.
ARTICLES = {
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
    "人間は、理性と良心とを授けられており、互いに同胞の精神をもって行動しなければならない。",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
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
    rng = random.Random(0)
    alphabet = [
        *"aZ9_ .,-\n\tßſﬁＡ²", "é", "e\u0301", "Ж", "東", "ッ", "ー", "—", "’", "İ", "😀", "x" * 9, "y" * 17, " ",
    ]  # fmt: skip
    alphabet += ["\u200b", "\u00ad", "\u200d", "हि", "न्दी", "م", "ـ", "가", "①", "\ufe0f", "\U00020000", "𝐱"]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(400)]
    hashes, offsets = hash_words(texts)
    words = [split(text) for text in texts]
    assert np.diff(offsets).tolist() == list(map(len, words))
    flat = [word for item in words for word in item]
    assert len(set(zip(flat, hashes.tolist(), strict=True))) == len(set(flat)) == len(set(hashes.tolist()))
    for length in (1, 2, 5):
        runs, begins = hash_ngrams(hashes, offsets, length)
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
    first, second = ({tuple(item[at : at + length]) for at in range(len(item) - length + 1)} for item in (x, y))
    exact = len(first & second) / len(first | second)
    assert abs((a == b).mean() - exact) < (0.12 if language == "Thai" else 0.05)
    assert (a == other).mean() < 0.05
