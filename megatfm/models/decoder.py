"""Decoder-only transformer, as GPT and Llama."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention import KVCache
from megatfm.layers.block import BLOCKS
from megatfm.layers.embedding import Head, TokenEmbedding
from megatfm.layers.norm import NORMS
from megatfm.ops.sequence import SequenceLayout

# B batch, T tokens, D model width, V vocabulary


class Output(NamedTuple):
    """What a model returns. A tuple, because FSDP looks for tensors in tuples and not in other classes."""

    hidden: Tensor
    """After the last norm, [B, T, D]."""
    logits: Tensor | None = None
    """[B, T, V], when no targets were given."""
    loss_sum: Tensor | None = None
    """Summed cross-entropy in nats, when targets were given."""


class Decoder(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UsageError("model.vocab_size is not known: set it, or give the tokenizer's size")
        self.config = config
        self.embedding = TokenEmbedding(config.vocab_size, config.d_model, config.init_std)
        self.layers = nn.ModuleDict(
            {str(i): BLOCKS.get(config.norm_position)(config) for i in range(config.n_layers)}
        )
        self.norm = NORMS.get(config.norm)(config.d_model, config.norm_eps)
        tied_to = self.embedding if config.tie_embeddings else None
        self.head = Head(config.d_model, config.vocab_size, config.init_std, tied_to)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Output:
        """Run the model on int64 tokens [B, T].

        positions, documents [B, T]: as in SequenceLayout; left out, each row is one document. targets [B, T]:
        next tokens, −100 where none counts; gives `loss_sum` instead of `logits`. cache: tokens before these.
        """
        past = cache.length if cache else 0
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand_as(tokens)
        layout = SequenceLayout(positions, documents, past)
        x_BTD = self.embedding(tokens)
        for index, layer in enumerate(self.layers.values()):
            x_BTD = layer(x_BTD, layout, cache.layers[index] if cache else None)
        hidden_BTD = self.norm(x_BTD)
        if targets is None:
            return Output(hidden_BTD, logits=self.head(hidden_BTD))
        return Output(hidden_BTD, loss_sum=self.head(hidden_BTD, targets))


def build(config: ModelConfig) -> Decoder:
    """The model of a config, on the current default device (use `torch.device("meta")` to allocate nothing)."""
    return Decoder(config)
