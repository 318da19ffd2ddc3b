"""Linear head that predicts the pixels of masked patches (SimMIM: Xie et al. 2022)."""

from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, PatchEmbeddingConfig, require_variant
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.maps import MapSequence
from megatfm.layers.output_head import HEADS
from megatfm.layers.patch_embedding import make_normalisation
from megatfm.layers.sequence import SequenceMetadata

# B batch, S tokens of the last map, T tokens of the row, D model width, K values of a patch, C channels


@HEADS.register("pixels")
class PixelsHead(nn.Module):
    """Pixels of all patches [B, T, K], or, given targets, the sum over masked patches of their mean absolute error.

    Each token predicts its square of `stride` × `stride` pixels, which may span several patches. masked: [B, T], the
    patches that count. target_patches: uint8 [B, T, K], normalised like the embedding's input.
    """

    input_fields = ("masked", "target_patches")
    takes_sequence = True
    reads_first_map = True
    predicts = True
    cp_plan = "local"  # where a token stands for several patches, its family needs full rows
    term = "pixels"

    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"))

    def __init__(self, config: ModelConfig, section: Any, tokens: Embedding | None = None) -> None:
        super().__init__()
        self.options = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
        self.factor = int(section.stride) // self.options.patch_size
        d, n_values = config.d_model, self.options.channels * int(section.stride) ** 2
        self.prediction = Linear(d, n_values, make_initialiser(config)("dense", d, n_values), bias=True)

    def forward(
        self,
        hidden_BSD: Tensor,
        masked_BT: Tensor | None = None,
        target_BTK: Tensor | None = None,
        *,
        sequence: SequenceMetadata | None,
    ) -> Tensor:
        if sequence is None:
            raise MegatfmError("the head 'pixels' needs the sequence: its model family must pass it to Model.output")
        predicted_BTK = self._to_patches(self.prediction(hidden_BSD), sequence)
        if masked_BT is None or target_BTK is None:
            return predicted_BTK
        precise = torch.promote_types(predicted_BTK.dtype, torch.float32)
        scale_K, shift_K = make_normalisation(self.options, target_BTK.device, precise)
        errors_BTK = (predicted_BTK.to(precise) - (target_BTK * scale_K + shift_K)).abs()
        return (errors_BTK.mean(-1) * (masked_BT > 0)).sum()

    def _to_patches(self, pixels: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Rearrange squares [B, S, C · stride · stride] into patches [B, T, K].

        Raises UsageError for images that are not a whole number of squares.
        """
        side, factor = self.options.patch_size, self.factor
        if factor == 1:
            return pixels
        if not isinstance(sequence, MapSequence):
            raise MegatfmError("the head 'pixels' needs maps of images where its tokens stand for several patches")
        (height, width), (rows, columns) = sequence.size, sequence.first_size
        if (height * factor, width * factor) != (rows, columns):
            raise UsageError(
                f"images of {rows} × {columns} patches of {side} pixels do not divide into squares of {side * factor} "
                f"pixels, one for each token of the last map: set data.images.size to a multiple of {side * factor}"
            )
        squares = pixels.unflatten(-1, (-1, factor, side, factor, side))
        squares = squares.unflatten(1, (-1, height, width))  # [B, images, h, w, C, rows, side, columns, side]
        patches = squares.permute(0, 1, 2, 5, 3, 7, 4, 6, 8)
        return patches.flatten(6).flatten(1, 5)
