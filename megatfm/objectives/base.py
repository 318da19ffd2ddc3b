"""The Objective protocol, how an objective is built from a config, and helpers that several objectives use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.config.objective import ImageObjective
from megatfm.data.dataset import RowDataset
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import UsageError
from megatfm.layers.block import auxiliary_losses
from megatfm.layers.loss_terms import AuxiliaryLoss
from megatfm.ops.cross_entropy import IGNORE
from megatfm.registry import Registry
from megatfm.rng import PieceKey

Batch = Mapping[str, Tensor]
"""The tensors of a micro-batch: `positions` and `documents` [rows, length of the side], `keys` [rows], and what the
objective makes: of text `tokens` and `targets` [rows, length]."""

Example = dict[str, NDArray[Any]]
"""One sequence: arrays by name, as `Objective.fields` says."""

Losses = dict[str, Tensor]
"""Name of a loss term → its sum over a micro-batch, a scalar."""

TokenArray = NDArray[np.integer]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DECODER_ONLY, ENCODER_DECODER = ("",), ("encoder_", "")
"""Prefixes of an objective's fields: of a decoder's or encoder's, and of an encoder-decoder's."""


@dataclass(frozen=True)
class SpecialTokens:
    """Facts of a tokenizer for objectives: ids with a meaning, and which tokens begin a word."""

    bos: int
    eos: int
    pad: int
    vocab_size: int = 0
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: Sequence[int] = ()
    """In the order in which they are used."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """UL2's mode tokens by letter: R, S, X."""
    other_reserved: Sequence[int] = ()
    """More ids that no text has."""
    word_starts: NDArray[np.bool_] | None = None
    """True for ids that begin a word, [vocab_size]; None if ids don't tell."""

    def require_token(self, token: str, objective: str) -> int:
        """The id of a token that an objective can't do without. Raises UsageError if there is none."""
        token_id = getattr(self, token)
        if token_id is None:
            raise UsageError(
                f"objective.name = {objective!r} needs a {token} token, and the tokenizer has none: prepare the corpus "
                "with a tokenizer that `megatfm prep` trains, or one that has it"
            )
        return int(token_id)

    def require_frame(self, objective: str) -> tuple[int, int]:
        """Return the ids of cls and sep, which stand around a text. Raises UsageError if one is missing."""
        return self.require_token("cls", objective), self.require_token("sep", objective)

    @cached_property
    def text_ids(self) -> NDArray[np.int64]:
        """The ids that text is made of: random replacements are drawn from these."""
        special_ids = (self.bos, self.eos, self.pad, self.mask, self.cls, self.sep)
        reserved = [token for token in special_ids if token is not None]
        reserved += [*self.sentinels, *self.modes.values(), *self.other_reserved]
        return np.setdiff1d(np.arange(self.vocab_size), np.array(reserved, np.int64))

    def require_word_starts(self, key: str) -> NDArray[np.bool_]:
        """`word_starts`, for a setting that needs it. Raises UsageError if ids don't mark the beginnings of words."""
        if self.word_starts is None:
            raise UsageError(
                f"{key} needs to know where words begin, and the tokenizer does not tell: prepare the corpus with one "
                "that `megatfm prep` trains, or choose another objective"
            )
        return self.word_starts

    def word_boundaries(self, tokens: TokenArray) -> NDArray[np.int64]:
        """Return the first tokens of the words in a piece [words]; token 0 always begins one."""
        assert self.word_starts is not None
        starts = self.word_starts[tokens]
        starts[:1] = True
        return np.flatnonzero(starts)


