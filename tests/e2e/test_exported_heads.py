"""Exported heads of models that are no relatives of BERT: transformers gives the classes that fine-tuning gives."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatfm import tokenizers
from megatfm.tasks.forms import build_frame
from tests.support.task_folders import (
    FILLERS,
    NAMES,
    TOWNS,
    WORDS_OF_QUESTIONS,
    read_lines,
    run,
    save_bert,
    write_lines,
)

CONFIG = """
name = "task"

[task]
train = "train.jsonl"
validation = "train.jsonl"
epochs = 2

[data]
sequence_length = 32

[optimizer]
name = "adamw"
lr = 4e-3

[train]
global_batch = 8
micro_batch = 4
precision = "fp32"

[log]
sinks = []
"""
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "ModernBertForMaskedLM": ({"local_attention": 8}, 'sentence={name="text_classifier",pooler="transform"}'),
    "DebertaForMaskedLM": (DEBERTA, 'sentence={name="text_classifier",pooler="gelu"}'),
    "ElectraForMaskedLM": ({"embedding_size": 16}, 'sentence={name="text_classifier",pooler="gelu"}'),
    "LlamaForCausalLM": ({"bos_token_id": 2, "eos_token_id": 3}, 'score={name="text_classifier",bias=false}'),
}


def save_model(folder: Path, name: str, **options: Any) -> None:
    """Save a small model of a class of transformers, with a tokenizer of whole words."""
    save_bert(folder, WORDS_OF_QUESTIONS)
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    kind(kind.config_class(vocab_size=5 + len(set(WORDS_OF_QUESTIONS)), **SIZES, **options)).save_pretrained(
        folder
    )


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_head_gives_the_same_probabilities(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, head = MODELS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.toml").write_text(CONFIG)
    save_model(tmp_path / "start", name, **options)
    draw = random.Random(1)
    rows = []
    for _ in range(48):
        word = draw.choice(TOWNS + NAMES)
        text = " ".join([*draw.sample(FILLERS, 3), word])
        rows.append({"text": text, "label": "town" if word in TOWNS else "name"})
    write_lines(tmp_path / "train.jsonl", rows)
    assert (
        run("finetune", "task.toml", "--from", "start", "--export", "exported", f"model.extra_heads.{head}")
        == 0
    )

    predicted = read_lines(tmp_path / "runs/task/predictions/validation.jsonl")[:9]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert type(model).__name__ == f"{name.partition('For')[0]}ForSequenceClassification"
    tokenizer = tokenizers.load(tmp_path / "exported")
    frame = build_frame(tokenizer, is_causal=name.endswith("CausalLM"))
    for row, prediction in zip(rows, predicted, strict=False):
        ids = torch.tensor(frame.wrap(tokenizer.encode(row["text"])).tokens)[None]
        with torch.no_grad():
            shares = model(ids).logits[0].softmax(-1)
        names = [model.config.id2label[place] for place in range(2)]
        expected = torch.tensor([prediction["probabilities"][label] for label in names])
        torch.testing.assert_close(shares, expected, rtol=0, atol=2e-6)
