"""The plain families: decoder (GPT, Llama), encoder (BERT, DeBERTa) and encoder-decoder (T5)."""

from collections.abc import Collection, Mapping
from typing import Self

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.block import Block
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.loss_terms import PAIR_FIELDS, PREFERENCE_TERMS, BlockOutput, PairFields, add_by_name
from megatfm.layers.norm import make_norm
from megatfm.layers.output_head import LMHead
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import (
    MODELS,
    FullRow,
    Model,
    Output,
    list_sequence_fields,
    list_target_fields,
    make_sequence,
    require_field,
)
from megatfm.models.stack import Stack, unpack
from megatfm.ops.cross_entropy import shift_targets
from megatfm.split_points import SplitPoint

# B batch, T tokens, S tokens of the encoder, D model width, V vocabulary


@MODELS.register("decoder")
class Decoder(Model):
    """A causal stack and a language model head; with the field `prefix`, a prefix language model."""

    is_causal, takes_cache = True, True
    decoder: Stack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding = InputEmbedding(config, "decoder")
        self.decoder = Stack(config, "decoder", embedding=embedding)
        self.input_field = embedding.input_field
        self.runs_head = config.lm_head.name != "none"
        self.head = LMHead(config, embedding.tied_table(config)) if self.runs_head else None
        self.future = nn.ModuleDict(
            {str(n): FutureHead(config, config.n_layers + n - 1) for n in range(1, config.n_mtp_heads + 1)}
        )
        self.future_offsets = list(self.future)
        self.add_heads(embedding.table)
        fields = ("prefix", *PAIR_FIELDS, *list_sequence_fields(config))
        self.accept(self.input_field, *fields, targets=list_target_fields(config))
        self.split_points = [
            *self.decoder.split_points("decoder"),
            *([SplitPoint("head", ("head",), ("hidden",))] if self.runs_head else []),
            *(SplitPoint(f"future.{n}", (f"future.{n}", "head"), ("hidden",)) for n in self.future_offsets),
            *self.list_head_points(),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], or on the field of another embedding.

        targets [B, T]: next tokens, −100 to ignore; then returns `losses` instead of `logits`. keys [B] and the fields
        positions, documents, prefix [B, T]: see SequenceMetadata; without them, each row is one document. segments
        [B, T]: if the embedding has segments. pairs, reference [B, T]: preference pairs, see
        `megatfm/layers/loss_terms.py`. cache: key-value cache of earlier tokens. hidden: from the previous pipeline
        stage. Further fields: those of additional heads. Raises TypeError for an unknown field.
        """
        batch = self.read(tokens=tokens, targets=targets, keys=keys, **fields)
        sequence = make_sequence(batch, self.input_field, keys=keys, cache=cache)
        x_BTD, losses, logits = hidden, dict[str, Tensor](), None
        layers = self.make_layer_list()

        if self.decoder is not None:
            x_BTD, losses = self.decoder(
                batch[self.input_field],
                sequence,
                segments=batch.get("segments"),
                hidden=hidden,
                cache=cache,
                layers=layers,
            )
        if self.head is not None and targets is not None:
            if self.runs_head and "pairs" in batch:
                losses |= zip(PREFERENCE_TERMS, self.head(x_BTD, targets, pairs=_get_pairs(batch)), strict=True)
            elif self.runs_head:
                losses["causal"] = self.head(x_BTD, targets)
            for n in self.future_offsets:
                future, at_layer = self.future[n], sequence.at_layer(self.config.n_layers + int(n))
                y_BTD, losses = unpack(future, future(x_BTD, at_layer), losses)
                losses[f"future_{n}"] = self.head(y_BTD, _shift_targets(batch, int(n)))
        elif self.head is not None and self.runs_head and not self.has_targets(batch):
            logits = self.head(x_BTD)
        return self.output(batch, x_BTD, losses, logits, sequence=sequence, layers=layers)

    def stage(self, names: Collection[str]) -> Self:
        """Return a view that runs these split points only, for a pipeline stage."""
        view = super().stage(names)
        view.future_offsets = [n for n in self.future_offsets if f"future.{n}" in names]
        return view


@MODELS.register("encoder")
class Encoder(Model):
    """A bidirectional stack with a masked language model head and additional heads (sentence, span boundary, …)."""

    encoder: Stack | None

    def __init__(self, config: ModelConfig, *, embedding: InputEmbedding | None = None) -> None:
        super().__init__(config)
        embedding = embedding or InputEmbedding(config, "encoder")
        self.encoder = Stack(config, "encoder", embedding=embedding)
        self.input_field = embedding.input_field
        self.runs_head = config.lm_head.name != "none"
        self.head = LMHead(config, embedding.tied_table(config), sparse=True) if self.runs_head else None
        self.add_heads(embedding.table)
        self.accept(self.input_field, *list_sequence_fields(config), targets=list_target_fields(config))
        self.split_points = [
            *self.encoder.split_points("encoder"),
            *([SplitPoint("head", ("head",), ("hidden",))] if self.runs_head else []),
            *self.list_head_points(),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T], or on the field of another embedding.

        targets [B, T]: original tokens at masked positions, −100 elsewhere; then returns `losses` instead of `logits`.
        Other arguments are those of `Decoder.forward`, without prefix and cache.
        """
        batch = self.read(tokens=tokens, targets=targets, keys=keys, **fields)
        sequence = make_sequence(batch, self.input_field, keys=keys)
        x_BTD, losses, logits = hidden, dict[str, Tensor](), None
        layers = self.make_layer_list()

        if self.encoder is not None:
            x_BTD, losses = self.encoder(
                batch[self.input_field], sequence, segments=batch.get("segments"), hidden=hidden, layers=layers
            )
        if self.head is not None and self.runs_head:
            if targets is not None:
                losses["masked"] = self.head(x_BTD, targets)
            elif not self.has_targets(batch):
                logits = self.head(x_BTD)
        return self.output(batch, x_BTD, losses, logits, sequence=sequence, layers=layers)


