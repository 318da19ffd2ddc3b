"""What DeepSpeed is configured with on this rank, and what must be there before."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

from megatfm.config import Config
from megatfm.config.deepspeed import derive
from megatfm.engines.deepspeed.operators import load_nvme, load_quantizer
from megatfm.engines.deepspeed.swapped import own_folder
from megatfm.engines.interface import EngineSetup
from megatfm.errors import UsageError

log = logging.getLogger("megatfm")


@dataclass(frozen=True)
class Settings:
    """DeepSpeed's JSON. folder: this engine's own, for what is kept in files."""

    json: dict[str, Any]
    folder: Path | None

    def remove(self) -> None:
        """Nobody needs the files any more."""
        if self.folder:
            rmtree(self.folder, ignore_errors=True)


def settings(config: Config, setup: EngineSetup, package: ModuleType) -> Settings:
    """Raises UsageError for what this machine or number of ranks can't do."""
    own, mesh, folder = config.deepspeed, setup.mesh, None
    if (ranks := mesh.gradient_ranks) % own.hpz:
        raise UsageError(
            f"deepspeed.hpz = {own.hpz} doesn't divide the {ranks} ranks of parallel.dp_shard and parallel.cp: set a "
            "number that does"
        )
    if own.quantized:
        load_quantizer(package, setup.device)
        log.warning(
            "%s: inexact, what is sent is rounded to 8 bits or 4, so this run is not that of one device",
            " and ".join(f"deepspeed.{key}" for key in own.quantized),
        )
    if own.nvme_path and "nvme" in (own.offload_optimizer, own.offload_parameters):
        load_nvme(package)
        folder = own_folder(Path(own.nvme_path))
    derived = derive(config, setup.precision, folder)
    if own.offload_parameters == "nvme":  # DeepSpeed's buffers are of 10⁸ elements each
        data = {name: math.prod(map(mesh.size, setup.layout[name].data.all)) for name in setup.layout}
        sizes = {name: math.prod(placement.region[1]) for name, placement in setup.layout.items()}
        largest = max(-(-size // data[name]) for name, size in sizes.items())
        derived["zero_optimization"]["offload_param"].setdefault("buffer_size", largest)
    return Settings(derived, folder)
