"""A global batch of random documents, made and packed as training does it."""

import numpy as np
from numpy.typing import NDArray

from megatfm import keyed
from megatfm.config import Config
from megatfm.data.order import PackedRows
from megatfm.objectives import Objective, SpecialTokens, make

Arrays = dict[str, NDArray[np.int64]]


def objective_of(config: Config) -> Objective:
    """The objective, with special tokens that every vocabulary has: a third of it are sentinels."""
    size = config.model.vocab_size
    assert size is not None
    special = SpecialTokens(
        bos=1,
        eos=2,
        pad=0,
        vocab_size=size,
        mask=3,
        cls=4,
        sep=5,
        sentinels=range(size - 1, size - 1 - size // 3, -1),
    )
    return make(config.objective, config.model, special, row_lengths(config))


def row_lengths(config: Config) -> tuple[int, ...]:
    """Of the sides that the config gives lengths for."""
    return tuple(n for n in (config.data.sequence_length, config.data.target_length) if n is not None)


def random_batch(config: Config) -> Arrays:
    """int64 fields [global_batch, length of the side]: several documents a row, one cut off or padding at its end;
    and "keys" [global_batch]."""
    objective, data, seed = objective_of(config), config.data, config.train.seed
    rows = []
    for number in range(config.train.global_batch):
        packed = PackedRows(
            RandomDocuments(config, number),
            objective,
            sequence_length=data.sequence_length,
            target_length=data.target_length,
            seed=seed,
            shuffle=False,
            attend_across_documents=data.attend_across_documents,
        )
        rows.append(packed.row(0))
    fields: Arrays = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    return fields | {"keys": keyed.row_keys(seed, np.arange(len(rows)))}


class RandomDocuments:
    """A corpus of one block in memory: documents that together fill half of a row to one and a half."""

    folder, fingerprint = "verify", "verify"

    def __init__(self, config: Config, number: int) -> None:
        assert config.model.vocab_size is not None
        length = min(row_lengths(config))
        random = np.random.Generator(keyed.bits(config.train.seed, "verify", number))
        wanted = random.integers(length // 2, length * 3 // 2)
        self.documents: list[NDArray[np.int64]] = []
        while sum(len(document) + 1 for document in self.documents) < wanted:
            n_tokens = random.integers(1, max(2, length // 3))
            self.documents.append(random.integers(0, config.model.vocab_size, n_tokens))
        if sum(len(document) + 1 for document in self.documents) < length:
            # Causal rows need a corpus that fills one: what comes after is cut off.
            self.documents.append(random.integers(0, config.model.vocab_size, length))
        self.n_samples = len(self.documents)
        self.blocks = np.array([0, self.n_samples])

    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document) for document in self.documents], np.int64)

    def block(self, number: int) -> list[tuple[int, NDArray[np.int64]]]:
        return list(enumerate(self.documents))
