"""A small real corpus, and configs of small runs."""

import json
from pathlib import Path

import pytest

import megatfm
from megatfm import data_prep
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig

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