class Objective(Protocol):
    """Makes sequences from pieces of documents, and the terms of the loss; subclass it for the defaults.

    For inputs that are no text: `reads_text`, `fields`, and `needs_files` if it reads stored files.

    The loss is Σ over terms of weight · sum / count; counts are taken over the whole global batch.
    """

    model_families: tuple[str, ...]
    """Model families that it trains."""
    loss_weights: Mapping[str, float]
    """Each term's weight."""
    field_prefixes: tuple[str, ...] = DECODER_ONLY
    """Prefixes of the fields of each row that a sequence takes room in: DECODER_ONLY or ENCODER_DECODER."""
    max_tokens: int | None = None
    """Longest piece of a document whose sequence fits a row. None: documents are cut where rows end."""
    padding_values: Mapping[str, int] = MappingProxyType({})
    """Values in padding, for fields where it is not 0 and which are not tokens, targets or documents."""
    fields: Mapping[str, Field] | None = None
    """All fields that `build` makes. None: integers [length of the side], under any name."""
    reads_text: bool = True
    """Whether it needs a tokenizer. If not, the first argument with which it is made may be None."""
    metrics: tuple[str, ...] = ()
    """Terms of weight 0, each a count of correct predictions: accuracies, which evaluation reports beside the loss."""
    likelihood_term: str | None = None
    """The term whose sum is −log p(text), each token predicted once; only then are there bits per byte."""
    predicts_tokens: bool = False
    """Whether a term is made by the head over the vocabulary: then a model without one is refused."""
    target_fraction: float | None = None
    """Expected share of a row's tokens that have a target, by which the cost of heads that run on those alone is
    estimated. None: unknown. Objectives with a section in the config have it there."""
    needs_other_documents: bool = False
    """Whether `build` looks at other documents, `piece.partners`."""
    compares_samples: bool = False
    """Whether terms are made of the features of all samples of a global batch at once, by methods `features` and
    `terms_of` (see `megatfm.engines.interface.ComparingLoss`)."""
    needs_files: bool = False
    """Whether `build` looks at the files stored with a document, `piece.members`."""
    allows_cross_document_attention: bool = False
    """Whether `data.attend_across_documents` makes sense: tokens of a document carry no information on another's
    targets."""

    def sequence_lengths(self, n_tokens: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Lengths [n], or [n, sides], of the sequences of pieces of `n_tokens` [n] tokens; 0: it makes none.

        keys [n]: `rng.piece_keys`, for choices that decide lengths. They are the same in every epoch.
        """

    def build_example(self, piece: DocumentChunk, key: PieceKey) -> Example:
        """The fields of one piece's sequence, of the lengths by `lengths`; a pure function."""

    def for_evaluation(self) -> "Objective":
        """The objective of validation sets, where it is another: images aren't changed at random."""
        return self

    def prepare_rows(self, rows: RowDataset, turn: int) -> RowDataset:
        """The training rows, changed where that takes more than one of them, as mixing images does.

        turn: how many rows of a stream follow one another.
        """
        return rows

    def random_piece(self, random: np.random.Generator) -> DocumentChunk:
        """A random piece on which layouts are compared, where that is more than random tokens."""
        raise UsageError(
            f"{type(self).__name__} reads more than tokens, but has no example(random) on which layouts could be "
            "compared: give it one"
        )

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        """Count the targets of each term in a micro-batch, from the batch alone. By default those in `targets`."""
        return {term: (batch["targets"] != IGNORE).sum() for term in self.loss_weights}

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count the tokens of a micro-batch that go through the model's blocks, on all sides, without padding."""
        side_documents = [batch.get(f"{side}documents") for side in self.field_prefixes]
        placed = [batch[f"{side}positions"] for side in self.field_prefixes]
        return torch.stack(
            [
                (torch.zeros_like(positions) if documents is None else documents).ge(0).sum()
                for documents, positions in zip(side_documents, placed, strict=True)
            ]
        ).sum()

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Give the model the whole batch; the sum of each term."""
        return dict(model(**batch).losses)


class ObjectiveWithAuxiliaryLosses:
    """An objective with the auxiliary terms of the model's blocks beside its own."""

    def __init__(self, objective: Objective, terms: Mapping[str, AuxiliaryLoss]) -> None:
        self._objective, self._terms = objective, terms
        self.loss_weights = {**objective.loss_weights, **{name: term.weight for name, term in terms.items()}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled there is no objective yet
            raise AttributeError(name)
        return getattr(self._objective, name)

    def for_evaluation(self) -> "ObjectiveWithAuxiliaryLosses":
        """Return the objective for evaluation with the same auxiliary terms."""
        return ObjectiveWithAuxiliaryLosses(self._objective.for_evaluation(), self._terms)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        """Return the objective's counts, and the tokens or rows of the micro-batch for each auxiliary term."""
        n_tokens, n_rows = (
            self._objective.n_tokens(batch),
            len(batch[f"{self._objective.field_prefixes[0]}positions"]),
        )
        added = {
            name: n_tokens if term.normalised_by == "tokens" else torch.tensor(n_rows)
            for name, term in self._terms.items()
        }
        return self._objective.target_counts(batch) | added

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """The objective's and the blocks' terms."""
        return self._objective(model, batch)


OBJECTIVES: Registry[Callable[..., Objective]] = Registry("objective")
"""Made as `objective(special: SpecialTokens, config, model: ModelConfig, row_lengths: tuple[int, ...])`, with the
config's section of its name, and one row length for each side. One whose section is an `ImageObjective` gets
`[data.images]` as a fifth argument."""


def reads_text(name: str) -> bool:
    """Whether the objective of this name needs a tokenizer."""
    return bool(getattr(OBJECTIVES.get(name), "reads_text", True))


def target_fraction(config: Any) -> float | None:
    """The share of tokens for which the objective of a config's section has targets; None: not known."""
    declared_by = config if hasattr(config, "target_fraction") else OBJECTIVES.get(config.name)
    fraction: float | None = getattr(declared_by, "target_fraction", None)
    return fraction


def build_objective(
    config: Any,
    model: ModelConfig,
    special: SpecialTokens | None,
    row_lengths: tuple[int, ...],
    images: ImagesConfig | None = None,
) -> Objective:
    """The objective of a config's section, checked against the model.

    special: None where there is no tokenizer. row_lengths: data.sequence_length and, where it is set,
    data.target_length. images: `[data.images]`, for objectives of images.
    Raises UsageError if the model or the tokenizer lacks a required feature.
    """
    if special is None and reads_text(config.name):
        raise UsageError(
            f"objective.name = {config.name!r} reads text: set data.tokenizer to the one beside the corpus"
        )
    inputs = [images or ImagesConfig()] if isinstance(config, ImageObjective) else []
    objective = OBJECTIVES.get(config.name)(special, config, model, row_lengths, *inputs)
    if model.family not in objective.model_families:
        raise UsageError(
            f"objective.name = {config.name!r} does not train model.family = {model.family!r}, but "
            f"{' and '.join(objective.model_families)}: change one of the two"
        )
    if objective.predicts_tokens and model.lm_head.name == "none":
        raise UsageError(
            f"objective.name = {config.name!r} predicts tokens, and a model with model.lm_head.name = 'none' "
            f"has no head "
            "for them: set model.lm_head.name=linear, or transform for a BERT's (train.init_include then "
            "says which weights "
            "come from elsewhere)"
        )
    if len(row_lengths) < len(objective.field_prefixes):
        raise UsageError(
            f"objective.name = {config.name!r} for an encoder-decoder fills two rows: set data.target_length, the "
            f"tokens of the decoder's, for example data.target_length={max(8, row_lengths[0] // 4)}"
        )
    terms = auxiliary_losses(model)
    if duplicates := terms.keys() & objective.loss_weights.keys():
        raise UsageError(
            f"a part of the model adds a term {min(duplicates)!r} to the loss, and objective.name = {config.name!r} "
            "has one of that name: give the part's another"
        )
    return cast(Objective, ObjectiveWithAuxiliaryLosses(objective, terms)) if terms else objective


def max_piece_tokens(
    lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]], row_lengths: Sequence[int], objective: str
) -> int:
    """The largest n such that pieces of up to n tokens make sequences [n, sides] that fit rows.

    Raises UsageError if the rows are too short for any.
    """
    n_tokens = np.arange(1, 2 * sum(row_lengths) + 2)
    fits = (lengths(n_tokens).reshape(len(n_tokens), -1) <= np.array(row_lengths)).all(1)
    longest = int(fits.argmin())
    if not longest or not lengths(n_tokens[:longest]).any():
        raise UsageError(
            f"data.sequence_length = {row_lengths[0]} is too short for objective.name = {objective!r}: choose more"
        )
    return longest


