"""Holding out: shares, levels, determinism; and no near duplicate across, against exact Jaccard similarity."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.documents import Document
from data_prep.split import NearDuplicates, choose, plan_split
from megatfm.config.prep import NearDuplicatesConfig

WORDS = [f"w{number}" for number in range(5000)]
sizes = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 1000), max_size=50)


@given(sizes=sizes, share=st.floats(0.01, 0.5), seed=st.integers(0, 5))
def test_the_share_is_at_most_what_was_asked_and_at_least_half(
    sizes: dict[str, int], share: float, seed: int
) -> None:
    held_out = choose(sizes, share, seed)
    got, most = sum(sizes[name] for name in held_out), share * sum(sizes.values())
    assert not held_out or most / 2 <= got <= most
    assert held_out == choose(dict(reversed(sizes.items())), share, seed)


def test_seeds_choose_differently_and_names_keep_their_side() -> None:
    names = {f"package{number}": 10 for number in range(1000)}
    first, other = choose(names, 0.1, 0), choose(names, 0.1, 1)
    assert len(first) == len(other) == 100
    assert len(first & other) < 30
    grown = choose({**names, **{f"new{number}": 10 for number in range(100)}}, 0.1, 0)
    assert len(first & grown) > 85


def test_a_level_is_left_only_when_it_can_not_give_the_share() -> None:
    text = "x" * 100
    packages = [Document(f"p{number}/{name}.py", text) for number in range(20) for name in "ab"]
    files = [Document(f"p/{number}.py", text) for number in range(20)]
    parts = [Document(f"p/one.py#{number}", text) for number in range(20)]
    for documents, level in ((packages, "top-level package"), (files, "file"), (parts, "part of a file")):
        split = plan_split(documents, 0.1, 0)
        assert split is not None
        assert split.level == level
        assert sum(split.holds_out(document) for document in documents) in (2, 4)
    assert plan_split(parts[:1], 0.1, 0) is None
    assert plan_split([], 0.1, 0) is None


def test_packages_stay_together() -> None:
    documents = [Document(f"p{number % 20}/d/{number}.py", "x" * 100) for number in range(400)]
    split = plan_split(documents, 0.1, 0)
    assert split is not None
    sides = {document.entry: split.holds_out(document) for document in documents}
    assert all(split.holds_out(document) == sides[document.entry] for document in documents)
    assert sum(sides.values()) == 2


@pytest.mark.parametrize("threshold", [0.6, 0.7, 0.85])
def test_near_duplicates_against_exact_similarity(threshold: float) -> None:
    rng = random.Random(0)
    near = NearDuplicates(NearDuplicatesConfig(similarity=threshold, shingle_words=3))
    held_out = [" ".join(rng.choices(WORDS, k=400)) for _ in range(20)]
    for number, text in enumerate(held_out):
        near.hold_out(Document(f"v{number}", text))
    wrong = clear = 0
    for number in range(160):
        words = held_out[number % 20].split()
        for _ in range(rng.randrange(60)):
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        # The other held-out texts are random too: they share next to nothing with this one.
        similarity = jaccard(" ".join(words), held_out[number % 20])
        dropped = near(Document(f"t{number}", " ".join(words))) is None
        if abs(similarity - threshold) > 0.12:  # three standard deviations of an estimate from 128 hashes
            clear += 1
            wrong += dropped != (similarity > threshold)
    assert clear > 50
    assert wrong <= 1


def test_what_is_dropped_is_counted_with_what_it_is_near() -> None:
    near = NearDuplicates(NearDuplicatesConfig())
    text = " ".join(WORDS[:200])
    near.hold_out(Document("held.txt", text))
    assert near(Document("copy.txt", text.upper())) is None
    assert near(Document("other.txt", " ".join(WORDS[300:500]))) is not None
    assert near.counts.dropped["near a validation document"].examples == ["copy.txt ~ held.txt (1.00)"]
    assert (near.counts.documents_in, near.counts.documents_out) == (2, 1)


@pytest.mark.parametrize("text", ["one", "two words", "!!!", "\n=\n", "東京"])
def test_short_texts_are_near_only_to_themselves(text: str) -> None:
    near = NearDuplicates(NearDuplicatesConfig())
    near.hold_out(Document("held", text))
    assert near(Document("same", text)) is None
    assert near(Document("other", f"{text} and something else that is different")) is not None


def test_signatures_are_pinned() -> None:
    """Another version of the library must not silently drop other documents."""
    signature = NearDuplicates(NearDuplicatesConfig())._signature(
        "the quick brown fox jumps over the lazy dog"
    )
    assert signature.digest()[:4] == PINNED


def jaccard(a: str, b: str) -> float:
    x, y = (set(zip(*(re.findall(r"\w+", text)[at:] for at in range(3)), strict=False)) for text in (a, b))
    return len(x & y) / len(x | y)


PINNED = [3227799074, 3414526352, 3528032977, 2034313900]
