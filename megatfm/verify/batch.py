"""A global batch of random documents, packed as training packs them."""

import numpy as np
from numpy.typing import NDArray

from megatfm import keyed
from megatfm.config import Config
from megatfm.data.packing import pack
from megatfm.objectives import OBJECTIVES, Objective, SpecialTokens

Arrays = dict[str, NDArray[np.int64]]


def objective_of(config: Config) -> Objective:
    """The objective, with special tokens that every vocabulary has."""
    return OBJECTIVES.get(config.objective.name)(SpecialTokens(bos=1, eos=2, pad=0))


def random_batch(config: Config) -> Arrays:
    """int64 fields [global_batch, sequence]: several documents a row, one cut off or padding at its end."""
    assert config.model.vocab_size is not None
    objective, length = objective_of(config), config.data.sequence_length
    rows = []
    for number in range(config.train.global_batch):
        random = np.random.Generator(keyed.bits(config.train.seed, "verify", number))
        wanted = random.integers(length // 2, length * 3 // 2)
        documents: list[dict[str, NDArray[np.integer]]] = []
        while sum(len(document["tokens"]) for document in documents) < wanted:
            tokens = random.integers(0, config.model.vocab_size, random.integers(1, max(2, length // 3)))
            documents.append({**objective.build(tokens, (config.train.seed, 0, len(documents)))})
        rows.append(pack(documents, pad_id=0).row(0, length, config.data.attend_across_documents))
    return {field: np.stack([row[field] for row in rows]) for field in rows[0]}
