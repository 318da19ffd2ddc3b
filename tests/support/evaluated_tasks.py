"""A small run's config, a tokenizer and files of tasks, on which numbers are compared over layouts and batches."""

import inspect
import textwrap
from pathlib import Path
from typing import Any

from torch import nn

from megatfm.config import Config
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.tokenizers import train_sentencepiece
from tests.support.files import write_lines

LETTERS = "ABC"
QUESTIONS = [
    {
        "ask": f"import {'textwrap ' * (number % 4)}größer {number}",
        "a": "def wrap",
        "b": "東京" * (1 + number % 2),
        "c": "x",
        "key": LETTERS[number * 7 % 3],
    }
    for number in range(13)
]
CHOICE = """
data = "questions.jsonl"
prompt = "{{ ask }} is"
choices = ["{{ a }}", "{{ b }}", "{{ c }}"]
answer = "key"
labels = ["A", "B", "C"]
unconditional_prompt = "is"
"""
CLOZE = 'kind = "cloze"\ndata = "questions.jsonl"\nprompt = "{{ ask }}"\nanswer = "a"\n'


def write_tasks(folder: Path) -> dict[str, str]:
    """Write questions, two tasks on them and tokenizer.model; returns the tasks' files by name."""
    texts = [inspect.getsource(textwrap), "größer 東京\n" * 20]
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(texts, vocab_size=400, sentinels=2))
    write_lines(folder / "questions.jsonl", QUESTIONS)
    tasks = {"choice": CHOICE, "cloze": CLOZE}
    for name, text in tasks.items():
        (folder / f"{name}.toml").write_text(text)
    return {name: str(folder / f"{name}.toml") for name in tasks}


def small_config(folder: Path, **changes: Any) -> Config:
    """Return a run of a small decoder in float64 whose logits differ clearly. changes: dotted keys with __."""
    config = Config.model_validate(
        {
            "name": "small",
            "run_dir": str(folder / "run"),
            "model": {"d_model": 16, "n_layers": 2, "attention": {"n_heads": 2}, "ffn": {"d_ff": 16},
                      "init": {"std": 0.5}},
            "data": {"train": str(folder / "nowhere"), "tokenizer": str(folder / "tokenizer.model"),
                     "sequence_length": 64},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "seed": 5, "precision": "fp64"},
        },
    )  # fmt: skip
    return config.with_changes({key.replace("__", "."): value for key, value in changes.items()})


def build_initial_model(config: Config, seed: int = 5) -> nn.Module:
    """Return the model in float64 as an engine draws its weights with `train.seed`."""
    model = build(config.model).double().eval()
    initialise(model, seed)
    return model
