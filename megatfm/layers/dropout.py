"""Dropout and stochastic depth, keyed by row, layer, site and token (see `megatfm.ops.keyed_random`)."""

import zlib

import torch
from torch import Tensor, nn

from megatfm.errors import UsageError
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops import keyed_random as keyed

# B batch, T tokens, D channels, N heads


class Dropout(nn.Module):
    """Drop elements at `rate` in training. site: a name that is unique within a layer."""

    purpose = "dropout"
    """Subject of the error message about missing random keys."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        self.rate, self.site = rate, zlib.crc32(site.encode())
        self.shard_index = 0
        """Index of the tensor-parallel shard of channels or heads that x holds."""

    @property
    def active(self) -> bool:
        """Whether elements are dropped now; never in evaluation."""
        return self.training and self.rate > 0

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.active:
            return x_BTD
        first = self.shard_index * x_BTD.shape[-1]
        return keyed.dropout(x_BTD, self.rate, self.token_rng_keys(sequence), first)

    def token_rng_keys(self, sequence: SequenceMetadata) -> Tensor:
        """Return int64 [B, T]. Raises UsageError for a batch without random keys."""
        return keyed.make_token_keys(require_rng_keys(sequence.rng_keys, self.purpose), self.site, sequence.indices)

    def make_head_rng_keys(
        self, sequence: SequenceMetadata, n_heads: int, shard_index: int | None = None
    ) -> Tensor | None:
        """Return int64 [B, N, T] for attention probabilities; None if inactive. shard_index: overrides the module's."""
        if not self.active:
            return None
        first = (self.shard_index if shard_index is None else shard_index) * n_heads
        heads = torch.arange(first, first + n_heads, device=sequence.positions.device)
        return keyed.fold_in(self.token_rng_keys(sequence)[:, None], heads[:, None])


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drops a sublayer's output for full rows of text, or for each image of a
    row, at the sequence's `skip_rate`."""

    tp_plan = (("", "local_token_dropout"),)

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = zlib.crc32(site.encode())

    def forward(self, x_BTD: Tensor, sequence: SequenceMetadata) -> Tensor:
        if not self.training or sequence.skip_rate is None:
            return x_BTD
        draws_BT1 = keyed.draw_uniform(self.token_rng_keys(sequence), 1)
        scale_BT1 = (draws_BT1 >= sequence.skip_rate) / (1 - sequence.skip_rate)
        return x_BTD * scale_BT1.to(x_BTD.dtype)

    def token_rng_keys(self, sequence: SequenceMetadata) -> Tensor:
        """Return int64 [B, T], the same key for all tokens of a row, or of an image; its first image has the row's."""
        keys_B = keyed.fold_in(require_rng_keys(sequence.rng_keys, "stochastic depth"), self.site)
        keys_BT = keys_B[:, None].expand(sequence.positions.shape)
        if (images_BT := sequence.image_numbers) is None:
            return keys_BT
        return keys_BT.where(images_BT <= 0, keyed.fold_in(keys_BT, images_BT))


def require_rng_keys(keys_B: Tensor | None, purpose: str) -> Tensor:
    """Return the random keys of a batch's rows. purpose: what needs them. Raises UsageError if the batch has none."""
    if keys_B is None:
        raise UsageError(
            f"{purpose} in training needs random keys, and the batch has none: pass keys, an int64 tensor [batch] with "
            "a different value for each row, or call model.eval()"
        )
    return keys_B
