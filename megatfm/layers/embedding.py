"""Input embeddings: fields of a batch to vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser, StackKind, initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry

# B batch, T tokens, E embedding width, D model width

EMBEDDINGS: Registry[Callable[[ModelConfig, Initialiser], nn.Module]] = Registry(
    "embedding (model.embedding.name)"
)
"""Embeddings of a field of a batch. Made as `embedding(config, initial)`: a module that makes vectors [B, T, E] of the
field of the batch that it `reads`, which is called as the embedding is unless it says otherwise; E is
`config.embedding_width`. One that `takes_sequence` is given the SequenceMetadata, too. In a model its name is
`embedding.NAME`. Positions, segments, norm, dropout and projection are not its concern."""


@EMBEDDINGS.register("tokens")
def tokens(config: ModelConfig, initial: Initialiser) -> Embedding:
    """A vector for each token of the vocabulary. Raises UsageError if its size is not known."""
    if config.vocab_size is None:
        raise UsageError("model.vocab_size is not known: set it, or give the tokenizer's size")
    width = config.embedding_width
    return Embedding(config.vocab_size, width, initial("embedding", config.vocab_size, width))


class MaskTokens(nn.Module):
    """A learned vector at masked patches, 0 elsewhere, [B, T, E] (Xie et al. 2022)."""

    def __init__(self, width: int, initial: Initialiser) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))
        self.initial, self.roles = {"weight": initial("embedding", 1, width)}, {"weight": "embedding"}

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        return needed_mask(sequence)[..., None] * self.weight


class VisiblePatches(nn.Module):
    """1 at visible tokens and 0 at masked patches, [B, T, 1]."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        return ~needed_mask(sequence)[..., None]


def needed_mask(sequence: SequenceMetadata) -> Tensor:
    """Return bool [B, T], which patches are masked. Raises TypeError for a batch that doesn't say."""
    if sequence.masked is None:
        raise TypeError("an embedding with a mask token needs masked")
    return sequence.masked > 0


class InsertedVectors(nn.Module):
    """Vectors that stand in place of tokens, 0 elsewhere, [B, T, E]: `SequenceMetadata.inserted`."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        assert sequence.inserted is not None
        return sequence.inserted[1]


class EmbeddedTokens(nn.Module):
    """1 at tokens that are looked up, and 0 where a vector is inserted, [B, T, 1]."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        assert sequence.inserted is not None
        return ~sequence.inserted[0][..., None]


class InputEmbedding(nn.Module):
    """Sum of an embedded field, positions and segments; then, as configured, norm, dropout and projection from E to D.

    shared: an embedding whose part that reads (a table of tokens) and, for `share_positions`, positions serve this one
    too. reads: the field of the batch that it is given. inserts_vectors: whether vectors of `SequenceMetadata.inserted`
    stand in place of some tokens (of images, in a vision-language model).
    """

    tp_plan = (
        ("tokens", "vocab_parallel_embedding"),
        ("positions", "split_output"),
        ("segments", "split_output"),
        ("mask_tokens", "split_output"),
        ("visible_patches", "split_output"),
        ("inserted_vectors", "split_output"),
        ("embedded_tokens", "split_output"),
        ("norm", "sequence_parallel"),
        ("dropout", "local_token_dropout"),
        ("projection", "sequence_parallel"),
    )

    def __init__(
        self,
        config: ModelConfig,
        stack: StackKind = "decoder",
        *,
        shared: "InputEmbedding | None" = None,
        share_positions: bool = False,
        inserts_vectors: bool = False,
    ) -> None:
        super().__init__()
        initial, width = initialiser(config, stack), config.embedding_width
        self.scale = config.embedding_scale
        self.name = config.embedding.name
        first = shared.first if shared else EMBEDDINGS.get(self.name)(config, initial)
        self.add_module(self.name, first)
        self.reads = str(getattr(first, "reads", self.name))
        position = POSITIONS.get(config.position.name).absolute
        if shared and share_positions:
            self.positions: nn.Module | None = shared.positions
        else:
            self.positions = position(config, initial) if position else None
        n_segments = config.embedding.n_segments
        self.segments = (
            Embedding(n_segments, width, initial("segment", n_segments, width)) if n_segments else None
        )
        self.norm = make_norm(config, width) if config.embedding.norm else None
        self.mask_tokens: nn.Module | None = None
        if getattr(config.embedding, "mask_token", False):
            self.mask_tokens, self.visible_patches = MaskTokens(width, initial), VisiblePatches()
        self.inserts_vectors = inserts_vectors
        if inserts_vectors:
            self.inserted_vectors, self.embedded_tokens = InsertedVectors(), EmbeddedTokens()
        self.dropout = Dropout(config.dropout, "embedding")
        wider = width != config.d_model
        self.projection = (
            Linear(width, config.d_model, initial("dense", width, config.d_model), bias=True)
            if wider
            else None
        )

    @property
    def first(self) -> nn.Module:
        """The part that reads the batch."""
        return self.get_submodule(self.name)

    @property
    def table(self) -> Embedding | None:
        """The table of tokens, if it has one."""
        return self.first if isinstance(self.first, Embedding) else None

    def tied_table(self, config: ModelConfig) -> Embedding | None:
        """The table that the output head shares. Raises UsageError if it should share a table and there is none."""
        if not config.embedding.tied:
            return None
        if self.table is None:
            raise UsageError(
                f"model.embedding.name = {self.name!r} has no table of tokens for the head to share: set "
                "model.embedding.tied = false, or model.lm_head.name = 'none'"
            )
        return self.table

    def forward(
        self, inputs_BT: Tensor, sequence: SequenceMetadata, segments_BT: Tensor | None = None
    ) -> Tensor:
        """[B, T, D], of the field that it `reads`. Without `segments`, all is in segment 0."""
        first = self.first
        x_BTE = first(inputs_BT, sequence) if getattr(first, "takes_sequence", False) else first(inputs_BT)
        if self.scale != 1.0:
            x_BTE = x_BTE * self.scale
        if self.inserts_vectors and sequence.inserted is not None:
            vectors_BTE = self.inserted_vectors(sequence).to(x_BTE.dtype)
            x_BTE = x_BTE * self.embedded_tokens(sequence) + vectors_BTE
        masks_last = self.norm is not None and self.positions is None
        if self.mask_tokens is not None and not masks_last:
            x_BTE = self._mask(x_BTE, sequence)
        if self.positions is not None:
            x_BTE = x_BTE + self.positions(sequence).to(x_BTE.dtype)
        if self.segments is not None:
            x_BTE = x_BTE + self.segments(
                torch.zeros_like(sequence.positions) if segments_BT is None else segments_BT
            )
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        if self.mask_tokens is not None and masks_last:
            x_BTE = self._mask(x_BTE, sequence)
        x_BTE = self.dropout(x_BTE, sequence)
        return x_BTE if self.projection is None else self.projection(x_BTE)

    def _mask(self, x_BTE: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return vectors with the mask token in place of masked patches: before positions are added, and after the norm
        of an embedding without these, as in transformers."""
        assert self.mask_tokens is not None
        return x_BTE * self.visible_patches(sequence) + self.mask_tokens(sequence).to(x_BTE.dtype)
