"""The Objective protocol, its construction from a config, and helpers that several objectives share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.config.objective import ImageObjective
from megatfm.data.dataset import RowDataset
from megatfm.data.sequences import DocumentChunk, Field
from megatfm.errors import UsageError
from megatfm.layers.block import collect_auxiliary_losses
from megatfm.layers.loss_terms import AuxiliaryLoss
from megatfm.ops.cross_entropy import IGNORE
from megatfm.registry import Registry
from megatfm.rng import ChunkKey

Batch = Mapping[str, Tensor]
"""Tensors of a micro-batch: `positions` and `documents` [rows, length of the side], `keys` [rows], and the objective's
fields, such as `tokens` and `targets` [rows, length] of text."""

Example = dict[str, NDArray[Any]]
"""One sequence: field name → array, as `Objective.fields` declares it."""

Losses = dict[str, Tensor]
"""Loss term → its sum over a micro-batch, a scalar."""

TokenArray = NDArray[np.integer]
IntArray = NDArray[np.int64]
RandomKeys = NDArray[np.uint64]
FloatArray = NDArray[np.float64]

RowLengths = tuple[int, ...]
"""data.sequence_length, and for an encoder-decoder data.target_length."""
DECODER_ONLY, ENCODER_DECODER = ("",), ("encoder_", "")
"""Prefixes of an objective's fields: of a decoder's or encoder's, and of an encoder-decoder's."""


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids of a tokenizer, and which of its tokens begin a word."""

    bos: int
    eos: int
    pad: int
    vocab_size: int = 0
    mask: int | None = None
    cls: int | None = None
    sep: int | None = None
    sentinels: Sequence[int] = ()
    """Ids in order of use: the first span gets the first one."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """UL2's mode tokens by letter: R, S, X."""
    other_reserved: Sequence[int] = ()
    """Further ids that text never has."""
    word_starts: NDArray[np.bool_] | None = None
    """True for ids that begin a word [vocab_size]; None if ids don't mark word starts."""

    def require_token(self, token: str, objective: str) -> int:
        """Return the id of a token that an objective needs. Raises UsageError if the tokenizer has none."""
        token_id = getattr(self, token)
        if token_id is None:
            raise UsageError(
                f"objective.name = {objective!r} needs a {token} token, and the tokenizer has none: prepare the corpus "
                "with a tokenizer that `megatfm prep` trains, or one that has it"
            )
        return int(token_id)

    def require_frame(self, objective: str) -> tuple[int, int]:
        """Return the ids of cls and sep. Raises UsageError if one is missing."""
        return self.require_token("cls", objective), self.require_token("sep", objective)

    @cached_property
    def text_ids(self) -> NDArray[np.int64]:
        """Ids of text, without special ones; random replacements are drawn from these."""
        special_ids = (self.bos, self.eos, self.pad, self.mask, self.cls, self.sep)
        reserved = [token for token in special_ids if token is not None]
        reserved += [*self.sentinels, *self.modes.values(), *self.other_reserved]
        return np.setdiff1d(np.arange(self.vocab_size), np.array(reserved, np.int64))

    def require_word_starts(self, key: str) -> NDArray[np.bool_]:
        """Return `word_starts` for the setting `key`. Raises UsageError if ids don't mark word starts."""
        if self.word_starts is None:
            raise UsageError(
                f"{key} needs to know where words begin, and the tokenizer does not tell: prepare the corpus with one "
                "that `megatfm prep` trains, or choose another objective"
            )
        return self.word_starts

    def find_word_boundaries(self, tokens: TokenArray) -> NDArray[np.int64]:
        """Return the indices of the first tokens of words in a chunk [words]; token 0 always begins one."""
        assert self.word_starts is not None
        starts = self.word_starts[tokens]
        starts[:1] = True
        return np.flatnonzero(starts)


