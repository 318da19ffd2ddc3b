"""Masked autoencoder (He et al. 2022): an encoder of visible patches, and a small decoder that predicts masked ones.

Batch fields with the prefix "encoder_" hold the visible tokens only, the others all tokens. `source` holds for each
token of the decoder its index among the image's visible tokens, −1 for masked patches.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, PatchEmbeddingConfig, PixelDecoderConfig, require_variant
from megatfm.errors import UsageError
from megatfm.layers.embedding import InputEmbedding, TokenGather
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.loss_terms import add_by_name
from megatfm.layers.patches import make_normalisation
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import MODELS, Model, Output, list_sequence_fields, make_sequence
from megatfm.models.stack import Stack
from megatfm.ops.transfer import find_true_indices, move_to_device, to_host
from megatfm.split_points import SplitPoint

# B batch, S tokens of the encoder, T of the decoder, I images of a row, M masked patches, K values of a patch
# D width of the decoder

VARIANCE_EPS = 1e-6
"""Added to the variance of a patch's pixels, as in the released code."""


class Visible(NamedTuple):
    """Input of the decoder: the encoder's output, and the index in it of each decoder token (`source`).

    full_source: of full rows, where these tokens are some of them. sequence: metadata of the encoder's tokens.
    """

    memory_BSD: Tensor
    source_BT: Tensor
    full_source_BT: Tensor | None
    sequence: SequenceMetadata

    def find_memory_indices(self, sequence: SequenceMetadata) -> Tensor:
        """Return the index in the encoder's row of each token of the decoder's full rows, −1 for masked patches."""
        if self.full_source_BT is None:
            return _index_memory(self.source_BT, sequence, self.sequence)
        host = (side.full_sequence.on_host() for side in (sequence, self.sequence))
        return move_to_device(_index_memory(to_host(self.full_source_BT), *host), self.source_BT.device)


class VisibleTokens(nn.Module):
    """Decoder input: projected vectors of visible tokens, a learned mask token elsewhere, plus positions."""

    tp_plan = (("", "split_output"), ("projection", "sequence_parallel"), ("positions", "sequence_parallel"))
    input_field = "source"

    def __init__(self, encoder: ModelConfig, decoder: ModelConfig) -> None:
        super().__init__()
        initial, d = make_initialiser(decoder, "encoder"), decoder.d_model
        self.projection = Linear(encoder.d_model, d, initial("dense", encoder.d_model, d), bias=True)
        self.mask_token = nn.Parameter(torch.empty(1, d))
        self.initial, self.roles = {"mask_token": initial("embedding", 1, d)}, {"mask_token": "embedding"}
        position = POSITIONS.get(decoder.position.name).absolute
        self.positions = position(decoder, initial) if position else None
        self.gather = TokenGather()

    def forward(self, visible: Visible, sequence: SequenceMetadata, segments_BT: Tensor | None = None) -> Tensor:
        """Return [B, T, D]."""
        visible_BSD = self.projection(visible.memory_BSD)
        index_BT = visible.find_memory_indices(sequence)
        visible_BTD = self.gather(visible_BSD, index_BT, visible.sequence.length)
        x_BTD = torch.where((visible.source_BT >= 0)[..., None], visible_BTD, self.mask_token)
        return x_BTD if self.positions is None else x_BTD + self.positions(sequence).to(x_BTD.dtype)


def _index_memory(source_BT: Tensor, sequence: SequenceMetadata, encoder: SequenceMetadata) -> Tensor:
    """Return indices in rows [B, T], from indices among an image's visible tokens."""
    starts_BT = _find_image_starts(encoder).gather(1, sequence.documents_or_zeros.clamp(min=0))
    return (starts_BT + source_BT).where(source_BT >= 0, -1)


def _find_image_starts(sequence: SequenceMetadata) -> Tensor:
    """Return the index [B, I] of each image's first token in its row; 0 where a row has fewer images."""
    max_images, positions_BS = sequence.max_documents_per_row, sequence.positions
    if sequence.documents is None:
        return positions_BS.new_zeros(len(positions_BS), max_images)
    is_first_BS = (positions_BS == 0) & (sequence.documents >= 0)
    # The last one takes all other tokens.
    slots_BI = positions_BS.new_zeros(len(positions_BS), max_images + 1)
    slots_BS = sequence.documents.where(is_first_BS, max_images)
    slots_BI.scatter_(1, slots_BS, sequence.indices.expand_as(positions_BS))
    return slots_BI[:, :max_images]


