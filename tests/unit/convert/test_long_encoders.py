"""BigBird and Longformer in whole folders: there and back without a changed number."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from tests.support.reference_gradients import perturb
from tests.unit.convert.test_convert import edit

SMALL = {
    "vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "BigBirdForPreTraining": {**SMALL, "block_size": 2, "num_random_blocks": 1},
    "BigBirdForMaskedLM": {**SMALL, "block_size": 2, "num_random_blocks": 1},
    "LongformerForMaskedLM": {**SMALL, "attention_window": 4, "type_vocab_size": 1},
}
TOKENS = torch.randint(7, 60, (2, 48), generator=torch.Generator().manual_seed(3))
"""Longer than what is seen whole, also with blocks or random blocks more than twice as large as above. Blocks of 2, 3
and 6 divide it: transformers pads the rest with a token that need not be there."""


def make(name: str, **changes: Any) -> Any:
    kind = getattr(transformers, name)
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = kind(kind.config_class(**{**CASES[name], **dropped, **changes}))
    perturb(theirs)
    return theirs


def logits(theirs: Any, seen_by_all: Sequence[int] = (0,)) -> torch.Tensor:
    """Of the pattern as it is in training; seen_by_all: which tokens, an input of a Longformer."""
    if type(theirs).__name__.startswith("Longformer"):
        mask = torch.isin(torch.arange(TOKENS.shape[1]), torch.tensor(seen_by_all)).long()
        return theirs.eval()(TOKENS, global_attention_mask=mask.expand(len(TOKENS), -1)).logits
    theirs.train()  # in evaluation BigBird's random blocks are all the first one
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    made = theirs(TOKENS)
    return made.prediction_logits if hasattr(made, "prediction_logits") else made.logits


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    with torch.no_grad():
        wanted = logits(theirs)
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
    make(name).save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)
