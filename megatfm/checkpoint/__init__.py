"""Save and load sharded state dicts under any layout, independent of engines and models.

A checkpoint is a folder `step-00000100` with `metadata.json` and safetensors files. The metadata lists tensors (dtype,
global shape, and pieces: offsets, sizes, files) in groups with the same sharding, files (bytes and BLAKE3 hash) and the
caller's JSON `state`, all under one hash. Nothing is pickled.

A save writes to `.step-00000100.partial-…`, syncs it, and commits it by one rename: a folder under its final name is
complete. `Saver` does so in the background while training goes on.
"""

from megatfm.checkpoint.directory import check_all_bytes, find_latest, find_latest_intact, remove_leftovers
from megatfm.checkpoint.locate import find_checkpoint, refuse_foreign_checkpoint
from megatfm.checkpoint.reader import check_tensor_names, load, read_state, read_tensor_specs, read_tensors
from megatfm.checkpoint.saver import Saver, save
from megatfm.checkpoint.sharded_tensor import FlatShardedTensor, ShardedTensor
from megatfm.checkpoint.writer import update_state, write_checkpoint_from_iterator

__all__ = [
    "FlatShardedTensor",
    "Saver",
    "ShardedTensor",
    "check_all_bytes",
    "check_tensor_names",
    "find_checkpoint",
    "find_latest",
    "find_latest_intact",
    "load",
    "read_state",
    "read_tensor_specs",
    "read_tensors",
    "refuse_foreign_checkpoint",
    "remove_leftovers",
    "save",
    "update_state",
    "write_checkpoint_from_iterator",
]
