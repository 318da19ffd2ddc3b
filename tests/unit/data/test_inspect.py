"""`data check` reads everything; `data show` prints what a person wants to know."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatfm.data import Corpus, PackedDataset, check, show
from megatfm.data.inspect import padding


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


def test_padding_is_that_of_the_rows(corpus: Corpus, causal_type: type) -> None:
    class Whole(causal_type):  # type: ignore[misc]
        max_tokens = 599

    lengths = corpus.lengths() + 1
    for row in (64, 600):
        cut, whole = padding(lengths, corpus.blocks, row)
        assert cut == PackedDataset(corpus, causal_type(), sequence_length=row, seed=0).padding_fraction
    assert whole == PackedDataset(corpus, Whole(), sequence_length=600, seed=0).padding_fraction
    shown = f"rows of 2,048  {padding(lengths, corpus.blocks, 2048)[0]:.1%} padding where documents are cut"
    assert " ".join(shown.split()) in " ".join(show(corpus.folder).split())


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
