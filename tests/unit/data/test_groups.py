"""Which blocks are packed together."""

import numpy as np
import pytest

from megatfm.data.groups import group_blocks


@pytest.mark.parametrize("rows_of_a_block", [3, 50, 400])
def test_no_blocks_are_packed_twice_to_find_a_group(rows_of_a_block: int) -> None:
    """Sequences of a little over half a row, which never fill one, so that all sizes of groups are looked at."""
    volumes = np.arange(41)[:, None] * rows_of_a_block * 60
    tried: list[tuple[int, int]] = []

    def rows_of(begin: int, end: int) -> int:
        tried.append((begin, end))
        return (end - begin) * rows_of_a_block

    found = list(group_blocks(volumes, (100,), rows_of, is_bin_packed=True))
    assert found[-1][0] == 40
    assert sum(rows for _, rows in found) == 40 * rows_of_a_block
    assert len(set(tried)) == len(tried)
