"""What DeepSpeed is configured with on this rank, and what must be there before."""

import importlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from megatfm.config import Config
from megatfm.config.deepspeed import NVME_UNSHARDED_ERROR, NVME_UNSHARDED_HINT
from megatfm.config.deepspeed_json import derive
from megatfm.engines.deepspeed import files
from megatfm.engines.deepspeed.folders import OffloadDirectory
from megatfm.engines.deepspeed.operators import load_quantizer
from megatfm.engines.interface import EngineSetup
from megatfm.engines.precision import PRECISIONS
from megatfm.errors import UsageError
from megatfm.parallel.blocks import transformer_blocks

log = logging.getLogger("megatfm")

BUFFERS_OF_A_STEP = 4
"""Of the optimizer: a group's weights, gradients and, of each of our optimizers, up to two kinds of state."""


@dataclass(frozen=True)
class Settings:
    """DeepSpeed's JSON. folder: this engine's own, for what is kept in files."""

    json: dict[str, Any]
    folder: OffloadDirectory | None

    def remove(self) -> None:
        """Nobody needs the files any more."""
        if self.folder:
            self.folder.remove()


def settings(config: Config, setup: EngineSetup, package: ModuleType) -> Settings:
    """Raises UsageError for what this machine or number of ranks can't do."""
    own, folder = config.deepspeed, None
    if (ranks := setup.mesh.gradient_ranks) % own.zero_hpz_partition_size:
        raise UsageError(
            f"deepspeed.zero_hpz_partition_size = {own.zero_hpz_partition_size} doesn't divide the {ranks} "
            f"ranks of parallel.dp_shard and parallel.cp: set a "
            "number that does"
        )
    if own.quantized:
        keys = " and ".join(f"deepspeed.{key}" for key in own.quantized)
        load_quantizer(package, setup.device, keys)
        log.warning("%s: %s", keys, own.INEXACT)
    if own.nvme_path and own.in_files:
        files.install_aio_handle(package)
        folder = OffloadDirectory(Path(own.nvme_path))
    derived = derive(config, setup.precision, folder.path if folder else None)
    _add_buffers(derived, setup)
    return Settings(derived, folder)


def _add_buffers(derived: dict[str, Any], setup: EngineSetup) -> None:
    """Buffers of what goes to files and comes from there: at least as many, and as large, as can be in use at once.
    A JSON of the user's own may ask for more; with fewer, DeepSpeed would fail in the midst of a step."""
    zero = derived["zero_optimization"]
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        place = zero["offload_optimizer"]
        place["buffer_count"] = max(BUFFERS_OF_A_STEP, place.get("buffer_count", 0))
    if zero.get("offload_param", {}).get("device") == "nvme":
        place, sizes = zero["offload_param"], _own_sizes(setup)
        swapping = importlib.import_module("deepspeed.runtime.swap_tensor.utils")
        smallest = max(swapping.MIN_AIO_BYTES, derived.get("aio", {}).get("block_size", 2**20))
        bytes_each = PRECISIONS[setup.precision].compute_dtype.itemsize
        in_files = {name for name, size in sizes.items() if size * bytes_each >= smallest}
        if any(math.prod(map(setup.mesh.size, setup.layout[name].data_axes.all)) == 1 for name in in_files):
            raise UsageError(f"{NVME_UNSHARDED_ERROR}: {NVME_UNSHARDED_HINT}")
        place["buffer_count"] = max(buffers_in_use(setup.model, in_files), place.get("buffer_count", 0))
        place["buffer_size"] = max(max(sizes.values()), place.get("buffer_size", 0))


def _own_sizes(setup: EngineSetup) -> dict[str, int]:
    """Elements of each weight that are this rank's, padding included."""
    return {
        name: -(-math.prod(placement.region[1]) // math.prod(map(setup.mesh.size, placement.data_axes.all)))
        for name, placement in setup.layout.items()
    }


def buffers_in_use(model: nn.Module, in_files: set[str]) -> int:
    """How many weights can be in buffers at once, of those in files: one block's and, while its last gradients are
    still computed, the next one's, and all that are outside of blocks. Where a part is frozen, modules may get inputs
    without a gradient, whose weights DeepSpeed keeps until the backward pass ends: then it may be all of them."""
    parameters = dict(model.named_parameters())
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return max(1, len(in_files))
    swapped = {id(parameters[name]) for name in in_files}
    inside = [swapped & {id(p) for p in block.parameters()} for block in transformer_blocks(model)]
    outside = swapped.difference(*inside)
    return max(1, len(outside) + sum(sorted(map(len, inside))[-2:]))
