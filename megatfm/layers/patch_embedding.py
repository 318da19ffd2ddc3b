"""Patch embedding, and learned vectors of class and register tokens (ViT: Dosovitskiy et al. 2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, PatchEmbeddingConfig, require_variant
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import Initialiser, with_fixed_inputs
from megatfm.layers.linear import Linear
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, K values of a patch, E embedding width


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
