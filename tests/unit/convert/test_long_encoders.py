"""BigBird and Longformer in whole folders: there and back without a changed number."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.folder import HfFolder
from megatfm.errors import UsageError
from tests.parity.oracle import perturb

SMALL = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 40,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "BigBirdForPreTraining": {**SMALL, "block_size": 2, "num_random_blocks": 1},
    "BigBirdForMaskedLM": {**SMALL, "block_size": 2, "num_random_blocks": 1},
    "LongformerForMaskedLM": {**SMALL, "attention_window": 4, "type_vocab_size": 1},
}
TOKENS = torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(3))


def saved(name: str, folder: Path, **changes: Any) -> Any:
    kind = getattr(transformers, name)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = kind(kind.config_class(**{**CASES[name], **dropped, **changes}))
    perturb(theirs)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    extra = {}
    if name.startswith("Longformer"):
        extra = {"global_attention_mask": (torch.arange(20) == 0).long().expand(2, -1)}
        theirs.eval()
    with torch.no_grad():  # in evaluation BigBird's random blocks are all the first one
        made = (theirs if extra else theirs.train())(TOKENS, **extra)
        wanted = made.prediction_logits if name == "BigBirdForPreTraining" else made.logits
        for folder in ("theirs", "ours"):
            got = megatfm.load(tmp_path / folder)(TOKENS).logits
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
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
            "LongformerForMaskedLM",
            {"attention_window": [4, 8]},
            r"attention_window = \[4, 8\] differs by layer",
        ),
    ],
)
def test_what_we_lack_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(name, tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)
