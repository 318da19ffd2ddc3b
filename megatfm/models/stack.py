"""Embedding, blocks and final norm: what encoders and decoders have in common."""

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers import initialisation
from megatfm.layers.attention import KVCache
from megatfm.layers.block import Block
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.norm import NORMS
from megatfm.layers.position import POSITIONS
from megatfm.ops.sequence import SequenceLayout, Sight

# B batch, T tokens, S tokens of the memory, D model width


class Stack(nn.Module):
    """Tokens to hidden vectors. kind: whose depth and initial weights it has; embedding: one made by another stack."""

    def __init__(
        self,
        config: ModelConfig,
        kind: initialisation.Stack,
        sight: Sight,
        *,
        cross: bool = False,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding or Embedding(config, kind)
        n_layers = initialisation.depth(config, kind)
        distinct = config.distinct_layers or n_layers
        self.layers = nn.ModuleDict(
            {str(i): Block(config, kind, sight, cross=cross) for i in range(distinct)}
        )
        self.order = [str(i * distinct // n_layers) for i in range(n_layers)]
        self.skip_rates = [config.drop_path * i / max(n_layers - 1, 1) for i in range(n_layers)]
        bias = POSITIONS.get(config.position).bias
        self.position = bias(config, initialiser(config, kind)) if bias else None
        self.norm = NORMS.get(config.norm)(config.d_model, config.norm_eps) if config.has_final_norm else None
        self.sight: Sight = sight

    def forward(
        self,
        tokens_BT: Tensor,
        layout: SequenceLayout,
        *,
        segments_BT: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """[B, T, D]. memory: what cross-attention looks at; its layout is `layout.memory`."""
        x_BTD = self.embedding(tokens_BT, layout, segments_BT)
        bias = None if self.position is None else self.position(layout, self.sight)
        for depth, (name, skip_rate) in enumerate(zip(self.order, self.skip_rates, strict=True)):
            past = cache.layers[depth] if cache else None
            x_BTD = self.layers[name](x_BTD, layout.at_layer(depth, skip_rate), bias, memory_BSD, past)
        return x_BTD if self.norm is None else self.norm(x_BTD)


def layout_of(
    tokens_BT: Tensor,
    positions_BT: Tensor | None,
    documents_BT: Tensor | None,
    *,
    prefix_BT: Tensor | None = None,
    keys_B: Tensor | None = None,
    cache: KVCache | None = None,
    memory: SequenceLayout | None = None,
) -> SequenceLayout:
    """The layout of a batch; without positions every row is one document, and goes on where the cache ends."""
    past = cache.length if cache else 0
    if positions_BT is None:
        positions_BT = torch.arange(past, past + tokens_BT.shape[1], device=tokens_BT.device).expand_as(
            tokens_BT
        )
    past_documents = None
    if cache is not None and (documents_BT is not None or cache.documents is not None):
        documents_BT = torch.zeros_like(tokens_BT) if documents_BT is None else documents_BT
        past_documents = cache.documents
        cache.documents = (
            documents_BT if past_documents is None else torch.cat([past_documents, documents_BT], 1)
        )
    return SequenceLayout(
        positions_BT,
        documents_BT,
        prefix=prefix_BT,
        keys=keys_B,
        past=past,
        past_documents=past_documents,
        memory=memory,
    )
