"""A small real corpus, configs of small runs, and a run directory with a checkpoint, as training leaves it."""

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import megatfm
from megatfm import checkpoint, data_prep
from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, TrainConfig, load_section, to_toml
from megatfm.config.prep import PrepConfig
from megatfm.models import Decoder, build
from megatfm.tokenizers import SentencePieceTokenizer, train_sentencepiece

PACKAGES = ("json", "email", "html", "wsgiref", "xmlrpc")
SMALL_CONFIG = """
name = "small"
model = {{ d_model = 32, n_layers = 2, attention = {{ n_heads = 2 }}, ffn = {{ d_ff = 64 }} }}
optimizer = {{ name = "muon", lr = 3e-3 }}
lr_schedule = {{ warmup_steps = 2 }}
train = {{ steps = 8, global_batch = 8, micro_batch = 4, precision = "fp32" }}
checkpoint = {{ every = 4 }}
evaluate = {{ every = 4, max_rows = 12 }}
log = {{ every = 1, sinks = [] }}
[data]
train = "{corpus}/train"
validation = {{ held-out = "{corpus}/validation", again = "{corpus}/validation" }}
tokenizer = "{corpus}/tokenizer.model"
sequence_length = 64
"""
SMALL_PREP = """
out = "{out}"
read = {{ folder = "{texts}" }}
split = {{ validation = 0.2 }}
tokenizer = {{ vocab_size = 512 }}
"""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a few packages of the standard library."""
    library = Path(json.__file__).parents[1]
    texts = tmp_path_factory.mktemp("source") / "my texts"
    for package in PACKAGES:
        (texts / package).mkdir(parents=True)
        for file in (library / package).glob("*.py"):
            (texts / package / file.name).write_bytes(file.read_bytes())
    return texts


@pytest.fixture(scope="session")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the run, prepared as a corpus."""
    out = tmp_path_factory.mktemp("corpora") / "small"
    config = out.with_name("prep.toml")
    config.write_text(SMALL_PREP.format(out=out, texts=texts))
    data_prep.run(load_section(PrepConfig, config))
    return out


@pytest.fixture(scope="module")
def file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config on the small corpus."""
    path = tmp_path_factory.mktemp("api") / "small.toml"
    path.write_text(SMALL_CONFIG.format(corpus=corpus))
    return path


@pytest.fixture(scope="module")
def run(file: Path) -> Path:
    """A run of two steps."""
    return megatfm.fit(file, f"run_dir={file.parent / 'run'}", "train.steps=2", "train.micro_batch=8")


VERIFIED_CONFIG = {
    "name": "small",
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 6, "attention": {"n_heads": 8, "n_kv_heads": 4},
              "ffn": {"d_ff": 128}},
    "data": {"train": "nowhere/train", "tokenizer": "nowhere/tokenizer.model", "sequence_length": 64},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 5, "global_batch": 8, "micro_batch": 4},
}  # fmt: skip


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
