"""The state of Python's, NumPy's and torch's global generators: nothing in megatfm draws from them (see `megatfm.rng`),
but a plugin may, so that a checkpoint holds it."""

import random
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from megatfm import rng


def seed_all(seed: int, rank: int) -> None:
    """Set the generators of Python, NumPy and torch, on the CPU and the GPU, differently on every rank."""
    start = int(rng.bit_generator(seed, "generators", rank).random_raw()) % 2**32
    random.seed(start)
    np.random.seed(start)
    torch.manual_seed(start)


def rng_state_dict(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators, as tensors under rank-specific names. Integers below 2⁵³ are exact in
    float64."""
    _, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    twister, gauss_too = numpy["state"], [numpy["has_gauss"], numpy["gauss"]]
    generators = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"], *gauss_too], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": tensor for kind, tensor in generators.items()}


def empty_rng_state_dict(
    names: Collection[str], rank: int, world: int, device: torch.device
) -> dict[str, Tensor]:
    """Return tensors to load this rank's state into; empty if the checkpoint has none, or that of another world
    size."""
    current = rng_state_dict(rank, device)
    has_same_world_size = f"rng.{world - 1}.torch" in names and f"rng.{world}.torch" not in names
    return current if has_same_world_size and current.keys() <= set(names) else {}


def load_rng_state_dict(stored: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Set this rank's generators to a stored state; an empty one leaves them as they are."""
    tensors = {kind: stored.get(f"rng.{rank}.{kind}") for kind in ("python", "numpy", "torch", "cuda")}
    if (python := tensors["python"]) is not None:
        *words, has_gauss, gauss = python.tolist()
        random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    if (numpy := tensors["numpy"]) is not None:
        *keys, place, has_gauss, cached = numpy.tolist()
        twister = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", twister, int(place), int(has_gauss), cached))
    if tensors["torch"] is not None:
        torch.set_rng_state(tensors["torch"])
    if tensors["cuda"] is not None:
        torch.cuda.set_rng_state(tensors["cuda"], device)
