"""A global batch of random documents, made and packed as training does it."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megatfm import keyed
from megatfm.config import Config
from megatfm.data.block import pack_in_memory
from megatfm.data.packing import DocumentChunk, PackingConfig, needs_own_row
from megatfm.objectives import Objective, SpecialTokens, build_objective, reads_text

Arrays = dict[str, NDArray[Any]]

Documents = Literal["mixed", "short", "long", "one", "sparse"]
"""Documents of a row. "short": many; "long": two, the second cut off; "one": one as long as the row; "sparse": a short
one, then padding; "mixed": rows of these kinds by turns."""

BY_TURNS: tuple[Documents, ...] = ("short", "one", "sparse", "long")
KINDS_OF_DOCUMENTS: tuple[Documents, ...] = get_args(Documents)


def objective_for(config: Config) -> Objective:
    """The objective, with special tokens that every vocabulary has: a third of it are sentinels."""
    size = config.model.vocab_size
    if size is None and not reads_text(config.objective.name):
        return build_objective(config.objective, config.model, None, side_lengths(config))
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
    return build_objective(config.objective, config.model, special, side_lengths(config))


def side_lengths(config: Config) -> tuple[int, ...]:
    """Of the sides that the config gives lengths for."""
    return tuple(n for n in (config.data.sequence_length, config.data.target_length) if n is not None)


def random_batch(config: Config, documents: Documents = "mixed") -> Arrays:
    """The fields of a global batch, and "keys" [global_batch]: documents of such kinds where the objective packs them,
    one cut off or padding at a row's end."""
    objective, lengths = objective_for(config), side_lengths(config)
    seed = config.train.seed
    across = config.data.attend_across_documents
    how = PackingConfig(
        objective, lengths[: len(objective.field_prefixes)], seed, attend_across_documents=across
    )
    rows = []
    for number in range(config.train.global_batch):
        random = np.random.Generator(keyed.bit_generator(seed, "verify", number))
        kind = BY_TURNS[number % len(BY_TURNS)] if documents == "mixed" else documents
        pieces = list(random_pieces(config, objective, random, kind))
        members = [piece.files for piece in pieces] if objective.needs_files else None
        rows.append(pack_in_memory([piece.tokens for piece in pieces], how, members=members).row(0))
    fields: Arrays = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    return fields | {"keys": keyed.row_keys(seed, np.arange(len(rows)))}


def random_pieces(
    config: Config, objective: Objective, random: np.random.Generator, kind: Documents = "short"
) -> Iterator[DocumentChunk]:
    """Documents that fill a row, or a part of it. kind: any but "mixed"."""
    length, filled = min(side_lengths(config)), 0
    # Tokens of a document, at least and below, and of all documents. One token is too short for some objectives.
    least, most, wanted = {
        "short": (2, max(3, length // 6), int(random.integers(length * 3 // 4, length * 3 // 2))),
        "long": (max(2, length // 2), max(3, length * 3 // 4), length * 3 // 2),
        "one": (2 * length, 2 * length + 1, 1),
        "sparse": (2, max(3, length // 6), 1),
    }[kind]
    while filled < wanted:
        if objective.needs_files or not objective.reads_text:
            piece = objective.random_piece(random)
        else:
            piece = DocumentChunk(
                random.integers(0, config.model.vocab_size or 1, random.integers(least, most))
            )
        yield piece
        filled += wanted if needs_own_row(objective) else len(piece.tokens) + 1
