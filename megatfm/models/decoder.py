"""Decoder-only transformer, as GPT and Llama; with `prefix`, a prefix language model."""

from collections.abc import Callable

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.block import Block
from megatfm.layers.head import Head
from megatfm.layers.norm import make_norm
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Reads, Stack, layout_of
from megatfm.models.steps import Pass, Step, Steps
from megatfm.ops.sequence import SequenceLayout, targets_ahead

# B batch, T tokens, D model width, V vocabulary


@MODELS.register("decoder")
class Decoder(nn.Module):
    """A causal stack and a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Stack(config, "decoder", "causal")
        self.head = Head(config, self.decoder.embedding.tokens if config.embedding.tied else None)
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
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments, "prefix": prefix,
            "targets": targets, "keys": keys,
        }  # fmt: skip
        batch = self.steps().through(Pass(inputs, cache=cache))
        return Output(batch.carry["hidden"], logits=batch.logits, losses=batch.losses or None)

    def steps(self) -> Steps:
        """What forward does."""
        reads = Reads(lambda batch: batch["tokens"], self._layout, lambda batch: batch.get("segments"))

        def further(name: str) -> Callable[[Pass], None]:
            return lambda batch: self._further(name, batch)

        return Steps(
            [
                *self.decoder.steps("decoder.", reads),
                Step("head", self._head, ("head",), ("hidden",)),
                *(
                    Step(f"future.{name}", further(name), (f"future.{name}", "head"), ("hidden",))
                    for name in self.future
                ),
            ]
        )

    def _layout(self, batch: Pass) -> SequenceLayout:
        def make() -> SequenceLayout:
            return layout_of(
                batch["tokens"],
                batch.get("positions"),
                batch.get("documents"),
                prefix_BT=batch.get("prefix"),
                keys_B=batch.get("keys"),
                cache=batch.cache,
            )

        return batch.once("layout", make)

    def _head(self, batch: Pass) -> None:
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["causal"] = self.head(hidden_BTD, targets)

    def _further(self, name: str, batch: Pass) -> None:
        targets = batch.get("targets")
        if targets is None:
            return
        ahead_BT = targets_ahead(targets, batch.get("documents"), int(name))
        beyond = self._layout(batch).at_layer(self.config.n_layers + int(name))
        hidden_BTD = self.future[name](batch.carry["hidden"], beyond)
        batch.losses[f"future_{name}"] = self.head(hidden_BTD, ahead_BT)


class FutureHead(nn.Module):
    """A block and a norm before the shared output head, to predict a token further on (Gloeckle et al. 2024)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(config, "decoder", "causal")})
        self.final_norm = make_norm(config) if config.norm.ends_stack else None

    def forward(self, hidden_BTD: Tensor, layout: SequenceLayout) -> Tensor:
        x_BTD = self.layers["0"](hidden_BTD, layout)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)
