"""Decoder-only transformer, as GPT and Llama; with `prefix`, a prefix language model."""

from functools import partial

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.block import Block
from megatfm.layers.extra import Extra
from megatfm.layers.head import Head
from megatfm.layers.norm import make_norm
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.heads import add_heads
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, StackInputs, sequence_metadata
from megatfm.models.steps import ForwardPass, ModelStep, ModelSteps
from megatfm.ops.targets import targets_ahead

# B batch, T tokens, D model width, V vocabulary


@MODELS.register("decoder")
class Decoder(nn.Module):
    """A causal stack and a head."""

    context = "alone"
    is_causal, takes_cache = True, True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Stack(config, "decoder")
        self.reads = self.decoder.reads
        has_head = config.head.name != "none"
        self.head = Head(config, self.decoder.embedding.tied_table(config)) if has_head else None
        self.future = nn.ModuleDict(
            {str(i): FutureHead(config, config.n_layers + i - 1) for i in range(1, config.future_tokens + 1)}
        )
        self.steps = ModelSteps(
            [
                *self.decoder.steps("decoder", StackInputs(self.sequence)),
                *([ModelStep("head", self._head, uses=("head",), reads=("hidden",))] if self.head else []),
                *(
                    ModelStep(
                        f"future.{n}",
                        partial(self._further, n),
                        uses=(f"future.{n}", "head"),
                        reads=("hidden",),
                    )
                    for n in self.future
                ),
                *add_heads(self, config, self.decoder.embedding.table),
            ]
        )

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], or on what else of `fields` its embedding reads.

        positions, documents, prefix [B, T], keys [B]: as in SequenceMetadata; left out, each row is one document.
        targets [B, T]: next tokens, −100 where none counts; gives `losses` instead of `logits`. cache: tokens before
        these.
        """
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "segments": segments, "prefix": prefix,
            "targets": targets, "keys": keys,
        }  # fmt: skip
        batch = ForwardPass({**inputs, **fields}, cache=cache)
        for step in self.steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the tokens stand; one for all steps."""
        return batch.once("sequence", lambda: self._sequence(batch))

    def _sequence(self, batch: ForwardPass) -> SequenceMetadata:
        return sequence_metadata(
            batch[self.reads],
            batch.get("positions"),
            batch.get("documents"),
            prefix_BT=batch.get("prefix"),
            rng_keys_B=batch.get("keys"),
            cache=batch.cache,
            of_row=batch.of_row(),
            starts=batch.get("cu_seqlens"),
        )

    def _head(self, batch: ForwardPass) -> None:
        assert self.head is not None
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["causal"] = self.head(hidden_BTD, targets)

    def _further(self, name: str, batch: ForwardPass) -> None:
        if batch.get("targets") is None or self.head is None:
            return
        ahead_BT = _ahead(batch, int(name))
        beyond = self.sequence(batch).at_layer(self.config.n_layers + int(name))
        future = self.future[name]
        hidden_BTD = batch.take(future, future(batch.carry["hidden"], beyond))
        batch.losses[f"future_{name}"] = self.head(hidden_BTD, ahead_BT)


def _ahead(batch: ForwardPass, n: int) -> Tensor:
    """Targets `n` tokens further on, which may be elsewhere where the tokens are some of their rows'."""
    row = batch.of_row()
    if row is None:
        return targets_ahead(batch["targets"], batch.get("documents"), n)
    return targets_ahead(batch["row_targets"], row.documents, n)[:, row.places]


class FutureHead(nn.Module):
    """A block and a norm before the shared output head, to predict a token further on (Gloeckle et al. 2024).

    depth: of the block, after those of the stack.
    """

    plan = (("final_norm", "sequence"),)
    context = "alone"

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(config, "decoder", depth)})
        self.final_norm = make_norm(config) if config.norm.ends_stack else None

    def forward(self, hidden_BTD: Tensor, sequence: SequenceMetadata) -> Tensor | Extra:
        made = self.layers["0"](hidden_BTD, sequence)
        x_BTD = made.y if isinstance(made, Extra) else made
        y_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        if not isinstance(made, Extra):
            return y_BTD
        return Extra(y_BTD, made.losses, {f"layers.0.{part}": counts for part, counts in made.counts.items()})
