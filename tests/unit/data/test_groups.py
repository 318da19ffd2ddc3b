"""Which blocks are packed together, and how much padding that leaves."""

import numpy as np
import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import show
from megatfm.data.bin_packing import describe_padding, group_blocks, padding
from megatfm.data.dataset import PackedDataset


@pytest.mark.parametrize("rows_of_a_block", [3, 50, 400])
def test_no_blocks_are_packed_twice_to_find_a_group(rows_of_a_block: int) -> None:
    """Sequences of a little over half a row, which never fill one, so that all sizes of groups are looked at."""
    volumes = np.arange(41)[:, None] * rows_of_a_block * 60
    tried: list[tuple[int, int]] = []

    def rows_of(begin: int, end: int) -> int:
        tried.append((begin, end))
        return (end - begin) * rows_of_a_block

    actual = list(group_blocks(volumes, (100,), rows_of, is_bin_packed=True))
    assert actual[-1][0] == 40
    assert sum(rows for _, rows in actual) == 40 * rows_of_a_block
    assert len(set(tried)) == len(tried)


def test_padding_is_that_of_the_rows(corpus: Corpus, causal_type: type) -> None:
    class Whole(causal_type):  # type: ignore[misc]
        max_tokens = 599

    lengths = corpus.lengths() + 1
    for row in (64, 600):
        cut, full = padding(lengths, corpus.blocks, row)
        assert cut == PackedDataset(corpus, causal_type(), sequence_length=row, seed=0).padding_fraction
    assert full == PackedDataset(corpus, Whole(), sequence_length=600, seed=0).padding_fraction
    displayed = f"rows of 2,048  {100 * padding(lengths, corpus.blocks, 2048)[0]:.1f} % padding where documents are cut"
    assert " ".join(displayed.split()) in " ".join(
        show(corpus.folder, describe_rows=describe_padding).split()
    )
