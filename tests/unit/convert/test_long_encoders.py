"""BigBird and Longformer in whole folders: there and back without a changed number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from tests.support.hf_encoders import HF_LONG_ENCODERS, LONG_TOKENS, hf_long_encoder, long_encoder_logits
from tests.support.hf_folders import edit_config


@pytest.mark.parametrize("name", HF_LONG_ENCODERS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    reference = hf_long_encoder(name)
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    with torch.no_grad():
        expected = long_encoder_logits(reference)
        for folder in ("theirs", "ours"):
            actual = megatfm.load(tmp_path / folder)(LONG_TOKENS).logits
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [name]
    original, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    # Masked tokens don't use the pooler that the class has all the same.
    used = {key for key in original if name != "BigBirdForMaskedLM" or "pooler" not in key}
    assert used == back.keys()
    assert all(torch.equal(original[key], back[key]) for key in used)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "BigBirdForMaskedLM",
            {"attention_type": "original_full"},
            "attention_type = 'original_full' is not",
        ),
        (
            "BigBirdForMaskedLM",
            {"num_random_blocks": 0},
            "num_random_blocks = 0 does not run in transformers",
        ),
        (
            "LongformerForMaskedLM",
            {"attention_window": [4, 8]},
            r"attention_window = \[4, 8\] differs by layer",
        ),
        (
            "LongformerForMaskedLM",
            {"attention_window": [4]},
            r"\[4\] has 1 widths, but num_hidden_layers = 2",
        ),
    ],
)
def test_what_we_lack_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    hf_long_encoder(name).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)
