"""Overlapping patch embedding: a strided convolution over whole images (MViTv2: Li et al. 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, OverlappingPatchesConfig, require_variant
from megatfm.cost import Cost, TokenCounts
from megatfm.errors import UsageError
from megatfm.layers.embedding import EMBEDDINGS
from megatfm.layers.initialisation import Constant, Initialiser, with_fixed_inputs
from megatfm.layers.maps import MapSequence, to_maps, to_rows
from megatfm.layers.patch_embedding import make_normalisation
from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens, K values of a patch, E embedding width, I images, H rows and W columns of a map


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
