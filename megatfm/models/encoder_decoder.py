"""Encoder-decoder, as Transformer 2017 and T5."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Reads, Stack, layout_of
from megatfm.models.steps import Pass, Step, Steps
from megatfm.ops.sequence import SequenceLayout

# B batch, T tokens of the decoder, S tokens of the encoder, D model width, V vocabulary


@MODELS.register("encoder_decoder")
class EncoderDecoder(nn.Module):
    """A bidirectional stack whose output a causal stack attends to; both share the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", "full")
        self.memory = nn.Identity()  # the seam at which tensor parallelism gathers what the encoder made
        embedding = Embedding(config, "decoder", shared=self.encoder.embedding)
        self.decoder = Stack(config, "decoder", "causal", cross=True, embedding=embedding)
        self.head = Head(config, embedding.tokens if config.embedding.tied else None)

    def forward(
        self,
        tokens: Tensor,
        encoder_tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        encoder_positions: Tensor | None = None,
        encoder_documents: Tensor | None = None,
        memory: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Output:
        """Run the model on int64 tokens [B, T] of the decoder and encoder_tokens [B, S].

        A document of the decoder sees the encoder's document of the same number; see SequenceLayout for positions,
        documents and keys. targets [B, T]: next tokens, −100 where none counts; gives `losses` instead of `logits`.
        memory [B, S, D]: what `encode` gave, instead of encoder_tokens. cache: tokens before these.
        """
        if memory is None and encoder_tokens is None:
            raise TypeError("an encoder-decoder needs encoder_tokens, or the memory that encode() gave")
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "targets": targets, "keys": keys,
            "encoder_tokens": encoder_tokens, "encoder_positions": encoder_positions,
            "encoder_documents": encoder_documents, "memory": memory,
        }  # fmt: skip
        steps = self.steps() if memory is None else Steps(self._decode())
        batch = steps.through(Pass(inputs, cache=cache))
        return Output(batch.carry["hidden"], logits=batch.logits, losses=batch.losses or None)

    def steps(self) -> Steps:
        """What forward does, without a memory that is given."""
        reads = Reads(lambda batch: batch["encoder_tokens"], self._encoder_layout)
        encode = self.encoder.steps("encoder.", reads, writes="memory", tokens="encoder_tokens")
        return Steps([*encode, *self._decode()])

    def _decode(self) -> list[Step]:
        reads = Reads(lambda batch: batch["tokens"], self._layout, memory=self._memory)
        return [
            *self.decoder.steps("decoder.", reads, memory=("memory",)),
            Step("head", self._head, ("head",), ("hidden",)),
        ]

    def _encoder_layout(self, batch: Pass) -> SequenceLayout:
        def make() -> SequenceLayout:
            # The two stacks number their layers alike, so the encoder's random keys are others.
            keys = batch.get("keys")
            return layout_of(
                batch["encoder_tokens"],
                batch.get("encoder_positions"),
                batch.get("encoder_documents"),
                keys_B=None if keys is None else ~keys,
            )

        return batch.once("encoder layout", make)

    def _layout(self, batch: Pass) -> SequenceLayout:
        def make() -> SequenceLayout:
            given = batch.get("memory")
            of_memory = layout_of(
                batch["encoder_tokens"] if given is None else given[..., 0],
                batch.get("encoder_positions"),
                batch.get("encoder_documents"),
            )
            return layout_of(
                batch["tokens"],
                batch.get("positions"),
                batch.get("documents"),
                keys_B=batch.get("keys"),
                cache=batch.cache,
                memory=of_memory,
            )

        return batch.once("layout", make)

    def _memory(self, batch: Pass) -> Tensor:
        given = batch.get("memory")
        return batch.once("memory", lambda: self.memory(batch.carry["memory"])) if given is None else given

    def _head(self, batch: Pass) -> None:
        hidden_BTD, targets = batch.carry["hidden"], batch.get("targets")
        if targets is None:
            batch.logits = self.head(hidden_BTD)
        else:
            batch.losses["span"] = self.head(hidden_BTD, targets)

    def encode(
        self,
        tokens: Tensor | None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """The memory [B, S, D] of encoder tokens [B, S]."""
        if tokens is None:
            raise TypeError("an encoder-decoder needs encoder_tokens, or the memory that encode() gave")
        inputs = {
            "encoder_tokens": tokens, "encoder_positions": positions, "encoder_documents": documents, "keys": keys
        }  # fmt: skip
        reads = Reads(lambda batch: batch["encoder_tokens"], self._encoder_layout)
        batch = Steps(self.encoder.steps("encoder.", reads, writes="memory")).through(Pass(inputs))
        return self._memory(batch)