class Objective:
    """Builds sequences from chunks of documents, and computes the terms of the loss. Subclass it for the defaults.

    The loss is Σ over terms of weight · sum / count, with sums and counts over the global batch. Inputs other than
    text: set `reads_text` and `fields`, and `needs_files` for stored files.
    """

    model_families: tuple[str, ...]
    """Model families that it trains."""
    loss_weights: Mapping[str, float]
    """Term → weight."""
    field_prefixes: tuple[str, ...] = DECODER_ONLY
    """Field prefix of each side of a row that a sequence fills: DECODER_ONLY or ENCODER_DECODER."""
    max_tokens: int | None = None
    """Longest chunk of a document whose sequence fits a row. None: documents are cut where rows end."""
    padding_values: Mapping[str, int] = MappingProxyType({})
    """Padding values of fields other than tokens, targets and documents, where they are not 0."""
    fields: Mapping[str, Field] | None = None
    """All fields that `build_example` returns. None: integers [length of the side] of any name."""
    reads_text: bool = True
    """Whether it needs a tokenizer. If not, the `special` argument of its constructor may be None."""
    metrics: tuple[str, ...] = ()
    """Terms of weight 0 that count correct predictions. Evaluation reports them as accuracies."""
    likelihood_term: str | None = None
    """The term whose sum is −log p(text) in nats, each token predicted once. None: no bits per byte are reported."""
    predicts_tokens: bool = False
    """Whether a term needs the head over the vocabulary. A model without one is refused."""
    target_fraction: float | None = None
    """Expected share of a row's tokens that have a target, for the cost of heads that run on those alone. None:
    unknown. A field of the same name in the objective's config section wins."""
    needs_other_documents: bool = False
    """Whether `build_example` reads `chunk.other_documents`."""
    compares_samples: bool = False
    """Whether terms compare all samples of a global batch, by methods `features` and `compute_terms`
    (`megatfm.engines.interface.ComparingLoss`)."""
    needs_files: bool = False
    """Whether `build_example` reads `chunk.files`, the files stored with a document."""
    allows_cross_document_attention: bool = False
    """Whether `data.attend_across_documents` is allowed: a document's tokens reveal nothing of another's targets."""

    def sequence_lengths(self, n_tokens: IntArray, keys: RandomKeys) -> IntArray:
        """Return sequence lengths [n] or [n, sides] of chunks of `n_tokens` [n]; 0: the chunk makes no sequence.

        keys [n]: `rng.chunk_keys`, for draws that decide lengths; the same in every epoch.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks sequence_lengths(n_tokens, keys)")

    def build_example(self, chunk: DocumentChunk, key: ChunkKey) -> Example:
        """Return the fields of a chunk's sequence, as long as `sequence_lengths` returned. A pure function."""
        raise NotImplementedError(f"{type(self).__name__} lacks build_example(chunk, key)")

    def for_evaluation(self) -> "Objective":
        """Return the objective of validation sets, for example without random changes of images."""
        return self

    def prepare_rows(self, rows: RowDataset, turn: int) -> RowDataset:
        """Return the training rows, for example with mixed images. turn: number of consecutive rows of a stream."""
        return rows

    def random_chunk(self, random: np.random.Generator) -> DocumentChunk:
        """Return a random chunk for comparisons of layouts. Needed where a chunk is more than random tokens."""
        raise UsageError(
            f"{type(self).__name__} reads more than tokens, but has no random_chunk(random) on which layouts could be "
            "compared: give it one"
        )

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        """Count the targets of each term in a micro-batch, from the batch alone. Default: those in `targets`."""
        return {term: (batch["targets"] != IGNORE).sum() for term in self.loss_weights}

    def n_tokens(self, batch: Batch) -> Tensor:
        """Count a micro-batch's tokens in the model's blocks, on all sides, without padding."""
        counts = []
        for prefix in self.field_prefixes:
            documents, positions = batch.get(f"{prefix}documents"), batch[f"{prefix}positions"]
            counts.append((torch.zeros_like(positions) if documents is None else documents).ge(0).sum())
        return torch.stack(counts).sum()

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Run the model on the batch, and return the sum of each term."""
        return dict(model(**batch).losses)


class ObjectiveWithAuxiliaryLosses:
    """An objective whose terms include the auxiliary losses of the model's blocks."""

    def __init__(self, objective: Objective, terms: Mapping[str, AuxiliaryLoss]) -> None:
        self._objective, self._terms = objective, terms
        self.loss_weights = {**objective.loss_weights, **{name: term.weight for name, term in terms.items()}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # unpickling asks before _objective is set
            raise AttributeError(name)
        return getattr(self._objective, name)

    def for_evaluation(self) -> "ObjectiveWithAuxiliaryLosses":
        """Return the evaluation objective with the same auxiliary terms."""
        return ObjectiveWithAuxiliaryLosses(self._objective.for_evaluation(), self._terms)

    def target_counts(self, batch: Batch) -> dict[str, Tensor]:
        """Return the objective's counts, and the micro-batch's tokens or rows for each auxiliary term."""
        n_tokens = self._objective.n_tokens(batch)
        n_rows = len(batch[f"{self._objective.field_prefixes[0]}positions"])
        auxiliary_counts = {
            name: n_tokens if term.normalised_by == "tokens" else torch.tensor(n_rows)
            for name, term in self._terms.items()
        }
        return self._objective.target_counts(batch) | auxiliary_counts

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the sums of the objective's and the blocks' terms."""
        return self._objective(model, batch)


OBJECTIVES: Registry[Callable[..., Objective]] = Registry("objective")
"""Name → constructor `objective(special: SpecialTokens, config, model: ModelConfig, row_lengths: RowLengths)`.

config: the objective's section. row_lengths: one for each side. If the section is an `ImageObjective`, a fifth argument
is `[data.images]`."""


def reads_text(name: str) -> bool:
    """Return whether the named objective needs a tokenizer."""
    return bool(getattr(OBJECTIVES.get(name), "reads_text", True))


def target_fraction(config: Any) -> float | None:
    """Return the expected share of tokens with a target under a config's section; None: unknown."""
    declared_by = config if hasattr(config, "target_fraction") else OBJECTIVES.get(config.name)
    fraction: float | None = getattr(declared_by, "target_fraction", None)
    return fraction


def build_objective(
    config: Any,
    model: ModelConfig,
    special: SpecialTokens | None,
    row_lengths: RowLengths,
    images: ImagesConfig | None = None,
) -> Objective:
    """Build the objective of a config's section, and check it against the model.

    special: None without a tokenizer. row_lengths: data.sequence_length and data.target_length, if set. images:
    `[data.images]`, for objectives of images. Raises UsageError if the model or the tokenizer lacks a required feature.
    """
    if special is None and reads_text(config.name):
        raise UsageError(
            f"objective.name = {config.name!r} reads text: set data.tokenizer to the one beside the corpus"
        )
    image_config = [images or ImagesConfig()] if isinstance(config, ImageObjective) else []
    objective = OBJECTIVES.get(config.name)(special, config, model, row_lengths, *image_config)
    if model.family not in objective.model_families:
        raise UsageError(
            f"objective.name = {config.name!r} does not train model.family = {model.family!r}, but "
            f"{' and '.join(objective.model_families)}: change one of the two"
        )
    if objective.predicts_tokens and model.lm_head.name == "none":
        raise UsageError(
            f"objective.name = {config.name!r} predicts tokens, and a model with model.lm_head.name = 'none' has no "
            "head for them: set model.lm_head.name=linear, or transform for a BERT's (train.init_include then says "
            "which weights come from elsewhere)"
        )
    if len(row_lengths) < len(objective.field_prefixes):
        raise UsageError(
            f"objective.name = {config.name!r} for an encoder-decoder fills two rows: set data.target_length, the "
            f"tokens of the decoder's, for example data.target_length={max(8, row_lengths[0] // 4)}"
        )
    terms = collect_auxiliary_losses(model)
    if duplicates := terms.keys() & objective.loss_weights.keys():
        raise UsageError(
            f"a part of the model adds a term {min(duplicates)!r} to the loss, and objective.name = {config.name!r} "
            "has a term of that name: rename the part's term"
        )
    return cast(Objective, ObjectiveWithAuxiliaryLosses(objective, terms)) if terms else objective


def find_max_chunk_tokens(
    lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]], row_lengths: Sequence[int], objective: str
) -> int:
    """Return the largest n such that chunks of up to n tokens make sequences that fit rows.

    lengths: chunk tokens [n] → sequence lengths [n, sides]. Raises UsageError if no chunk fits.
    """
    n_tokens = np.arange(1, 2 * sum(row_lengths) + 2)
    fits = (lengths(n_tokens).reshape(len(n_tokens), -1) <= np.array(row_lengths)).all(1)
    max_tokens = int(fits.argmin())
    if not max_tokens or not lengths(n_tokens[:max_tokens]).any():
        raise UsageError(
            f"data.sequence_length = {row_lengths[0]} is too short for objective.name = {objective!r}: choose more"
        )
    return max_tokens


