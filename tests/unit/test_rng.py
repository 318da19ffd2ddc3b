"""Keyed random numbers: the same for ever, uniform, and unrelated between keys."""

import subprocess
import sys

import numpy as np
import pytest

from megatfm import rng

KEYS: list[tuple[int | str, ...]] = [(), (0,), ("0",), (0, 0), ("a", "b"), ("ab",), (1, "a"), ("a", 1), (-1,)]

GOLDEN_RAW = [7090668857677833275, 16952868447171799082, 14557845250218945068]
GOLDEN_UNIFORM = [0.6082992721846883, 0.9290624199488501]
GOLDEN_PERMUTATION = [5, 0, 4, 2, 3, 7, 1, 6]


def test_generator_keeps_its_golden_values() -> None:
    """The order of every run so far hangs on these: they are never to change."""
    assert rng.random_uint64(3, 0, "order", 1).tolist() == GOLDEN_RAW
    assert rng.uniform(2, 7, "a").tolist() == GOLDEN_UNIFORM
    assert rng.permutation(8, 1, "p").tolist() == GOLDEN_PERMUTATION


def test_draws_are_the_same_in_another_process() -> None:
    code = "from megatfm import rng; print(rng.random_uint64(3, 0, 'order', 1).tolist())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str(GOLDEN_RAW)


def test_a_number_is_its_value_whatever_its_type() -> None:
    assert rng.random_uint64(1, np.int64(3), "x") == rng.random_uint64(1, 3, "x")
    with pytest.raises(TypeError):
        rng.random_uint64(1, 1.5)  # type: ignore[arg-type]


def test_a_longer_draw_goes_on_where_a_shorter_one_ends() -> None:
    assert rng.random_uint64(100, 5)[:7].tolist() == rng.random_uint64(7, 5).tolist()


def test_every_key_has_its_own_numbers() -> None:
    drawn = np.concatenate([rng.random_uint64(50, *key) for key in KEYS])
    assert len(set(drawn.tolist())) == len(drawn)
    x = np.stack([rng.uniform(4000, *key) for key in KEYS])
    correlations = np.corrcoef(x)[np.triu_indices(len(KEYS), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)  # five standard deviations


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_uniform_draws_pass_a_chi_squared_test(key: tuple[int | str, ...]) -> None:
    x = rng.uniform(20_000, *key)
    assert x.min() >= 0
    assert x.max() < 1
    counts, _ = np.histogram(x, bins=64, range=(0, 1))
    chi2 = float(((counts - 20_000 / 64) ** 2 / (20_000 / 64)).sum())
    assert 25 < chi2 < 120, "63 degrees of freedom: outside this once in a million"
    assert np.all(x * 2**53 == np.floor(x * 2**53))
    assert np.any(x * 2**52 != np.floor(x * 2**52)), "the last bit is never set"


def test_permutations_are_uniform() -> None:
    counts = np.zeros((6, 6), int)
    for seed in range(3000):
        permutation = rng.permutation(6, seed, "p")
        assert sorted(permutation.tolist()) == list(range(6))
        counts[np.arange(6), permutation] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(500)
    assert rng.permutation(0, 1).tolist() == []
    assert rng.permutation(1, 1).tolist() == [0]


def test_hashes_keep_their_golden_values() -> None:
    """Masks, plans of packing and dropout hang on these: they are never to change."""
    assert rng.hash_rows((1, "a"), np.arange(2), np.array([5, 5])).tolist() == [
        2514947007226666148,
        15164154967367666321,
    ]
    assert rng.chunk_keys(3, np.array([0, 0, 1]), np.array([0, 1, 0])).tolist() == [
        6198772376103169062,
        15343448976193684557,
        12554490214519274839,
    ]
    assert rng.row_keys(3, np.array([0, 1])).tolist() == [163100055346747955, 5506878964348894781]
    assert (
        rng.ChunkKey(3, 9, 0, 1).without_epoch.tolist()
        == rng.chunk_keys(3, np.array([0]), np.array([1])).tolist()
    )


def test_hashes_are_uniform_and_differ() -> None:
    samples, chunks = np.arange(300).repeat(300), np.tile(np.arange(300), 300)
    keys = rng.chunk_keys(0, samples, chunks)
    assert len(set(keys.tolist())) == len(keys)
    assert not set(keys.tolist()) & set(rng.chunk_keys(1, samples, chunks).tolist())
    bits = (keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))
    correlations = np.corrcoef(bits.T.astype(float))[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(len(keys))
    counts, _ = np.histogram(rng.to_unit_interval(keys), bins=64, range=(0, 1))
    chi2 = float(((counts - len(keys) / 64) ** 2 / (len(keys) / 64)).sum())
    assert 25 < chi2 < 120, "63 degrees of freedom: outside this once in a million"
    rows = rng.row_keys(0, np.arange(1000))
    assert rows.dtype == np.int64
    assert (rows >= 0).all()
