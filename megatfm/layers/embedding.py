"""Input embeddings, which turn a field of the batch (token ids, patches) into vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Initialiser, StackKind, make_initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.registry import Registry

# B batch, T tokens, S tokens of another row, E embedding width, D model width

EMBEDDINGS: Registry[Callable[[ModelConfig, Initialiser], nn.Module]] = Registry("embedding (model.embedding.name)")
"""Embeddings by name, made as `EMBEDDINGS.get(name)(config, initial)`.

An embedding maps a field of the batch to vectors [B, T, E], with E = `config.embedding_width`. Its attribute
`input_field` names the field (default: the embedding's own name). With `takes_sequence = True` it also gets the
SequenceMetadata. In the model it is `embedding.NAME`. InputEmbedding adds positions, segments, norm, dropout and
projection."""


@EMBEDDINGS.register("tokens")
def tokens(config: ModelConfig, initial: Initialiser) -> Embedding:
    """Make the token embedding table. Raises UsageError if the vocabulary size is unknown."""
    if config.vocab_size is None:
        raise UsageError("model.vocab_size is unknown: set it, or choose a tokenizer")
    width = config.embedding_width
    return Embedding(config.vocab_size, width, initial("embedding", config.vocab_size, width))


class MaskTokens(nn.Module):
    """The learned mask token at masked patches, zeros elsewhere, [B, T, E] (SimMIM: Xie et al. 2022)."""

    def __init__(self, width: int, initial: Initialiser) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))
        self.initial, self.roles = {"weight": initial("embedding", 1, width)}, {"weight": "embedding"}

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        return require_masked(sequence)[..., None] * self.weight


class VisiblePatches(nn.Module):
    """Return boolean [B, T, 1], false at masked patches."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        return ~require_masked(sequence)[..., None]


def require_masked(sequence: SequenceMetadata) -> Tensor:
    """Return boolean [B, T], true at masked patches. Raises TypeError for a batch without the field `masked`."""
    if sequence.masked is None:
        raise TypeError("an embedding with a mask token needs the field 'masked'")
    return sequence.masked > 0


class InsertedVectors(nn.Module):
    """Vectors that replace token embeddings (`SequenceMetadata.inserted`), zeros elsewhere, [B, T, E]."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        assert sequence.inserted is not None
        return sequence.inserted[1]


class EmbeddedTokens(nn.Module):
    """Return boolean [B, T, 1], false where a vector replaces the token embedding."""

    def forward(self, sequence: SequenceMetadata) -> Tensor:
        assert sequence.inserted is not None
        return ~sequence.inserted[0][..., None]


class TokenGather(nn.Module):
    """Looks up vectors of another row by index; context parallelism fetches those of other ranks."""

    cp_plan = "token_gather"

    def forward(self, x_BSE: Tensor, index_BT: Tensor, length: int) -> Tensor:
        """Return [B, T, E]: x at these indices of full rows of `length` tokens; any vector for an index of −1."""
        return x_BSE.gather(1, index_BT.clamp(min=0)[..., None].expand(-1, -1, x_BSE.shape[-1]))


class InputEmbedding(nn.Module):
    """Sum of an embedded field, positions and segments; then, as configured, norm, dropout and projection from E to D.

    shared: another InputEmbedding whose field embedding (and, with `share_positions`, positions) this one uses too.
    inserts_vectors: replace some token embeddings by `SequenceMetadata.inserted` (images in vision-language models).
    The attribute `input_field` names the field of the batch that `forward` takes.
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
        initial, width = make_initialiser(config, stack), config.embedding_width
        self.scale = config.embedding_scale
        self.name = config.embedding.name
        embedding = shared.field_embedding if shared else EMBEDDINGS.get(self.name)(config, initial)
        self.add_module(self.name, embedding)
        self.input_field = str(getattr(embedding, "input_field", self.name))
        position = POSITIONS.get(config.position.name).absolute
        if shared and share_positions:
            self.positions: nn.Module | None = shared.positions
        else:
            self.positions = position(config, initial) if position else None
        n_segments = config.embedding.n_segments
        self.segments = Embedding(n_segments, width, initial("segment", n_segments, width)) if n_segments else None
        self.norm = make_norm(config, width) if config.embedding.norm else None
        self.mask_tokens: nn.Module | None = None
        if getattr(config.embedding, "mask_token", False):
            self.mask_tokens, self.visible_patches = MaskTokens(width, initial), VisiblePatches()
        self.inserts_vectors = inserts_vectors
        if inserts_vectors:
            self.inserted_vectors, self.embedded_tokens = InsertedVectors(), EmbeddedTokens()
        self.dropout = Dropout(config.dropout, "embedding")
        self.projection: nn.Module | None = None
        if width != config.d_model:
            self.projection = Linear(width, config.d_model, initial("dense", width, config.d_model), bias=True)

    @property
    def field_embedding(self) -> nn.Module:
        """The embedding that reads the field of the batch."""
        return self.get_submodule(self.name)

    @property
    def table(self) -> Embedding | None:
        """The token embedding table, if there is one."""
        embedding = self.field_embedding
        return embedding if isinstance(embedding, Embedding) else None

    def tied_table(self, config: ModelConfig) -> Embedding | None:
        """Return the table that a tied output head shares; None if untied. Raises UsageError if there is no table."""
        if not config.embedding.tied:
            return None
        if self.table is None:
            raise UsageError(
                f"model.embedding.name = {self.name!r} has no table of tokens for the head to share: set "
                "model.embedding.tied = false, or model.lm_head.name = 'none'"
            )
        return self.table

    def forward(self, inputs_BT: Tensor, sequence: SequenceMetadata, segments_BT: Tensor | None = None) -> Tensor:
        """Embed the field that `input_field` names; return [B, T, D]. segments: None: all tokens are in segment 0."""
        embedding = self.field_embedding
        takes_sequence = getattr(embedding, "takes_sequence", False)
        x_BTE: Tensor = embedding(inputs_BT, sequence) if takes_sequence else embedding(inputs_BT)
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
            x_BTE = x_BTE + self.segments(torch.zeros_like(sequence.positions) if segments_BT is None else segments_BT)
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        if self.mask_tokens is not None and masks_last:
            x_BTE = self._mask(x_BTE, sequence)
        x_BTE = self.dropout(x_BTE, sequence)
        return x_BTE if self.projection is None else self.projection(x_BTE)

    def _mask(self, x_BTE: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Replace masked patches by the mask token.

        As in transformers, this comes before positions are added, or after the norm of an embedding without positions.
        """
        assert self.mask_tokens is not None
        return x_BTE * self.visible_patches(sequence) + self.mask_tokens(sequence).to(x_BTE.dtype)
