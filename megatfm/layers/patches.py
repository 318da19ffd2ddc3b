"""Patches of images: embeddings of their pixels, and the head that predicts the pixels of masked ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, OverlappingPatchesConfig, PatchEmbeddingConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import Constant, Initialiser, make_initialiser, with_fixed_inputs
from megatfm.layers.linear import Embedding, Linear
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import MapSequence, to_maps, to_rows

# B batch, T tokens, S tokens of the last map, K values of a patch, C channels, E embedding width, D model width
# I images, H rows and W columns of a map


def is_special(grid_BT4: Tensor) -> Tensor:
    """Return boolean [B, T], true for class and register tokens."""
    return grid_BT4[..., 0] < 0


@EMBEDDINGS.register("patches")
class PatchEmbedding(nn.Module):
    """A linear projection of normalised pixels [B, T, K] (ViT: Dosovitskiy et al. 2021).

    Special tokens (class and register tokens) have learned vectors instead.

    Pixels of a patch are ordered (channel, row, column), so that the matrix is a flattened convolution weight.
    """

    tp_plan = (("", "split_output"), ("projection", "sequence_parallel"))
    takes_sequence = True

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.embedding, PatchEmbeddingConfig, "model.embedding")
        width, n_values, n_special = config.embedding_width, options.patch_values, options.n_special_tokens
        self.options = options
        matrix = with_fixed_inputs(initial)("dense", n_values, width)
        self.projection = Linear(n_values, width, matrix, bias=options.bias)
        self.special = nn.Parameter(torch.empty(n_special, width)) if n_special else None
        if n_special:
            self.initial = {"special": initial("embedding", n_special, width)}
            self.roles = {"special": "embedding"}

    def forward(self, patches_BTK: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Embed uint8 patches; return [B, T, E]. Raises TypeError for a batch without a grid."""
        if sequence.grid is None:
            raise TypeError("a model of images needs the field 'grid'")
        weight = self.projection.weight
        precise = torch.promote_types(weight.dtype, torch.float32)
        scale_K, shift_K = make_normalisation(self.options, weight.device, precise)
        x_BTE: Tensor = self.projection((patches_BTK * scale_K + shift_K).to(weight.dtype))
        if self.special is None:
            return x_BTE
        special_BTE = F.embedding(sequence.grid[..., 1].clamp(0, len(self.special) - 1), self.special)
        return torch.where(is_special(sequence.grid)[..., None], special_BTE, x_BTE)


@EMBEDDINGS.register("overlapping_patches")
class OverlappingPatches(nn.Module):
    """A convolution over images (MViTv2: Li et al. 2022), assembled from pixels [B, T, K] and padded with zeros."""

    tp_plan = (("", "split_output"),)
    input_field, takes_sequence = "patches", True

    def __init__(self, config: ModelConfig, initial: Initialiser) -> None:
        super().__init__()
        options = require_variant(config.embedding, OverlappingPatchesConfig, "model.embedding")
        width, side = config.embedding_width, 2 * options.margin + 1
        self.options = options
        self.weight = nn.Parameter(torch.empty(width, options.channels, side, side))
        self.bias = nn.Parameter(torch.empty(width)) if options.bias else None
        init_fn = with_fixed_inputs(initial)("dense", options.channels * side**2, width)
        self.initial = {"weight": init_fn, **({"bias": Constant(0.0)} if options.bias else {})}

    def cost(self, tokens: TokenCounts) -> Cost:
        """Return the cost of the convolution."""
        return Cost(matmul_macs=self.weight.numel() * tokens.n)

    def forward(self, patches_BTK: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Embed uint8 patches; return [B, T, E]. Raises UsageError without maps."""
        if not isinstance(sequence, MapSequence):
            raise UsageError(
                "model.embedding.name = 'overlapping_patches' needs maps: set model.family = 'hierarchical', or choose "
                "embedding.name = 'patches'"
            )
        side, channels = self.options.patch_size, self.options.channels
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        scale_K, shift_K = make_normalisation(self.options, self.weight.device, precise)
        x_IHWK = to_maps((patches_BTK * scale_K + shift_K).to(self.weight.dtype), sequence.size)
        pixels = x_IHWK.unflatten(3, (channels, side, side)).permute(0, 3, 1, 4, 2, 5)
        images = pixels.flatten(4, 5).flatten(2, 3)
        y_IEHW = F.conv2d(images, self.weight, self.bias, stride=side, padding=self.options.margin)
        return to_rows(y_IEHW.permute(0, 2, 3, 1), len(patches_BTK))


def make_normalisation(
    options: PatchEmbeddingConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return scale and shift [K] that turn a pixel x in 0 … 255 into (x / 255 − mean) / std. Cached by device."""
    key = (options.mean, options.std, options.patch_size, device, dtype)
    if key not in _NORMALISATIONS:
        mean_C, std_C = (torch.tensor(values, dtype=torch.float64) for values in (options.mean, options.std))
        factors = 1 / (255 * std_C), -mean_C / std_C
        scale_K, shift_K = (factor.repeat_interleave(options.patch_size**2).to(device, dtype) for factor in factors)
        _NORMALISATIONS[key] = scale_K, shift_K
    return _NORMALISATIONS[key]


_NORMALISATIONS: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


@HEADS.register("pixels")
class PixelsHead(nn.Module):
    """Pixels of all patches [B, T, K], or, given targets, the sum over masked patches of their mean absolute error.

    A linear head (SimMIM: Xie et al. 2022). Each token predicts its square of `stride` × `stride` pixels, which may
    span several patches. masked: [B, T], the patches that count. target_patches: uint8 [B, T, K], normalised like the
    embedding's input.
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
