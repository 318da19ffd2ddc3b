"""The indexes of all shards of a corpus, of which those that were used last are in memory."""

from collections.abc import Sequence
from functools import partial
from typing import overload

from blake3 import blake3

from megatfm.data.cache import ByteCache, nbytes
from megatfm.data.index import ShardIndex
from megatfm.data.manifest import Manifest, Shard
from megatfm.data.store import ShardStorage
from megatfm.errors import MegatfmError

INDEX_CACHE_BYTES = 2**26
"""For the spans of eight million samples: the shards that a rank's streams are in."""
COMPLETE_CACHE_BYTES = 2**24


class Indexes(Sequence[ShardIndex]):
    """The indexes of a corpus, read when they are needed and held against the manifest each time.

    Those that are asked for by number hold of each sample what reading its tokens needs. However many samples a corpus
    has, `INDEX_CACHE_BYTES` of them are in memory, or one index.
    """

    def __init__(self, store: ShardStorage, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._cache: ByteCache[int, ShardIndex] = ByteCache(INDEX_CACHE_BYTES, nbytes)
        self._complete: ByteCache[int, ShardIndex] = ByteCache(COMPLETE_CACHE_BYTES, nbytes)

    def __len__(self) -> int:
        return len(self._manifest.shards)

    @overload
    def __getitem__(self, number: int) -> ShardIndex: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardIndex]: ...
    def __getitem__(self, number: int | slice) -> ShardIndex | list[ShardIndex]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return self._cache.get(number, lambda: self._open(self._manifest.shards[number]).without_keys())

    def complete(self, number: int) -> ShardIndex:
        """An index with the keys of its samples, and the sizes of their texts."""
        return self._complete.get(number, partial(self._open, self._manifest.shards[number]))

    def _open(self, shard: Shard) -> ShardIndex:
        self._store.check(shard.index)
        data = self._store.read(shard.index, 0, shard.index.bytes)
        try:
            if blake3(data).hexdigest() != shard.index.blake3:
                raise MegatfmError("its BLAKE3 hash is not the manifest's")
            return ShardIndex.decode(data, shard, self._manifest.dtype.itemsize)
        except MegatfmError as error:
            raise MegatfmError(f"{self._store.path(shard.index)}: {error}: {self._store.remedy}") from error
