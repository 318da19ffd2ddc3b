"""Fixtures and tests draw from generators that are seeded by their names."""

import zlib

import numpy as np
import pytest
import torch

from tests.support.seeding import seed_by_name

NAME = "tests/unit/test_seeding.py"


@pytest.fixture(scope="module")
def module_draw() -> float:
    return float(torch.rand(()))


@pytest.fixture
def test_seed() -> int:
    return torch.initial_seed()


def first_draws(name: str) -> tuple[float, float]:
    seed_by_name(name)
    return float(torch.rand(())), float(np.random.random())


def test_a_test_and_its_fixtures_are_seeded_by_their_names(test_seed: int, module_draw: float) -> None:
    draws = float(torch.rand(())), float(np.random.random())
    test = f"{NAME}::test_a_test_and_its_fixtures_are_seeded_by_their_names"
    assert test_seed == zlib.crc32(f"{test} test_seed".encode())
    assert draws == first_draws(test)
    assert module_draw == first_draws(f"{NAME} module_draw")[0]


@pytest.mark.parametrize("case", ["a", "Ä"])
def test_parameters_draw_differently(case: str) -> None:
    assert torch.initial_seed() != zlib.crc32(f"{NAME}::test_parameters_draw_differently".encode())
    assert float(torch.rand(())) != first_draws("another")[0]
