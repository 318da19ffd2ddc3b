"""Folders of Swin and Swin-V2, both ways: transformers' own files, both spellings, older buffers, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import megatfm
from megatfm.convert.convert import convert
from megatfm.errors import UsageError
from tests.support.hf_folders import edit_config, folder_tensors, hf_config_of, perturbed, with_fresh_memory
from tests.support.swin import batch_of, images_of

SMALL = {
    "image_size": 36, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.5, "drop_path_rate": 0.3, "id2label": {0: "cat", 1: "dog", 2: "ant"},
    "label2id": {"cat": 0, "dog": 1, "ant": 2},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Swin": ("SwinForImageClassification", {}),
    "Swin-V2": ("Swinv2ForImageClassification", {"pretrained_window_sizes": [0, 0]}),
    "Swin-V2, larger windows": ("Swinv2ForImageClassification", {"pretrained_window_sizes": [3, 2]}),
    "backbone": ("SwinModel", {}),
}


def make(case: str, folder: Path) -> PreTrainedModel:
    name, options = CASES[case]
    kind = getattr(transformers, name)
    model = perturbed(kind(kind.config_class(**(SMALL | options))))
    model.save_pretrained(folder)
    return model


def same_answers(expected: Any, actual: Any) -> None:
    images, inputs = images_of((36, 36), 2)
    output, batch = with_fresh_memory(expected)(inputs.float()), batch_of(images, [[0], [1]], [0, 0])
    del batch["labels"]
    if hasattr(output, "logits"):
        values, wanted = actual(**batch).predictions["classifier"], output.logits
    else:
        values, wanted = actual(**batch).hidden, output.last_hidden_state
    torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, tmp_path: Path) -> None:
    expected = make(case, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded, info = type(expected).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert hf_config_of(loaded) == hf_config_of(expected)
    original, back = (folder_tensors(tmp_path / folder) for folder in ("theirs", "back"))
    prefix = "" if original.keys() == back.keys() else "swin."
    assert {f"{prefix}{key}" for key in original} == back.keys()
    assert all(torch.equal(back[f"{prefix}{key}"], tensor) for key, tensor in original.items())
    same_answers(expected, megatfm.load(tmp_path / "ours"))
    same_answers(loaded, megatfm.load(tmp_path / "theirs"))


def test_names_as_in_memory_and_older_buffers(tmp_path: Path) -> None:
    expected = make("Swin", tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != expected.state_dict().keys()
    index = {
        f"swin.encoder.layers.0.blocks.{block}.attention.self.relative_position_index": torch.zeros(
            16, 16
        ).long()
        for block in (0, 1)
    }
    save_file(dict(expected.state_dict()) | index, tmp_path / "model.safetensors")
    same_answers(expected, megatfm.load(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-06 is not supported"),
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings = True is not supported"),
        ({"image_size": [32, 64]}, "megatfm reads square images"),
        ({"hidden_size": 16}, "hidden_size = 16 is not supported, only 32"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make("Swin", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        megatfm.load(tmp_path)


def test_stages_of_which_some_were_pretrained_with_other_windows_are_refused(tmp_path: Path) -> None:
    make("Swin-V2", tmp_path)
    edit_config(tmp_path, **{"pretrained_window_sizes": [3, 0]})
    with pytest.raises(UsageError, match="give all of them, or zeros alone"):
        megatfm.load(tmp_path)
