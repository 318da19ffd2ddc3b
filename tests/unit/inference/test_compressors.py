"""What compressors need for a corpus' text."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatfm.errors import UsageError
from megatfm.inference.evaluate import compressors


def test_a_corpus_without_text_has_nothing_to_compress() -> None:
    empty: Any = SimpleNamespace(folder="corpora/vectors", n_text_bytes=0, n_blocks=0)
    with pytest.raises(UsageError, match="corpora/vectors: has no text that could be compressed: leave out"):
        compressors(empty, tokenizer=None)  # type: ignore[arg-type]
