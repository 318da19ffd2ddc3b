"""A small real corpus and configs on it, shared by all end-to-end tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatfm import data_prep
from megatfm.config import Config, load
from megatfm.config.prep import PrepConfig
from tests.e2e.ranks import Fault, Ranks, Start

TWO_RANKS = ("parallel.dp_shard=2", "evaluate.every=2", "checkpoint.every=3", "train.steps=10")
PACKAGES = ("json", "email", "html", "wsgiref", "xmlrpc")
SMALL = """
name = "small"

[model]
d_model = 32
n_layers = 2

[model.attention]
n_heads = 2

[model.ffn]
d_ff = 64

[data]
train = "{corpus}/train"
validation = {{ held-out = "{corpus}/validation", again = "{corpus}/validation" }}
tokenizer = "{corpus}/tokenizer.model"
sequence_length = 64

[optimizer]
name = "muon"
lr = 3e-3

[lr_schedule]
warmup_steps = 2

[train]
steps = 12
global_batch = 8
micro_batch = 2
precision = "fp32"

[checkpoint]
every = 4

[evaluate]
every = 6
max_rows = 12

[log]
every = 1
sinks = []
"""

PREP = """
out = "{out}"

[read]
folder = "{texts}"

[split]
validation = 0.2

[tokenizer]
vocab_size = 512
"""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a few packages of the standard library."""
    library = Path(sys.modules["json"].__file__).parents[1]
    texts = tmp_path_factory.mktemp("source") / "my texts"
    for package in PACKAGES:
        (texts / package).mkdir(parents=True)
        for file in (library / package).glob("*.py"):
            (texts / package / file.name).write_bytes(file.read_bytes())
    return texts


@pytest.fixture(scope="session")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They, prepared."""
    out = tmp_path_factory.mktemp("corpora") / "small"
    config = out.with_name("prep.toml")
    config.write_text(PREP.format(out=out, texts=texts))
    data_prep.run(load(PrepConfig, config))
    return out


@pytest.fixture
def config_file(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(corpus=corpus))
    return path


@pytest.fixture
def make_config(config_file: Path, tmp_path: Path) -> Callable[..., Config]:
    """`make_config("train.steps=3", run="a")`: the small config with its run directory under tmp_path."""

    def make(*overrides: str, run: str = "run") -> Config:
        return load(Config, config_file, [f"run_dir={tmp_path / run}", *overrides])

    return make


@pytest.fixture
def start(config_file: Path, tmp_path: Path) -> Iterator[Start]:
    """`start("key=value", …, run="name", fault=…)`: two ranks of `megatfm train` in a run directory."""
    runs: list[Ranks] = []

    def start(
        *overrides: str,
        run: str = "run",
        ranks: int = 2,
        fault: Fault | None = None,
        absent: tuple[int, ...] = (),
    ) -> Ranks:
        runs.append(Ranks(str(config_file), (*TWO_RANKS, *overrides), tmp_path / run))
        return runs[-1].start(ranks, fault, absent)

    yield start
    for run in runs:
        run.end()