class PixelDecoderHead(nn.Module):
    """Predicted pixels [B, T, K], or, given the patches, the sum over masked ones of their mean squared error."""

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))
    cp_plan = "local"

    def __init__(self, config: ModelConfig, decoder: ModelConfig) -> None:
        super().__init__()
        self.options = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
        self.normalize = bool(config.pixel_decoder and config.pixel_decoder.normalize_targets)
        d, n_values = decoder.d_model, self.options.patch_values
        self.prediction = Linear(d, n_values, make_initialiser(decoder, "encoder")("dense", d, n_values), bias=True)

    def forward(
        self, hidden_BTD: Tensor, sequence: SequenceMetadata, source_BT: Tensor, patches_BTK: Tensor | None = None
    ) -> Tensor:
        if patches_BTK is None:
            return self.prediction(hidden_BTD)
        is_masked = to_host(source_BT) < 0
        if sequence.documents is not None:
            is_masked = is_masked & sequence.on_host().non_padding_mask
        (token_M,) = find_true_indices(is_masked.flatten(), source_BT.device)
        predicted_MK = self.prediction(hidden_BTD.flatten(0, 1)[token_M])
        precise = torch.promote_types(predicted_MK.dtype, torch.float32)
        errors_MK = predicted_MK.to(precise) - self.compute_targets(patches_BTK.flatten(0, 1)[token_M], precise)
        return errors_MK.square().mean(-1).sum()

    def compute_targets(self, patches_MK: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the target pixels [M, K], normalised by patch if configured."""
        scale_K, shift_K = make_normalisation(self.options, patches_MK.device, dtype)
        pixels_MK = patches_MK * scale_K + shift_K
        if not self.normalize or not len(pixels_MK):
            return pixels_MK
        mean_M1, variance_M1 = pixels_MK.mean(-1, keepdim=True), pixels_MK.var(-1, keepdim=True)
        return (pixels_MK - mean_M1) / (variance_M1 + VARIANCE_EPS).sqrt()


@MODELS.register("masked_autoencoder")
class MaskedAutoencoder(Model):
    """Encoder, decoder and a head for pixels; the encoder's weights are those of the family "encoder"."""

    tp_plan = (("memory", "gather_output_for_tokens"),)
    head_split_point = "pixels"

    encoder: Stack | None
    decoder: Stack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        decoder_config = make_pixel_decoder_config(config)
        self.encoder = Stack(config, "encoder", embedding=InputEmbedding(config, "encoder"))
        self.memory = nn.Identity()  # tensor parallelism gathers the encoder's output here
        self.decoder = Stack(
            decoder_config, "encoder", embedding=cast(InputEmbedding, VisibleTokens(config, decoder_config))
        )
        self.pixels = PixelDecoderHead(config, decoder_config)
        encoder_fields = (f"encoder_{name}" for name in ("patches", *list_sequence_fields(config)))
        self.accept("source", *list_sequence_fields(config), *encoder_fields, targets=("patches",))
        self.split_points = [
            *self.encoder.split_points("encoder", "encoder_hidden", side="encoder_"),
            *self.decoder.split_points("decoder", reads=("encoder_hidden",), embedding_modules=("memory",)),
            SplitPoint("pixels", ("pixels",), ("hidden",)),
        ]

    def forward(
        self,
        encoder_patches: Tensor | None = None,
        source: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on visible uint8 patches [B, S, K] and source [B, T].

        patches [B, T, K]: all patches, which give the loss "reconstruction"; without them `logits` are the predicted
        pixels. Both sides need grid, positions and documents, the encoder's with the prefix "encoder_".
        encoder_hidden, hidden: from the previous pipeline stage.
        """
        batch = self.read(encoder_patches=encoder_patches, source=source, keys=keys, **fields)
        encoder_sequence = make_sequence(batch, "patches", "encoder_", keys=keys)
        sequence = make_sequence(batch, "source", keys=keys)
        x_BTD, losses, pixels = hidden, dict[str, Tensor](), None

        if self.encoder is not None:
            encoder_hidden, losses = self.encoder(encoder_patches, encoder_sequence, hidden=encoder_hidden)
        if self.decoder is not None:
            visible = None
            if self.decoder.embedding is not None:
                memory_BSD, full_source_BT = self.memory(encoder_hidden), batch.get("full_row_source")
                visible = Visible(memory_BSD, batch["source"], full_source_BT, encoder_sequence)
            x_BTD, decoder_losses = self.decoder(visible, sequence, hidden=hidden)
            losses = add_by_name(losses, decoder_losses)
        if self.runs_head:
            result = self.pixels(x_BTD, sequence, batch["source"], batch.get("patches"))
            if "patches" in batch:
                losses["reconstruction"] = result
            else:
                pixels = result
        return self.output(batch, x_BTD, losses, pixels, carry={"encoder_hidden": encoder_hidden})


def make_pixel_decoder_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the decoder's stack. Raises UsageError without `model.pixel_decoder`."""
    decoder = config.pixel_decoder
    if not isinstance(decoder, PixelDecoderConfig):
        raise UsageError("model.family = 'masked_autoencoder' needs a decoder: add the section [model.pixel_decoder]")
    return config.with_changes(
        {
            "family": "encoder",
            "pixel_decoder": None,
            "d_model": decoder.d_model,
            "n_layers": decoder.n_layers,
            "distinct_layers": None,
            "drop_path": 0.0,
            "attention.n_heads": decoder.n_heads,
            "attention.n_kv_heads": None,
            "attention.head_dim": None,
            "ffn.d_ff": decoder.d_ff,
        }
    )
