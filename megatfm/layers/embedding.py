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


class InputEmbedding(nn.Module):
    """Sum of an embedded field, positions and segments; then, as configured, norm, dropout and projection from E to D.

    shared: an embedding whose part that reads (a table of tokens) and, for `share_positions`, positions serve this one
    too. reads: the field of the batch that it is given.
    """

    tp_plan = (
        ("tokens", "vocab_parallel_embedding"),
        ("positions", "split_output"),
        ("segments", "split_output"),
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
        if self.positions is not None:
            x_BTE = x_BTE + self.positions(sequence).to(x_BTE.dtype)
        if self.segments is not None:
            x_BTE = x_BTE + self.segments(
                torch.zeros_like(sequence.positions) if segments_BT is None else segments_BT
            )
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        x_BTE = self.dropout(x_BTE, sequence)
        return x_BTE if self.projection is None else self.projection(x_BTE)
