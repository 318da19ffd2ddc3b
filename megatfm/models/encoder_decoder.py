"""Encoder-decoder, as Transformer 2017 and T5."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.heads import add_heads
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, StackInputs, sequence_metadata
from megatfm.models.steps import ForwardPass, ModelStep, ModelSteps

# B batch, T tokens of the decoder, S tokens of the encoder, D model width, V vocabulary


@MODELS.register("encoder_decoder")
class EncoderDecoder(nn.Module):
    """A bidirectional stack whose output a causal stack attends to; both share the token embedding.

    Other heads than the one over the vocabulary look at what the decoder made.
    """

    plan = (("memory", "enter output"),)

    context = "alone"
    is_causal, takes_cache, has_encoder = True, True, True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder")
        self.memory = nn.Identity()  # the seam at which tensor parallelism gathers what the encoder made
        embedding = Embedding(config, "decoder", shared=self.encoder.embedding)
        self.decoder = Stack(config, "decoder", cross=True, embedding=embedding)
        self.head = Head(config, embedding.tied_table(config)) if config.head.name != "none" else None
        # A pipeline stage may have lost either stack.
        self.encoder_reads, self.reads = self.encoder.reads, self.decoder.reads
        encode = StackInputs(self.encoder_sequence, side="encoder_", writes="memory")
        decode = StackInputs(self.sequence, memory=self._memory, carried_memory=("memory",))
        self.encoder_steps = ModelSteps(self.encoder.steps("encoder", encode))
        self.decoder_steps = ModelSteps(
            [
                *self.decoder.steps("decoder", decode),
                *([ModelStep("head", self._head, uses=("head",), reads=("hidden",))] if self.head else []),
                *add_heads(self, config, embedding.table),
            ]
        )
        self.steps = ModelSteps([*self.encoder_steps, *self.decoder_steps])

    def forward(
        self,
        tokens: Tensor | None = None,
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
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T] of the decoder and encoder_tokens [B, S], or on what else of `fields`
        its embedding reads.

        A document of the decoder sees the encoder's document of the same number; see SequenceMetadata for positions,
        documents and keys. targets [B, T]: next tokens, −100 where none counts; gives `losses` instead of `logits`.
        memory [B, S, D]: what `encode` gave, instead of encoder_tokens. cache: tokens before these. fields: what other
        heads read.
        """
        inputs = {
            "tokens": tokens, "positions": positions, "documents": documents, "targets": targets, "keys": keys,
            "encoder_tokens": encoder_tokens, "encoder_positions": encoder_positions,
            "encoder_documents": encoder_documents, "memory": memory,
        }  # fmt: skip
        batch = ForwardPass({**inputs, **fields}, cache=cache)
        if memory is None and batch.get("encoder_" + self.encoder_reads) is None:
            raise TypeError(
                f"an encoder-decoder needs encoder_{self.encoder_reads}, or the memory that encode() gave"
            )
        for step in self.steps if memory is None else self.decoder_steps:
            batch.keep(step, step.run(*step.inputs(batch)))
        return batch.output()

    def encoder_sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the encoder's tokens stand; one for all its steps."""
        return batch.once("encoder sequence", lambda: self._encoder_sequence(batch))

    def sequence(self, batch: ForwardPass) -> SequenceMetadata:
        """Where the decoder's tokens stand, and the memory's; one for all its steps."""
        return batch.once("sequence", lambda: self._sequence(batch))

    def _encoder_sequence(self, batch: ForwardPass) -> SequenceMetadata:
        # The two stacks number their layers alike, so the encoder's random keys are others.
        keys = batch.get("keys")
        return sequence_metadata(
            batch["encoder_" + self.encoder_reads],
            batch.get("encoder_positions"),
            batch.get("encoder_documents"),
            rng_keys_B=None if keys is None else ~keys,
            of_row=batch.of_row("encoder_"),
            starts=batch.get("encoder_cu_seqlens"),
        )

    def _sequence(self, batch: ForwardPass) -> SequenceMetadata:
        given = batch.get("memory")
        of_memory = sequence_metadata(
            batch["encoder_" + self.encoder_reads] if given is None else given[..., 0],
            batch.get("encoder_positions"),
            batch.get("encoder_documents"),
            of_row=batch.of_row("encoder_"),
        )
        return sequence_metadata(
            batch[self.reads],
            batch.get("positions"),
            batch.get("documents"),
            rng_keys_B=batch.get("keys"),
            cache=batch.cache,
            memory=of_memory,
            of_row=batch.of_row(),
            starts=batch.get("cu_seqlens"),
        )

    def _memory(self, batch: ForwardPass) -> Tensor:
        given = batch.get("memory")
        return batch.once("memory", lambda: self.memory(batch.carry["memory"])) if given is None else given

    def _head(self, batch: ForwardPass) -> None:
        assert self.head is not None
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
        batch = self.encoder_steps.start(inputs, {})
        return self._memory(batch)
