"""Sequence metadata of other views of rows: the tokens of one context-parallel rank, and images as maps of patches.

A hierarchical model has one MapSequence a stage.
"""

import copy
from collections.abc import Hashable
from math import prod
from typing import Self

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.keyed_random import fold_in
from megatfm.ops.transfer import keep_host_copy, move_to_device, to_host

# B batch, T tokens of a row, I images of all rows, H rows and W columns of a map, D channels

MapSize = tuple[int, int]
"""Number of rows and columns of a map."""


class SequenceShard(SequenceMetadata):
    """The tokens of a sequence that a context-parallel rank holds.

    full_sequence: metadata of the full rows. token_indices: int64 [T], ascending, this rank's tokens, which are the
    queries. Keys are all tokens of the full rows, or those of `with_keys_at`. All methods return the values of the full
    sequence for these tokens, so masks, biases and dropout do not depend on sharding.
    """

    def __init__(
        self, full_sequence: SequenceMetadata, token_indices: Tensor, memory: SequenceMetadata | None = None
    ) -> None:
        super().__init__(
            full_sequence.positions[:, token_indices],
            None if full_sequence.documents is None else full_sequence.documents[:, token_indices],
            rng_keys=full_sequence.rng_keys,
            memory=memory,
            grid=None if full_sequence.grid is None else full_sequence.grid[:, token_indices],
        )
        self._full_sequence, self.token_indices = full_sequence, token_indices
        self.key_token_indices: Tensor | None = None

    @property
    def full_sequence(self) -> SequenceMetadata:
        return self._full_sequence

    def _on_host(self) -> SequenceMetadata:
        memory = None if self.memory is None else self.memory.on_host()
        host = type(self)(self.full_sequence.on_host(), to_host(self.token_indices), memory)
        host.key_token_indices = None if self.key_token_indices is None else to_host(self.key_token_indices)
        return host

    def make_full_row(self) -> SequenceMetadata:
        """Return the full sequence with this layer's random keys."""
        row = copy.copy(self.full_sequence)
        row.rng_keys = self.rng_keys
        return row

    def with_keys_at(self, key: Hashable, token_indices: Tensor) -> Self:
        """Return a copy whose keys are these tokens only. key: cache key, equal for layers with the same keys."""
        shard = copy.copy(self)
        shard.key_token_indices, shard._cache = token_indices, self.cached(("keys at", key), dict)
        return shard

    def with_queries_at(self, key: Hashable, token_indices: Tensor) -> Self:
        """Return a shard whose queries are these tokens of the rows. key: cache key, equal for layers that share it."""
        shard = copy.copy(self.cached(("queries at", key), lambda: type(self)(self.full_sequence, token_indices)))
        shard.rng_keys = self.rng_keys
        return shard

    @property
    def length(self) -> int:
        return self.full_sequence.length

    @property
    def indices(self) -> Tensor:
        return self.token_indices

    @property
    def key_indices(self) -> Tensor:
        return self.full_sequence.indices if self.key_token_indices is None else self.key_token_indices

    def unique_relative_positions(self) -> Tensor:
        """Return the distances of the full rows, [2L − 1], because a shard's tokens are not contiguous."""
        return self.full_sequence.unique_relative_positions()

    @property
    def prefix_mask(self) -> Tensor | None:
        prefix_BS = self.full_sequence.prefix_mask
        return None if prefix_BS is None else prefix_BS[:, self.key_indices]

    def document_ids(self, *, of_memory: bool = False) -> tuple[Tensor, Tensor] | None:
        if of_memory:
            assert self.memory is not None
            keys = self.memory.full_sequence.documents
            return None if keys is None else (self.documents_or_zeros, keys)
        ids = self.full_sequence.document_ids()
        if ids is None:
            return None
        return ids[0][:, self.token_indices], ids[1][:, self.key_indices]

    def _document_lengths(self) -> Tensor:
        return self.full_sequence.document_lengths()[:, self.token_indices]

    def _positions_in_document(self) -> tuple[Tensor, Tensor]:
        q_positions, k_positions = self.full_sequence.positions_in_document()
        return q_positions[:, self.token_indices], k_positions[:, self.key_indices]


