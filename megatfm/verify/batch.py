"""A global batch of random documents, made and packed as training does it."""

import numpy as np
from numpy.typing import NDArray

from megatfm import keyed
from megatfm.config import Config
from megatfm.data.block import pack
from megatfm.data.packing import Packing
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
        word_starts=np.arange(size) % 3 > 0,
    )
    return make(config.objective, config.model, special, row_lengths(config))


def row_lengths(config: Config) -> tuple[int, ...]:
    """Of the sides that the config gives lengths for."""
    return tuple(n for n in (config.data.sequence_length, config.data.target_length) if n is not None)


def random_batch(config: Config) -> Arrays:
    """int64 fields [global_batch, length of the side]: several documents a row, one cut off or padding at its end;
    and "keys" [global_batch]."""
    assert config.model.vocab_size is not None
    objective, lengths = objective_of(config), row_lengths(config)
    seed, length = config.train.seed, min(lengths)
    rows = []
    for number in range(config.train.global_batch):
        random = np.random.Generator(keyed.bits(seed, "verify", number))
        wanted = random.integers(length // 2, length * 3 // 2)
        documents: list[NDArray[np.int64]] = []
        while sum(len(document) + 1 for document in documents) < wanted:
            n_tokens = random.integers(2, max(3, length // 3))  # one token is too short for some objectives
            documents.append(random.integers(0, config.model.vocab_size, n_tokens))
        across = config.data.attend_across_documents
        how = Packing(objective, lengths[: len(objective.sides)], seed, as_one_document=across)
        rows.append(pack(documents, how).row(0))
    fields: Arrays = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    return fields | {"keys": keyed.row_keys(seed, np.arange(len(rows)))}
