"""The checkpoint store: state dicts in, state dicts out, under any layout; it knows no engine and no model.

A checkpoint is a folder `step-00000100` with `metadata.json` and safetensors files. The metadata lists the tensors
(dtype, global shape, and the pieces that make them up: offsets, sizes, files) by groups of those that are cut alike,
every file (bytes and BLAKE3 hash) and the caller's own JSON `state`, under a hash of its own. No pickle is ever read
from disk.

A save writes to `.step-00000100.partial-…`, makes it durable, and becomes real by one rename: a folder under its final
name is complete. `Saver` does so in the background while training goes on.
"""

from megatfm.checkpoint.directory import (
    find_checkpoint,
    find_latest,
    find_latest_intact,
    remove_leftovers,
    verify,
)
from megatfm.checkpoint.reader import load, names, read_state, read_tensors
from megatfm.checkpoint.saver import Saver, save
from megatfm.checkpoint.sharded_tensor import FlatShardedTensor, ShardedTensor
from megatfm.checkpoint.writer import write_checkpoint_from_iterator

__all__ = [
    "FlatShardedTensor",
    "Saver",
    "ShardedTensor",
    "find_checkpoint",
    "find_latest",
    "find_latest_intact",
    "load",
    "names",
    "read_state",
    "read_tensors",
    "remove_leftovers",
    "save",
    "verify",
    "write_checkpoint_from_iterator",
]
