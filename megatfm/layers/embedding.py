"""Tokens to vectors."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.dropout import Dropout
from megatfm.layers.initialisation import Stack, initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceLayout
from megatfm.layers.table import Table

# B batch, T tokens, E embedding width, D model width


class Embedding(nn.Module):
    """Tokens, positions and segments summed, normed, dropped and, from E to D, projected; each where there is one.

    shared: an embedding whose tables of tokens and, for `share_positions`, positions serve this one too.
    """

    def __init__(
        self,
        config: ModelConfig,
        stack: Stack = "decoder",
        *,
        shared: "Embedding | None" = None,
        share_positions: bool = False,
    ) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UsageError("model.vocab_size is not known: set it, or give the tokenizer's size")
        initial, width = initialiser(config, stack), config.embedding_width
        self.scale = config.embedding.scale
        self.tokens: Table = (
            shared.tokens
            if shared
            else Table(config.vocab_size, width, initial("embedding", config.vocab_size, width))
        )
        position = POSITIONS.get(config.position.name).embedding
        if shared and share_positions:
            self.positions: nn.Module | None = shared.positions
        else:
            self.positions = position(config, initial) if position else None
        n_segments = config.embedding.n_segments
        self.segments = (
            Table(n_segments, width, initial("segment", n_segments, width)) if n_segments else None
        )
        self.norm = make_norm(config, width) if config.embedding.norm else None
        self.dropout = Dropout(config.dropout, "embedding")
        wider = width != config.d_model
        self.projection = (
            Linear(width, config.d_model, initial("dense", width, config.d_model), bias=True)
            if wider
            else None
        )

    def forward(self, tokens_BT: Tensor, layout: SequenceLayout, segments_BT: Tensor | None = None) -> Tensor:
        """[B, T, D]. Without `segments`, all tokens are in segment 0."""
        x_BTE = self.tokens(tokens_BT)
        if self.scale != 1.0:
            x_BTE = x_BTE * self.scale
        if self.positions is not None:
            x_BTE = x_BTE + self.positions(layout).to(x_BTE.dtype)
        if self.segments is not None:
            x_BTE = x_BTE + self.segments(torch.zeros_like(tokens_BT) if segments_BT is None else segments_BT)
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        x_BTE = self.dropout(x_BTE, layout)
        return x_BTE if self.projection is None else self.projection(x_BTE)
