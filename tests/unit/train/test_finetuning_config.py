"""The config that a task completes: the head has what transformers' class has, and is trained beside adapters."""

import json
from pathlib import Path

import pytest

from megatfm.config import load_config
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.train.finetuning import resolve_task

TASKS = {
    "span_extraction": {"question": "a b", "context": "c d", "answers": [{"text": "d", "answer_start": 2}]},
    "classification": {"text": "a b", "label": "yes"},
    "multiple_choice": {"text": "a b", "choices": ["c", "d"], "label": 1},
}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]


SMALL = (
    "model.d_model=16", "model.attention.n_heads=2", "model.ffn.d_ff=16", "model.n_layers=1", "data.sequence_length=16",
)  # fmt: skip
POOLERS = {
    ("bert-base", "classification"): ("tanh", True),
    ("bert-base", "multiple_choice"): ("tanh", True),
    ("bert-base", "span_extraction"): ("none", True),
    ("albert-base", "classification"): ("tanh", True),
    ("deberta-base", "classification"): ("gelu", True),
    ("deberta-base", "span_extraction"): ("none", True),
    ("modernbert-base", "classification"): ("transform", True),
    ("modernbert-base", "span_extraction"): ("transform", True),
    ("gpt2-124m", "classification"): ("none", False),
    ("gpt2-124m", "multiple_choice"): ("none", True),
    ("gpt2-124m", "span_extraction"): ("none", True),
    ("xlnet-base", "classification"): ("tanh", True),
    ("xlnet-base", "span_extraction"): ("none", True),
}
"""Preset and form → pooler, and whether the last layer has a bias, as in transformers' classes."""


def task_words(folder: Path, form: str) -> list[str]:
    """Write a task's file and a tokenizer; the options that name them."""
    (folder / "rows.jsonl").write_text(json.dumps(TASKS[form]) + "\n")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    choices = ["task.choices=['choices']"] * (form == "multiple_choice")
    choices += ["task.labels=['no', 'yes']"] * (form == "classification")
    return [
        f"run_dir={folder}/run", f"task={{form='{form}',train='{folder}/rows.jsonl'}}", *choices,
        f"data.tokenizer={folder}/vocab.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(("preset", "form"), POOLERS)
def test_a_head_has_the_layers_of_transformers_s_class(preset: str, form: str, tmp_path: Path) -> None:
    words = [*task_words(tmp_path, form), "data.sequence_length=16", "model.extra_heads="]
    config, _ = resolve_task(load_config(preset, words))
    (head,) = config.model.extra_heads.values()
    assert (head.pooler, head.bias) == POOLERS[preset, form]


def test_answers_have_no_auxiliary_loss(tmp_path: Path) -> None:
    words = [*task_words(tmp_path, "span_extraction"), "data.sequence_length=16", "task.lm_weight=0.5"]
    with pytest.raises(UsageError, match=r"task.lm_weight = 0.5: form = 'span_extraction' has no auxiliary"):
        resolve_task(load_config("gpt2-124m", words))


@pytest.mark.parametrize("form", TASKS)
def test_the_head_is_trained_beside_adapters(form: str, tmp_path: Path) -> None:
    words = [*task_words(tmp_path, form), *SMALL, "model.lora={rank=2}"]
    config, _ = resolve_task(load_config("bert-base", words))
    trained = {name for name, p in build(config.model).named_parameters() if p.requires_grad}
    (head,) = config.model.extra_heads
    assert any(name.startswith(f"{head}.") for name in trained)
    assert any(name.endswith(".lora.b.weight") for name in trained)
