"""Sizes and numbers of the images of a corpus's samples, from its indexes alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.shard_index import ShardIndex
from megatfm.errors import UsageError


class ImageIndex(Protocol):
    """Sizes and numbers of the images of consecutive documents."""

    @property
    def image_sizes(self) -> NDArray[np.int64]:
        """Height and width of the image of each [D, 2], where the objective asks for them."""
        ...

    @property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of images of each [D], where the objective asks for it."""
        ...


@dataclass(frozen=True)
class ImageColumns:
    """The images of the samples in blocks `begin` to `end` − 1 of a corpus."""

    corpus: Corpus
    begin: int
    end: int

    @cached_property
    def image_sizes(self) -> NDArray[np.int64]:
        """Upright height and width [n, 2] of each sample's only image.

        Raises a UsageError if an index lacks image sizes.
        """
        sizes = [np.empty((0, 2), np.int64)]
        for shard, index, rows in self._tables():
            if index.has_image_counts:
                raise UsageError(
                    f"{self.corpus.shard_path(shard)}: has samples of several images, and data.images.max_patches "
                    "takes one: set data.images.size"
                )
            if not index.has_image_sizes:
                raise UsageError(
                    f"{self.corpus.shard_path(shard)}: its index lacks the sizes of images, which "
                    "data.images.max_patches needs: prepare the corpus again, or set data.images.size"
                )
            sizes.append(np.stack([rows["height"], rows["width"]], axis=1).astype(np.int64))
        return np.concatenate(sizes)

    @cached_property
    def image_counts(self) -> NDArray[np.int64]:
        """Number of images of each sample [n]; an index without it is of samples with one each."""
        counts = [np.empty(0, np.int64)]
        for _, index, rows in self._tables():
            counts.append(rows["images"].astype(np.int64) if index.has_image_counts else np.ones(len(rows), np.int64))
        return np.concatenate(counts)

    def _tables(self) -> Iterator[tuple[int, ShardIndex, NDArray[Any]]]:
        """Yield number, index and rows of these samples of each shard."""
        begin = self.begin
        while begin < self.end:
            shard, blocks = self.corpus.find_shard(begin)
            index, stop = self.corpus.indexes.complete(shard), min(self.end, blocks.stop)
            bounds = index.first_samples[[begin - blocks.start, stop - blocks.start]]
            yield shard, index, index.samples[slice(*bounds.tolist())]
            begin = stop