@MODELS.register("encoder_decoder")
class EncoderDecoder(Model):
    """A bidirectional stack whose output a causal stack attends to; both share the token embedding.

    Additional heads read the decoder's hidden vectors.
    """

    tp_plan = (("memory", "gather_output"),)
    is_causal, takes_cache, has_encoder = True, True, True

    encoder: Stack | None
    decoder: Stack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        shared = InputEmbedding(config, "encoder")
        self.encoder = Stack(config, "encoder", embedding=shared)
        self.memory = nn.Identity()  # tensor parallelism gathers the encoder's output here
        embedding = InputEmbedding(config, "decoder", shared=shared)
        self.decoder = Stack(config, "decoder", cross=True, embedding=embedding)
        self.encoder_input_field, self.input_field = shared.input_field, embedding.input_field
        self.runs_head = config.lm_head.name != "none"
        self.head = LMHead(config, embedding.tied_table(config)) if self.runs_head else None
        self.add_heads(embedding.table)
        fields = list_sequence_fields(config)
        encoder_fields = (f"encoder_{name}" for name in (self.encoder_input_field, *fields))
        self.accept(self.input_field, *fields, *encoder_fields, targets=list_target_fields(config))
        self.split_points = [
            *self.encoder.split_points("encoder", "encoder_hidden", side="encoder_"),
            *self.decoder.split_points("decoder", memory=("encoder_hidden",), memory_modules=("memory",)),
            *([SplitPoint("head", ("head",), ("hidden",))] if self.runs_head else []),
            *self.list_head_points(),
        ]

    def forward(
        self,
        tokens: Tensor | None = None,
        encoder_tokens: Tensor | None = None,
        *,
        memory: Tensor | None = None,
        targets: Tensor | None = None,
        keys: Tensor | None = None,
        cache: KVCache | None = None,
        encoder_hidden: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on int64 tokens [B, T] of the decoder and encoder_tokens [B, S], or on the fields of another
        embedding.

        A document of the decoder attends to the encoder's document of the same id. targets [B, T]: next tokens, −100 to
        ignore; then returns `losses` instead of `logits`. memory [B, S, D]: the result of `encode`, instead of
        encoder_tokens. encoder_hidden, hidden: from the previous pipeline stage. The other arguments are those of
        `Decoder.forward`, for the encoder with the prefix "encoder_".
        """
        batch = self.read(tokens=tokens, encoder_tokens=encoder_tokens, targets=targets, keys=keys, **fields)
        encoder_sequence = self._make_encoder_sequence(batch, keys, memory)
        sequence = make_sequence(batch, self.input_field, keys=keys, cache=cache, memory=encoder_sequence)
        x_BTD, encoder_losses, losses, logits = hidden, dict[str, Tensor](), dict[str, Tensor](), None

        if self.encoder is not None and memory is None:
            encoder_hidden, encoder_losses = self.encoder(
                batch[f"encoder_{self.encoder_input_field}"], encoder_sequence,
                segments=batch.get("encoder_segments"), hidden=encoder_hidden,
            )  # fmt: skip
        if self.decoder is not None:
            if memory is None and self.decoder.depths:
                memory = self.memory(encoder_hidden)
            x_BTD, losses = self.decoder(
                batch[self.input_field], sequence, segments=batch.get("segments"),
                hidden=hidden, memory=memory, cache=cache,
            )  # fmt: skip
        losses = add_by_name(encoder_losses, losses)
        if self.head is not None and self.runs_head:
            if targets is not None:
                losses["span"] = self.head(x_BTD, targets)
            elif not self.has_targets(batch):
                logits = self.head(x_BTD)
        carry = {"encoder_hidden": encoder_hidden}
        return self.output(batch, x_BTD, losses, logits, carry=carry, sequence=sequence)

    def encode(
        self,
        tokens: Tensor | None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Run the encoder on tokens [B, S]; return the memory [B, S, D], which `forward` accepts instead of tokens."""
        input_field = f"encoder_{self.encoder_input_field}"
        batch = self.read(**{input_field: tokens}, encoder_positions=positions, encoder_documents=documents)
        assert self.encoder is not None  # the whole model, not a stage
        hidden_BSD, _ = self.encoder(tokens, self._make_encoder_sequence(batch, keys))
        memory_BSD: Tensor = self.memory(hidden_BSD)
        return memory_BSD

    def _make_encoder_sequence(
        self, batch: Mapping[str, Tensor], keys: Tensor | None, memory: Tensor | None = None
    ) -> SequenceMetadata:
        """Make the metadata of the encoder's tokens. Raises TypeError if the batch has neither tokens nor memory."""
        input_field = f"encoder_{self.encoder_input_field}"
        if memory is not None:
            batch = {**batch, input_field: memory[..., 0]}  # for its length
        if input_field not in batch:
            raise TypeError(f"an encoder-decoder needs {input_field}, or the memory that encode() gave")
        return make_sequence(batch, self.encoder_input_field, "encoder_", keys=keys)


class FutureHead(nn.Module):
    """Multi-token prediction (Gloeckle et al. 2024): a block and a norm before the shared output head.

    depth: index of the block, after those of the stack.
    """

    tp_plan = (("final_norm", "sequence_parallel"),)
    cp_plan = "local"

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(config, "decoder", depth)})
        self.final_norm = make_norm(config) if config.norm.has_final_norm else None

    def forward(self, hidden_BTD: Tensor, sequence: SequenceMetadata) -> Tensor | BlockOutput:
        """Return vectors [B, T, D] for the output head, with the block's auxiliary losses if it has any."""
        result = self.layers["0"](hidden_BTD, sequence)
        x_BTD = result.y if isinstance(result, BlockOutput) else result
        y_BTD = x_BTD if self.final_norm is None else self.final_norm(x_BTD)
        if not isinstance(result, BlockOutput):
            return y_BTD
        return BlockOutput(
            y_BTD, result.losses, {f"layers.0.{sublayer}": counts for sublayer, counts in result.counts.items()}
        )


def _get_pairs(batch: Mapping[str, Tensor]) -> PairFields:
    """Return the preference pairs of a batch."""
    full_documents = batch.get("full_row_documents", require_field(batch, "documents"))
    return PairFields(
        batch["pairs"], require_field(batch, "reference"), batch["documents"], full_documents.shape[1] // 2 + 1
    )


def _shift_targets(batch: Mapping[str, Tensor], n: int) -> Tensor:
    """Return targets shifted by `n` more tokens, [B, T].

    Under context parallelism these may be on another rank, so they are taken from full rows.
    """
    full_row = FullRow.from_batch(batch)
    if full_row is None:
        return shift_targets(batch["targets"], batch.get("documents"), n)
    full_targets = require_field(batch, "full_row_targets")
    return shift_targets(full_targets, full_row.documents, n)[:, full_row.token_indices]
