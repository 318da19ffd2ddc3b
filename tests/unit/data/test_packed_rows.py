"""Documents that are joined at once make the rows that they make one by one."""

from typing import Any

import numpy as np
import pytest

from megatfm.data.packed_rows import PackedBlock, pack_in_memory
from megatfm.data.sequences import PAD_DOCUMENT_ID, PackingConfig
from megatfm.errors import MegatfmError
from megatfm.objectives import Causal, Example, SpecialTokens

SPECIAL = SpecialTokens(bos=1, eos=2, pad=0)


class OneByOne(Causal):
    """The same, and a subclass that changes `build` alone is asked for each document."""

    built = 0

    def build_example(self, *args: Any) -> Example:
        self.built += 1
        return super().build_example(*args)


def texts(dtype: str) -> list[np.ndarray]:
    return [np.arange(10 * i, 10 * i + n, dtype=dtype) for i, n in enumerate((5, 0, 33, 1, 16, 0), start=1)]


@pytest.mark.parametrize("as_one_document", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("special", [SPECIAL, SpecialTokens(bos=70_000, eos=70_001, pad=70_002)])
def test_joined_and_built_one_by_one(dtype: str, special: SpecialTokens, as_one_document: bool) -> None:
    def packed(objective: Causal) -> PackedBlock:
        how = PackingConfig(objective, (7,), 0, special.pad, as_one_document)
        return pack_in_memory(texts(dtype), how, order=lambda n: np.arange(n)[::-1])

    one_by_one = OneByOne(special)
    joined, single = packed(Causal(special)), packed(one_by_one)
    assert one_by_one.built == 6
    assert joined.n_rows == single.n_rows == 9
    for row in range(10):
        np.testing.assert_equal(joined.row(row), single.row(row))
    assert joined.row(0)["tokens"][0] == special.bos
    assert (joined.row(9)["tokens"] == special.pad).all()


def test_a_join_of_another_length_than_planned_is_named() -> None:
    class Longer(Causal):
        def build_many(self, documents: Any) -> Example:
            return {name: np.append(field, 0) for name, field in super().build_many(documents).items()}

    with pytest.raises(MegatfmError, match="joined 6 documents to 62 tokens, not 61"):
        pack_in_memory(texts("uint16"), PackingConfig(Longer(SPECIAL), (7,), 0))


def test_ids_over_31_bits_are_refused() -> None:
    with pytest.raises(MegatfmError, match="'tokens' has values that do not fit 32-bit integers"):
        pack_in_memory([np.array([2**31], np.uint32)], PackingConfig(Causal(SPECIAL), (7,), 0))


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("length", [5, 37, 700])
def test_many_short_documents_are_numbered_as_few_are(
    few: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against numbers and positions counted token by token."""
    monkeypatch.setattr("megatfm.data.row_store.LOOP_LIMIT", few)
    lengths = np.random.default_rng(0).integers(0, 9, 150)
    packed = pack_in_memory(
        [np.zeros(n, np.uint16) for n in lengths], PackingConfig(Causal(SPECIAL), (length,), 0)
    )
    owner = np.repeat(np.arange(150), lengths + 1)
    for row in range(packed.n_rows):
        local = owner[row * length : (row + 1) * length].tolist()
        pad = [PAD_DOCUMENT_ID] * (length - len(local))
        assert packed.row(row)["documents"].tolist() == [n - local[0] for n in local] + pad
        counted = [local[:at].count(n) for at, n in enumerate(local)]
        assert packed.row(row)["positions"].tolist() == counted + [0] * len(pad)


def test_a_packed_block_takes_what_its_fields_take() -> None:
    """Four bytes a token of uint16, so that blocks of very long documents don't push others out of the cache."""
    documents = [np.zeros(n, np.uint16) for n in (5000, 100, 20_000)]
    packed = pack_in_memory(documents, PackingConfig(Causal(SPECIAL), (512,), 0))
    assert packed.nbytes < 4.1 * 25_103
