"""State of the global random generators of Python, NumPy and torch.

megatfm itself doesn't draw from them (see `megatfm.rng`), but plugins may, so checkpoints store their state.
"""

import random
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from megatfm import rng


def seed_all(seed: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and the GPU, differently on every rank."""
    start = int(rng.bit_generator(seed, "generators", rank).random_raw()) % 2**32
    random.seed(start)
    np.random.seed(start)
    torch.manual_seed(start)


def rng_state_dict(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators as tensors under rank-specific names.

    Integers are stored as float64, which is exact below 2⁵³.
    """
    _, integers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    twister, numpy_gauss = numpy["state"], [numpy["has_gauss"], numpy["gauss"]]
    generators = {
        "python": torch.tensor([*integers, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"], *numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": tensor for kind, tensor in generators.items()}


def empty_rng_state_dict(names: Collection[str], rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Return tensors into which this rank's state can be loaded; empty if the checkpoint has no state, or was saved
    with another world size. names: tensors in the checkpoint."""
    current = rng_state_dict(rank, device)
    has_same_world_size = f"rng.{world - 1}.torch" in names and f"rng.{world}.torch" not in names
    return current if has_same_world_size and current.keys() <= set(names) else {}


def load_rng_state_dict(stored: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Restore this rank's generators from a stored state. An empty state changes nothing."""
    tensors = {kind: stored.get(f"rng.{rank}.{kind}") for kind in ("python", "numpy", "torch", "cuda")}
    if (python := tensors["python"]) is not None:
        *integers, has_gauss, gauss = python.tolist()
        random.setstate((3, tuple(int(value) for value in integers), gauss if has_gauss else None))
    if (numpy := tensors["numpy"]) is not None:
        *keys, position, has_gauss, gauss = numpy.tolist()
        twister = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", twister, int(position), int(has_gauss), gauss))
    if tensors["torch"] is not None:
        torch.set_rng_state(tensors["torch"])
    if tensors["cuda"] is not None:
        torch.cuda.set_rng_state(tensors["cuda"], device)