def require_head(model: ModelConfig, head: str, objective: str) -> None:
    """Raise UsageError unless an encoder has a head; other families are refused with the objective."""
    if model.family == "encoder" and head not in model.extra_heads:
        raise UsageError(
            f"objective.name = {objective!r} needs a model with the head: add [model.extra_heads.{head}]"
        )


def masking_key(key: PieceKey, name: str, static: bool = False) -> tuple[int | str, ...]:
    """Return the random key for a piece. With `static` it does not depend on the epoch."""
    return (key.seed, key.sample, key.piece, name) if static else (*key, name)


def randint_below(n: int | Ints, u: float | Floats) -> Ints:
    """Return uniform whole numbers in [0, n), from uniform u in [0, 1)."""
    return np.minimum((np.asarray(u) * n).astype(np.int64), np.asarray(n) - 1)


def seq2seq_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """Return an encoder-decoder's fields: `inputs` + EOS for the encoder, `target_tokens` + EOS as targets, and these
    shifted right, after the padding token (T5's start token), as the decoder's input."""
    targets = np.append(target_tokens, special.eos).astype(np.int64)
    return {
        "encoder_tokens": np.append(inputs, special.eos).astype(np.int64),
        "tokens": np.append(special.pad, targets[:-1]).astype(np.int64),
        "targets": targets,
    }


def prefix_lm_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """Return a decoder's fields: `inputs`, which all tokens see, then `target_tokens` and EOS; predicted are the tokens
    after `inputs`.

    One token shorter than both and EOS, since the last is only a target. `inputs` must not be empty.
    """
    sequence = np.concatenate([inputs, target_tokens, [special.eos]]).astype(np.int64)
    targets = sequence[1:].copy()
    targets[: len(inputs) - 1] = IGNORE
    prefix = np.zeros(len(targets), np.int64)
    prefix[: len(inputs)] = 1
    return {"tokens": sequence[:-1], "targets": targets, "prefix": prefix}
