"""Ways to tamper with shard 1 of a corpus behind its manifest's back, or with its consent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.shard_index import ShardIndex
from megatfm.errors import MegatfmError

Json = dict[str, Any]
Change = Callable[[np.ndarray, np.ndarray], None]  # of an index's frames and samples

SHARD, INDEX = "shard-000001.tar.zst", "shard-000001.index.zst"


def edit_manifest(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the manifest in place."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def replace_index(folder: Path, data: bytes) -> None:
    """Put another index for shard 1, with the manifest's consent."""
    (folder / INDEX).write_bytes(data)
    entry = {"file": INDEX, "bytes": len(data), "blake3": blake3(data).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["shards"][1].update(index=entry))


def replace_shard(folder: Path, data: bytes) -> None:
    """Put another shard 1, with the manifest's consent."""
    (folder / SHARD).write_bytes(data)
    facts = {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["shards"][1].update(facts))


def edited(index: ShardIndex, change: Change) -> bytes:
    """Bytes of an index after a change of its frames and samples."""
    frames, samples = index.frames.copy(), index.samples.copy()
    change(frames, samples)
    return ShardIndex(frames, samples).encode()


def edit_index(folder: Path, change: Change) -> None:
    """Change the index of shard 1, with the manifest's consent."""
    replace_index(folder, edited(Corpus.open(folder).indexes.complete(1), change))


def assert_refused(read: Callable[[], object], *words: str, kind: type[MegatfmError] = MegatfmError) -> None:
    """Assert that reading raises one line that has all these words."""
    with pytest.raises(MegatfmError) as caught:
        read()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
