"""A little of the fuzzing of readers; see `fuzz.py` for more of it."""

import pytest

from tests.support.corpus_fuzzer import ARGUMENTS, Fuzz, run


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Fuzz:
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_damage_is_refused_in_one_line(fuzz: Fuzz, name: str) -> None:
    run(name, fuzz, 40)
