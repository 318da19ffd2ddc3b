"""Corpora behind a URL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatfm.corpus import remote
from megatfm.corpus import storage as module
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.storage import ShardCacheConfig


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    """The corpus at memory://, and the URL."""
    fs = fsspec.filesystem("memory")
    for path in folder.iterdir():
        fs.pipe(f"/bucket/corpus/{path.name}", path.read_bytes())
    yield "memory://bucket/corpus"
    fs.rm("/bucket", recursive=True)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCacheConfig:
    """A cache of shards in a temporary folder."""
    return ShardCacheConfig(tmp_path / "cache")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of downloaded files."""
    names: list[str] = []
    download = module.CachedRemoteStorage._download

    def watched(self: Any, path: Path, known: Any) -> None:
        names.append(known.file)
        download(self, path, known)

    monkeypatch.setattr(module.CachedRemoteStorage, "_download", watched)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    return names


def same_corpora(one: Corpus, other: Corpus) -> bool:
    """Whether two corpora have the same documents."""
    return all(
        np.array_equal(a, b)
        for number in range(one.n_blocks)
        for (_, a), (_, b) in zip(one.read_block(number), other.read_block(number), strict=True)
    )


def use_s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fsspec find S3 at a stand-in's URL."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.config.conf.pop("s3", None)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
