"""The global generators go on after a resume as if there had been none."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatfm import checkpoint
from megatfm.train import rng_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        float(torch.randn(())),
        float(torch.rand(())),
    ]


@pytest.mark.parametrize("draws", [0, 1, 4])
def test_what_is_drawn_after_a_resume_is_what_would_have_been(tmp_path: Path, draws: int) -> None:
    rng_state.seed_all(3, 0)
    for _ in range(draws):
        draw()
    path = checkpoint.save(tmp_path, 1, rng_state.rng_state_dict(0, CPU), {})
    expected = [draw() for _ in range(3)]
    rng_state.seed_all(4, 0)
    assert draw() not in expected
    room = rng_state.empty_rng_state_dict(checkpoint.read_names(path), 0, 1, CPU)
    checkpoint.load(path, room)
    rng_state.load_rng_state_dict(room, 0, CPU)
    assert [draw() for _ in range(3)] == expected


def test_ranks_and_seeds_differ_and_repeat() -> None:
    seen = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        rng_state.seed_all(seed, rank)
        seen.append(draw())
    assert seen[3] == seen[0]
    assert len({tuple(item) for item in seen[:3]}) == 3


def test_generators_of_other_ranks_are_not_taken() -> None:
    names = [name for rank in range(2) for name in rng_state.rng_state_dict(rank, CPU)]
    assert rng_state.empty_rng_state_dict(names, 1, 2, CPU).keys() == rng_state.rng_state_dict(1, CPU).keys()
    assert rng_state.empty_rng_state_dict(names, 0, 1, CPU) == {}
    assert rng_state.empty_rng_state_dict(names, 0, 4, CPU) == {}
    assert rng_state.empty_rng_state_dict(["model.w"], 0, 1, CPU) == {}
    before = torch.get_rng_state()
    rng_state.load_rng_state_dict({}, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
