"""Encoder-decoder, as Transformer 2017 and T5."""

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention import KVCache
from megatfm.layers.embedding import Embedding
from megatfm.layers.head import Head
from megatfm.models.output import Output
from megatfm.models.registry import MODELS
from megatfm.models.stack import Stack, layout_of

# B batch, T tokens of the decoder, S tokens of the encoder, D model width, V vocabulary


@MODELS.register("encoder_decoder")
class EncoderDecoder(nn.Module):
    """A bidirectional stack whose output a causal stack attends to; both share the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Stack(config, "encoder", "full")
        embedding = Embedding(config, "decoder", shared=self.encoder.embedding)
        self.decoder = Stack(config, "decoder", "causal", cross=True, embedding=embedding)
        self.head = Head(config, embedding.tokens if config.tie_embeddings else None)

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
        if memory is None:
            memory = self.encode(
                encoder_tokens, positions=encoder_positions, documents=encoder_documents, keys=keys
            )
        of_memory = layout_of(memory[..., 0], encoder_positions, encoder_documents)
        layout = layout_of(tokens, positions, documents, keys_B=keys, cache=cache, memory=of_memory)
        hidden_BTD = self.decoder(tokens, layout, memory_BSD=memory, cache=cache)
        if targets is None:
            return Output(hidden_BTD, logits=self.head(hidden_BTD))
        return Output(hidden_BTD, losses={"span": self.head(hidden_BTD, targets)})

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
        # The two stacks number their layers alike, so the encoder's random keys are others.
        layout = layout_of(tokens, positions, documents, keys_B=None if keys is None else ~keys)
        return self.encoder(tokens, layout)
