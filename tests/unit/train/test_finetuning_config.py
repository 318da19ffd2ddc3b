"""The config that a task completes: the head that is trained beside adapters is the one that the model gets."""

import json
from pathlib import Path

import pytest

from megatfm.config import load_config
from megatfm.models import build
from megatfm.train.finetuning import resolve_task

TASKS = {
    "span_extraction": {"question": "a b", "context": "c d", "answers": [{"text": "d", "answer_start": 2}]},
    "classification": {"text": "a b", "label": "yes"},
    "multiple_choice": {"text": "a b", "choices": ["c", "d"], "label": 1},
}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]


@pytest.mark.parametrize("form", TASKS)
def test_the_head_is_trained_beside_adapters(form: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(TASKS[form]) + "\n")
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    choices = ["task.choices=['choices']"] * (form == "multiple_choice")
    choices += ["task.labels=['no', 'yes']"] * (form == "classification")
    config, _ = resolve_task(
        load_config(
            "bert-base",
            [
                f"run_dir={tmp_path}/run", f"task={{form='{form}',train='{tmp_path}/rows.jsonl'}}", *choices,
                f"data.tokenizer={tmp_path}/vocab.txt", "data.sequence_length=16", "model.lora={rank=2}",
                "model.d_model=16", "model.attention.n_heads=2", "model.ffn.d_ff=16", "model.n_layers=1",
            ],
        )
    )  # fmt: skip
    trained = {name for name, p in build(config.model).named_parameters() if p.requires_grad}
    (head,) = config.model.extra_heads
    assert any(name.startswith(f"{head}.") for name in trained)
    assert any(name.endswith(".lora.b.weight") for name in trained)
