from collections.abc import Callable
from pathlib import Path

import pytest

from megatfm.config import Config, load_config

TEXT = """
name = "a"
[model]
d_model = 8
n_layers = 1

[model.attention]
n_heads = 2

[model.ffn]
d_ff = 16
[data]
train = "corpus/train"
tokenizer = "../tokenizer.model"
sequence_length = 8
validation = { code = "corpus/validation", web = "s3://bucket/validation" }
[optimizer]
name = "adamw"
lr = 1e-3
[train]
steps = 10
global_batch = 4
micro_batch = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small config in a folder that is not the current one."""
    path = tmp_path / "configs" / "small.toml"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def load(file: Path) -> Callable[..., Config]:
    """Load the small config with overrides."""
    return lambda *overrides: load_config(file, overrides)
