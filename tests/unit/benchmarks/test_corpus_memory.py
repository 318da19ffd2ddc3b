"""Opening and planning take memory by blocks, whatever the number of documents."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatfm.corpus.corpus import Corpus
from megatfm.data.packing_plan import build_packing_plan
from tests.support.benchmark_scripts import script

memory: Any = script("corpus_memory")


def test_memory_does_not_grow_with_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty shards of an index of 0.3 MB as they are in memory when they are read, 5.6 MB together."""
    for name, value in {
        "corpus.index_cache.INDEX_CACHE_BYTES": 2**17,
        "data.packing_plan.SAMPLES_AT_ONCE": 2**12,
    }.items():
        monkeypatch.setattr(f"megatfm.{name}", value)
    monkeypatch.setattr(memory, "SHARD_DOCUMENTS", 10_000)
    memory.write(tmp_path, 200_000)
    Corpus.open(tmp_path)  # what is imported and cached meanwhile doesn't count
    tracemalloc.start()
    corpus = Corpus.open(tmp_path)
    opened, at_opening = tracemalloc.get_traced_memory()
    peaks = []
    for max_tokens in (None, 2047):
        tracemalloc.reset_peak()
        planned = build_packing_plan(corpus, memory.Sequences(max_tokens), [2048], 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert corpus.n_samples == 200_000
    assert planned.sizes.sum() > 200_000 * 300 / 2048
    assert opened < 0.25e6
    assert max(at_opening, *peaks) < 1.5e6
