"""Folders of CLIP and SigLIP with both towers, both ways: transformers' own files, special ids, pixels' mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import UsageError
from tests.support.hf_folders import edit_config, folder_tensors, hf_config_of, perturbed, with_fresh_memory
from tests.support.images import pixels, to_batch

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "hidden_size": 24}
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
IDS = {"bos_token_id": 47, "eos_token_id": 48, "pad_token_id": 3}
CASES: dict[str, dict[str, Any]] = {
    "CLIPModel": {"projection_dim": 12, "logit_scale_init_value": 1.5},
    "SiglipModel": {},
}
CAPTIONS = [[47, 5, 6, 48], [47, 7, 8, 9, 10, 11, 48]]


def make(name: str, folder: Path) -> PreTrainedModel:
    kind = getattr(transformers, name)
    text = SIZES | IDS | {"vocab_size": 50, "max_position_embeddings": 7}
    config = kind.config_class(
        text_config=text, vision_config=SIZES | {"image_size": 16, "patch_size": 4}, **CASES[name]
    )
    model = perturbed(kind(config))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


def answers(expected: Any, images: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [images, captions]."""
    mean, std = (torch.tensor(PIXELS[key])[:, None, None] for key in ("image_mean", "image_std"))
    normalised = torch.stack([((image.double() / 255 - mean) / std).float() for image in images])
    return expected(pixel_values=normalised, input_ids=tokens).logits_per_image  # type: ignore[no-any-return]


def our_logits(folder: Path, images: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = megatfm.load(folder)
    of_images = to_batch(images, 4, model.config.embedding.n_special_tokens, [[0], [1]])
    is_padded = not model.config.text_tower.causal
    batch = {f"encoder_{field}": values for field, values in of_images.items()} | {"tokens": tokens}
    batch["positions"] = torch.arange(tokens.shape[1]).expand(tokens.shape)
    lengths = torch.tensor([tokens.shape[1] if is_padded else len(caption) for caption in CAPTIONS])
    batch["documents"] = (torch.arange(tokens.shape[1]) < lengths[:, None]).long() - 1
    features = model(**batch).predictions
    logits: torch.Tensor = features["scale"] * features["images"] @ features["texts"].T
    return logits + features.get("bias", 0.0)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Files that transformers wrote become ours, and files from which transformers loads the same model."""
    expected = make(name, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    loaded, info = type(expected).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    again = type(expected).from_pretrained(tmp_path / "theirs")
    assert hf_config_of(loaded) == hf_config_of(again)
    assert {key: getattr(loaded.config.text_config, key) for key in IDS} == IDS
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert {key: written[key] for key in PIXELS} == PIXELS
    assert written["size"] == {"height": 16, "width": 16}
    images = [pixels(16, 16, seed=seed) for seed in (1, 2)]
    tokens = torch.tensor([caption + [3] * (7 - len(caption)) for caption in CAPTIONS])
    logits = answers(expected, images, tokens)
    assert torch.equal(answers(with_fresh_memory(loaded), images, tokens), logits)
    for folder in ("theirs", "ours"):
        torch.testing.assert_close(
            our_logits(tmp_path / folder, images, tokens), logits, rtol=1e-5, atol=1e-5
        )
    original, back = (folder_tensors(tmp_path / folder) for folder in ("theirs", "back"))
    assert original.keys() == back.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in original.items())


def test_towers_that_differ_are_refused(tmp_path: Path) -> None:
    make("CLIPModel", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config={**text, "hidden_act": "gelu"})
    with pytest.raises(UsageError, match=r"text_config\.hidden_act = 'gelu' and .*'quick_gelu'"):
        HfFolder(tmp_path)
    edit_config(tmp_path, text_config={**text, "rope_theta": 1.0})
    with pytest.raises(UsageError, match="megatfm knows no such key"):
        HfFolder(tmp_path)
