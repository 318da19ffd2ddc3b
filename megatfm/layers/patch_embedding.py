"""Patch embeddings: a linear projection, with class and register tokens (ViT: Dosovitskiy et al. 2021), and a
convolution over overlapping patches (MViTv2: Li et al. 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, OverlappingPatchesConfig, PatchEmbeddingConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import Constant, Initialiser, with_fixed_inputs
from megatfm.layers.linear import Linear
from megatfm.layers.maps import MapSequence, to_maps, to_rows
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, K values of a patch, E embedding width, I images, H rows and W columns of a map


def is_special(grid_BT4: Tensor) -> Tensor:
    """Return boolean [B, T], true for class and register tokens."""
    return grid_BT4[..., 0] < 0


@EMBEDDINGS.register("patches")
class PatchEmbedding(nn.Module):
    """A linear projection of normalised pixels [B, T, K]; special tokens have learned vectors instead.

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
    """A convolution over images, assembled from normalised pixels [B, T, K] of patches and padded with zeros."""

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
