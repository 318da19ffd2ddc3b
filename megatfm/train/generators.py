"""The global random generators: nothing in megatfm draws from them (see `megatfm.keyed`), but a plugin may."""

import random
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from megatfm import keyed


def seed_all(seed: int, rank: int) -> None:
    """Set the generators of Python, NumPy and torch, on the CPU and the GPU, differently on every rank."""
    start = int(keyed.bit_generator(seed, "generators", rank).random_raw()) % 2**32
    random.seed(start)
    np.random.seed(start)
    torch.manual_seed(start)


def rng_state_dict(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Where this rank's generators are, as tensors under names of its own. Integers below 2⁵³ are exact in float64."""
    _, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    twister, gauss_too = numpy["state"], [numpy["has_gauss"], numpy["gauss"]]
    found = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"], *gauss_too], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": tensor for kind, tensor in found.items()}


def empty_rng_state_dict(
    names: Collection[str], rank: int, world: int, device: torch.device
) -> dict[str, Tensor]:
    """What to load a checkpoint's generators into; nothing where it has them of another number of ranks, or none."""
    wanted = rng_state_dict(rank, device)
    same = f"rng.{world - 1}.torch" in names and f"rng.{world}.torch" not in names
    return wanted if same and wanted.keys() <= set(names) else {}


def load_rng_state_dict(stored: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Put this rank's generators where they were; nothing stored leaves them as they are."""
    found = {kind: stored.get(f"rng.{rank}.{kind}") for kind in ("python", "numpy", "torch", "cuda")}
    if (python := found["python"]) is not None:
        *words, has_gauss, gauss = python.tolist()
        random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    if (numpy := found["numpy"]) is not None:
        *keys, place, has_gauss, cached = numpy.tolist()
        twister = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", twister, int(place), int(has_gauss), cached))
    if found["torch"] is not None:
        torch.set_rng_state(found["torch"])
    if found["cuda"] is not None:
        torch.cuda.set_rng_state(found["cuda"], device)
