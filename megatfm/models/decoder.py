"""Decoder-only transformer, as GPT and Llama; with `prefix`, a prefix language model."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.block import Block
from megatfm.layers.head import Head
from megatfm.layers.norm import NORMS
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, layout_of
from megatfm.ops.sequence import SequenceLayout, targets_ahead

# B batch, T tokens, D model width, V vocabulary


@MODELS.register("decoder")
class Decoder(nn.Module):
    """A causal stack and a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Stack(config, "decoder", "causal")
        self.head = Head(config, self.decoder.embedding.tokens if config.tie_embeddings else None)
        self.future = nn.ModuleDict({str(i): FutureHead(config) for i in range(1, config.future_tokens + 1)})

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Output:
        """Run the model on int64 tokens [B, T].

        positions, documents, prefix [B, T], keys [B]: as in SequenceLayout; left out, each row is one document.
        targets [B, T]: next tokens, −100 where none counts; gives `losses` instead of `logits`. cache: tokens before
        these.
        """
        layout = layout_of(tokens, positions, documents, prefix_BT=prefix, keys_B=keys, cache=cache)
        hidden_BTD = self.decoder(tokens, layout, segments_BT=segments, cache=cache)
        if targets is None:
            return Output(hidden_BTD, logits=self.head(hidden_BTD))
        losses = {"causal": self.head(hidden_BTD, targets)}
        for name, further in self.future.items():
            ahead_BT = targets_ahead(targets, documents, int(name))
            beyond = layout.at_layer(self.config.n_layers + int(name))
            losses[f"future_{name}"] = self.head(further(hidden_BTD, beyond), ahead_BT)
        return Output(hidden_BTD, losses=losses)


class FutureHead(nn.Module):
    """A block and a norm before the shared output head, to predict a token further on (Gloeckle et al. 2024)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(config, "decoder", "causal")})
        self.final_norm = (
            NORMS.get(config.norm)(config.d_model, config.norm_eps) if config.has_final_norm else None
        )

    def forward(self, hidden_BTD: Tensor, layout: SequenceLayout) -> Tensor:
        x_BTD = self.layers["0"](hidden_BTD, layout)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)
