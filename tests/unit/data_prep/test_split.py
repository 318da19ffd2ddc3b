"""Holding out: shares, levels, determinism; and no near duplicate across, against exact Jaccard similarity."""

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatfm.config.prep import NearDuplicatesConfig
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.split import (
    ValidationNearDuplicates,
    choose_held_out,
    plan_by_documents,
    plan_by_files,
)

WORDS = [f"w{number}" for number in range(5000)]
sizes = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 1000), max_size=50)


@given(sizes=sizes, share=st.floats(0.01, 0.5), seed=st.integers(0, 5))
def test_the_share_is_at_most_what_was_asked_and_at_least_half(
    sizes: dict[str, int], share: float, seed: int
) -> None:
    held_out = choose_held_out(sizes, share, seed)
    actual, most = sum(sizes[name] for name in held_out), share * sum(sizes.values())
    assert not held_out or most / 2 <= actual <= most
    assert held_out == choose_held_out(dict(reversed(sizes.items())), share, seed)


def test_seeds_choose_differently_and_names_keep_their_side() -> None:
    names = {f"package{number}": 10 for number in range(1000)}
    first, other = choose_held_out(names, 0.1, 0), choose_held_out(names, 0.1, 1)
    assert len(first) == len(other) == 100
    assert len(first & other) < 30
    grown = choose_held_out({**names, **{f"new{number}": 10 for number in range(100)}}, 0.1, 0)
    assert len(first & grown) > 85


def test_a_level_is_left_only_when_it_can_not_give_the_share() -> None:
    packages = {f"p{number}/{name}.py": 100 for number in range(20) for name in "ab"}
    files = {f"p/{number}.py": 100 for number in range(20)}
    parts = {f"p/one.py#{number}": 100 for number in range(20)}
    few = {"record": {"p/one.py": 2000}, "part of a file": parts}
    plans = (
        plan_by_files(packages, 0.1, 0),
        plan_by_files(files, 0.1, 0),
        plan_by_documents({**few, "record": parts}, 0.1, 0),
        plan_by_documents(few, 0.1, 0),
    )
    levels = ("top-level folder", "file", "record", "part of a file")
    for split, selected, level in zip(plans, (packages, files, parts, parts), levels, strict=True):
        assert split is not None
        assert split.level == level
        assert sum(split.holds_out(Document(name, "")) for name in selected) in (2, 4)
    assert plan_by_files({"p/one.py": 2000}, 0.1, 0) is None
    one = {"p/one.py#0": 100}
    assert plan_by_documents({"record": one, "part of a file": one}, 0.1, 0) is None
    assert plan_by_files({}, 0.1, 0) is None


def test_packages_stay_together() -> None:
    selected = {f"p{number % 20}/d/{number}.py": 100 for number in range(400)}
    split = plan_by_files(selected, 0.1, 0)
    assert split is not None
    documents = [Document(name, "") for name in selected]
    sides = {document.top_level: split.holds_out(document) for document in documents}
    assert all(split.holds_out(document) == sides[document.top_level] for document in documents)
    assert sum(sides.values()) == 2


def guarded(
    folder: Path, held_out: Mapping[str, str], texts: Mapping[str, str], **settings: Any
) -> StepStats:
    """What became of the texts, given what is held out."""
    near, counts = (
        ValidationNearDuplicates(NearDuplicatesConfig(**settings), folder),
        StepStats("split"),
    )
    # In two parts, and one that has none.
    for part, selected in enumerate((dict([*held_out.items()][:1]), {}, dict([*held_out.items()][1:]))):
        near.scan(part, documents(selected))
    assert near.index(3) == len(held_out)
    # Those who look need not be those who wrote.
    left = list(
        ValidationNearDuplicates(NearDuplicatesConfig(**settings), folder).drop_near(documents(texts), counts)
    )
    assert [document.id for document in left] == [
        name
        for name in texts
        if not any(
            example.startswith(f"{name} ~ ") for drop in counts.dropped.values() for example in drop.examples
        )
    ]
    return counts


def documents(texts: Mapping[str, str]) -> Iterator[Document]:
    return (Document(name, text) for name, text in texts.items())


@pytest.mark.parametrize("threshold", [0.6, 0.7, 0.85])
def test_near_duplicates_against_exact_similarity(
    tmp_path: Path, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatfm.data_prep.documents.EXAMPLES", 1000)
    monkeypatch.setattr("megatfm.data_prep.dedup.hashing.BATCH_BYTES", 20_000)  # in many batches
    rng = random.Random(0)
    held_out = {f"v{number}\n/é": " ".join(rng.choices(WORDS, k=400)) for number in range(20)}
    texts, similarities = {}, {}
    for number in range(160):
        words = held_out[f"v{number % 20}\n/é"].split()
        for _ in range(rng.randrange(60)):
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        # The other held-out texts are random too: they share next to nothing with this one.
        texts[f"t{number}"] = " ".join(words)
        similarities[f"t{number}"] = jaccard(texts[f"t{number}"], held_out[f"v{number % 20}\n/é"])
    counts = guarded(tmp_path, held_out, texts, similarity=threshold, n_grams=3)
    actual = {}
    for example in counts.dropped["near_validation_document"].examples:
        match = re.fullmatch(r"t(\d+) ~ v(\d+)\n/é \((0\.\d\d|1\.00)\)", example)
        assert match
        assert int(match[1]) % 20 == int(match[2])
        actual[f"t{match[1]}"] = float(match[3])
    # Three standard deviations of an estimate from 128 hashes.
    clear = [name for name, similarity in similarities.items() if abs(similarity - threshold) > 0.12]
    assert len(clear) > 50
    assert sum((name in actual) != (similarities[name] > threshold) for name in clear) <= 1
    assert all(abs(similarities[name] - estimate) < 0.2 for name, estimate in actual.items())


def test_what_is_dropped_is_counted_with_what_it_is_near(tmp_path: Path) -> None:
    text = " ".join(WORDS[:200])
    texts = {"copy.txt": text.upper(), "other.txt": " ".join(WORDS[300:500])}
    counts = guarded(tmp_path, {"first.txt": "another", "held.txt": text, "same.txt": text + " ."}, texts)
    assert counts.dropped["near_validation_document"].examples == ["copy.txt ~ held.txt (1.00)"]
    assert (counts.documents_in, counts.documents_out) == (2, 1)
    assert (counts.bytes_in, counts.bytes_out) == (len("".join(texts.values())), len(texts["other.txt"]))


@pytest.mark.parametrize("text", ["one", "two words", "!!!", "\n=\n", "東京"])
def test_short_texts_are_near_only_to_themselves(tmp_path: Path, text: str) -> None:
    texts = {"same": text, "other": f"{text} and something else that is different"}
    assert guarded(tmp_path, {"held": text}, texts).documents_out == 1


def jaccard(a: str, b: str) -> float:
    x, y = (set(zip(*(re.findall(r"\w+", text)[at:] for at in range(3)), strict=False)) for text in (a, b))
    return len(x & y) / len(x | y)
