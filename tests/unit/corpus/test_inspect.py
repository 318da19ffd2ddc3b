"""`data check` reads everything; `data show` prints what a person wants to know."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check, show


def test_check_counts_what_it_has_read(folder: Path) -> None:
    corpus, checked = Corpus.open(folder), check(folder)
    assert (checked.shards, checked.blocks) == (len(corpus.indexes), corpus.n_blocks)
    assert (checked.samples, checked.tokens) == (100, int(corpus.lengths().sum()))
    assert checked.bytes == sum(path.stat().st_size for path in folder.glob("*.tar.zst"))
    assert "100 samples" in str(checked)


def test_show_gives_the_overview(folder: Path) -> None:
    text = show(folder)
    for fact in (
        "100",
        "(3.000 a token)",
        "a" * 64,
        '{"made by": "a test"}',
        Corpus.open(folder).fingerprint,
    ):
        assert fact in text


def test_show_gives_a_sample(folder: Path) -> None:
    def decode(tokens: NDArray[np.integer]) -> str:
        return f"<text of {len(tokens)} tokens>"

    n = Corpus.open(folder).lengths()[7]
    text = show(folder, 7, decode)
    for fact in ("7 of 100", "000007", "folder/file 7 ä.txt", f"<text of {n} tokens>"):
        assert fact in text
    assert show(folder, 7).splitlines()[-1].split() == list(
        map(str, Corpus.open(folder).read_sample(7).tokens)
    )
