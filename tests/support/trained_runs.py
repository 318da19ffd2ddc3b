"""A small model and a run directory with a checkpoint of it, as training leaves them."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, TrainConfig, to_toml
from megatfm.models import Decoder, build
from megatfm.tokenizers import SentencePieceTokenizer, train_sentencepiece

SMALL_DECODER = ModelConfig.from_dotted({
    "vocab_size": 400, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "attention.n_kv_heads": 2, "ffn.d_ff": 48,
    "embedding.tied": False,
})  # fmt: skip


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter random, norms too, and large enough that logits differ clearly."""
    random = torch.Generator().manual_seed(1)
    model = build(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=random)
    return model


@pytest.fixture(scope="session")
def tokenizer_model() -> bytes:
    """A SentencePiece model of 400 pieces."""
    texts = [inspect.getsource(textwrap), "Größe, naïve, 東京\n" * 20]
    return train_sentencepiece(texts, vocab_size=400, sentinels=4)


def padded_decoder() -> ModelConfig:
    """A model with tied embeddings and more rows than the tokenizer has ids."""
    return SMALL_DECODER.with_changes({"vocab_size": 420, "embedding.tied": True})


def write_trained_run(folder: Path, tokenizer_model: bytes, model: Decoder, objective: str = "causal") -> Path:
    """Write a run at step 30; returns its folder."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(tokenizer_model)
    length = min(24, model.config.max_row_length[0] or 24)
    config = Config(
        name="small", model=model.config,
        data=DataConfig(train="nowhere", tokenizer="nowhere/tokenizer.model", sequence_length=length),
        optimizer=AdamWConfig(lr=1e-3), train=TrainConfig(steps=30, global_batch=2, micro_batch=2),
    ).with_changes({"objective": {"name": objective}})  # fmt: skip
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state: dict[str, Any] = {
        "step": 30,
        "tokenizer": SentencePieceTokenizer(tokenizer_model).hash,
        "config": config.model_dump(mode="json"),
    }
    checkpoint.save(folder / "checkpoints", 30, tensors, state)
    return folder


def write_next_checkpoint(run: Path, state: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A newer checkpoint, with some of its state and tensors changed."""
    old = run / "checkpoints" / "step-00000030"
    full = {**checkpoint.read_tensors(old), **(tensors or {})}
    checkpoint.save(run / "checkpoints", 31, full, {**checkpoint.read_state(old), **state})