def require_head(model: ModelConfig, head: str, objective: str) -> None:
    """Raise UsageError if an encoder lacks a head. Other families are refused with the objective."""
    if model.family == "encoder" and head not in model.extra_heads:
        raise UsageError(f"objective.name = {objective!r} needs a model with the head: add [model.extra_heads.{head}]")


def make_masking_key(key: ChunkKey, name: str, static: bool = False) -> tuple[int | str, ...]:
    """Return a chunk's random key. static: the same in every epoch."""
    return (key.seed, key.sample, key.chunk, name) if static else (*key, name)


def randint_below(n: int | IntArray, u: float | FloatArray) -> IntArray:
    """Return uniform integers in [0, n) from uniform u in [0, 1)."""
    return np.minimum((np.asarray(u) * n).astype(np.int64), np.asarray(n) - 1)


def make_seq2seq_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """Return an encoder-decoder's fields: `inputs` + EOS as `encoder_tokens`, and `target_tokens` + EOS as targets.

    The decoder's `tokens` are the targets shifted right behind the padding token, T5's start token.
    """
    targets = np.append(target_tokens, special.eos).astype(np.int64)
    return {
        "encoder_tokens": np.append(inputs, special.eos).astype(np.int64),
        "tokens": np.append(special.pad, targets[:-1]).astype(np.int64),
        "targets": targets,
    }


def make_prefix_lm_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """Return a decoder's fields: `inputs`, which all tokens see, then `target_tokens` and EOS, which are predicted.

    The last token is only a target, so the length is len(inputs) + len(target_tokens). `inputs` must not be empty.
    """
    sequence = np.concatenate([inputs, target_tokens, [special.eos]]).astype(np.int64)
    targets = sequence[1:].copy()
    targets[: len(inputs) - 1] = IGNORE
    prefix = np.zeros(len(targets), np.int64)
    prefix[: len(inputs)] = 1
    return {"tokens": sequence[:-1], "targets": targets, "prefix": prefix}