class MapSequence(SequenceMetadata):
    """Metadata of rows that hold whole images of one size, in row-major order of each image's map.

    size: the map. previous_size: the map of the previous stage. first_size: the map of the first stage.
    """

    def __init__(self, size: MapSize, positions: Tensor, documents: Tensor | None, rng_keys: Tensor | None) -> None:
        super().__init__(positions, documents, rng_keys=rng_keys)
        self.size = self.previous_size = self.first_size = size
        tokens, area = positions.shape[1], prod(size)
        if tokens % area:
            raise UsageError(
                f"rows of {tokens} tokens don't hold images of {size[0]} × {size[1]} patches: set "
                f"data.sequence_length = {max(1, tokens // area) * area}, or model.stages.grid"
            )
        self.images_per_row = tokens // area

    @classmethod
    def from_sequence(cls, sequence: SequenceMetadata, size: MapSize) -> "MapSequence":
        """Return the metadata of the same tokens, as images of a map size."""
        token_map = cls(size, sequence.positions, sequence.documents, sequence.rng_keys)
        token_map.grid, token_map.masked = sequence.grid, sequence.masked
        if token_map.documents is None and token_map.images_per_row > 1:
            document_ids_T = torch.arange(token_map.length) // prod(size)
            document_ids_BT = document_ids_T.repeat(len(token_map.positions), 1)
            token_map.documents = move_to_device(document_ids_BT, token_map.positions.device)
        return token_map

    @property
    def image_numbers(self) -> Tensor | None:
        return self.documents  # smaller maps have no grid

    def downsampled(self, size: MapSize, previous: MapSize | None = None) -> "MapSequence":
        """Return the metadata of smaller maps of the same images.

        previous: the map size of the previous stage; None: this one.
        """
        index_S = self.find_downsampled_indices(size)
        rows, area = len(self.positions), prod(size)
        positions_S = torch.arange(area, device=index_S.device).repeat(self.images_per_row)
        documents = None if self.documents is None else take_columns(self.documents, index_S)
        downsampled_map = type(self)(size, positions_S.expand(rows, -1), documents, self.rng_keys)
        downsampled_map.previous_size, downsampled_map.first_size = previous or self.size, self.first_size
        return downsampled_map

    def find_downsampled_indices(self, size: MapSize) -> Tensor:
        """Return for each token of a smaller map the index of the first token that it covers here, int64 [S]."""
        return self.cached(("downsampled indices", size), lambda: self._find_downsampled(size))

    def _find_downsampled(self, size: MapSize) -> Tensor:
        rows, columns = self.size
        r_H, c_W = torch.arange(size[0]) * -(-rows // size[0]), torch.arange(size[1]) * -(-columns // size[1])
        first_I = torch.arange(self.images_per_row) * (rows * columns)
        index_S = (first_I[:, None, None] + r_H[:, None] * columns + c_W).flatten()
        return move_to_device(index_S, self.positions.device)

    def per_image(self, length: int | None = None) -> SequenceMetadata:
        """Return metadata with one row for each image, with separate random keys. length: None: that of the map."""
        images, device = len(self.positions) * self.images_per_row, self.positions.device
        keys = self.rng_keys
        if keys is not None:
            keys = fold_in(keys[:, None], torch.arange(self.images_per_row, device=device)).flatten()
        positions = torch.arange(length or prod(self.size), device=device).expand(images, -1)
        return SequenceMetadata(positions, rng_keys=keys)


def take_columns(values_BT: Tensor, index_S: Tensor) -> Tensor:
    """Return the values of some tokens of each row, with a host copy if the host knows them."""
    return keep_host_copy(lambda values, index: values[:, index], values_BT, index_S)


def to_maps(x_BTD: Tensor, size: MapSize) -> Tensor:
    """Reshape rows of tokens to maps [I, H, W, D]."""
    return x_BTD.reshape(-1, *size, x_BTD.shape[-1])


def to_rows(x_IHWD: Tensor, rows: int) -> Tensor:
    """Reshape maps to `rows` rows of tokens [B, T, D]."""
    return x_IHWD.reshape(rows, -1, x_IHWD.shape[-1])


def find_map_size(grid_BT4: Tensor | None, default: MapSize) -> MapSize:
    """Return the map size of a batch's images from its field `grid`; the default for a batch without it.

    Ignores padding, whose grid is (0, 0, 1, 1). Raises UsageError for images of several sizes.
    """
    if grid_BT4 is None:
        return default
    size_N2 = to_host(grid_BT4)[..., 2:].flatten(0, 1)
    largest_2 = size_N2.amax(0)
    is_padding_N = (size_N2 == 1).all(-1)
    if not ((size_N2 == largest_2).all(-1) | is_padding_N).all():
        sizes = size_N2[~is_padding_N].unique(dim=0)
        size_list = ", ".join(f"{h} × {w}" for h, w in sizes[:3].tolist())
        raise UsageError(
            f"a batch of images of {len(sizes)} sizes ({size_list} patches), and model.family = 'hierarchical' takes "
            "one: set data.images.size, or choose family = 'encoder'"
        )
    rows, columns = largest_2.tolist()
    return int(rows), int(columns)
