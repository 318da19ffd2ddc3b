"""A small model and a run directory with a checkpoint of it, as training leaves them."""

from pathlib import Path

import pytest
import torch

from megatfm.models import Decoder
from tests.support.small_runs import SMALL_DECODER, padded_decoder, random_model, tokenizer_model, write_trained_run

__all__ = ["tokenizer_model"]  # a fixture


@pytest.fixture(scope="session")
def model() -> Decoder:
    return random_model(SMALL_DECODER)


@pytest.fixture
def run(tmp_path: Path, tokenizer_model: bytes) -> Path:
    """A run at step 30, of a model with tied embeddings and more rows than the tokenizer has ids."""
    return write_trained_run(tmp_path / "run", tokenizer_model, random_model(padded_decoder(), torch.float32))
