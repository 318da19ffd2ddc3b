"""Files in which tensors begin anywhere, as safetensors' do, give models that lie in memory as fresh ones do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.models import build
from tests.support.hf_encoders import HF_ENCODERS, build_hf_encoder
from tests.support.hf_folders import DECODER_TOKENS, build_hf_decoder
from tests.support.tensors import assert_aligned_inputs, is_misaligned

MODELS = ["gpt1", "mistral", "mla", "t5", *HF_ENCODERS]


def build_hf_model(name: str) -> Any:
    return build_hf_encoder(name) if name in HF_ENCODERS else build_hf_decoder(name)


def shift(file: Path) -> None:
    """Have the tensors of a file begin 8 bytes behind a multiple of 64."""
    tensors = load_file(file)
    for pad in range(8, 200):
        save_file(tensors, file, metadata={"format": "pt", "pad": "x" * pad})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 8:
            break
    with safe_open(file, framework="pt") as opened:
        assert any(is_misaligned(opened.get_tensor(key)) for key in opened.keys())  # noqa: SIM118


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_aligned_like_a_new_one(name: str, tmp_path: Path) -> None:
    build_hf_model(name).save_pretrained(tmp_path / "theirs")
    shift(tmp_path / "theirs" / "model.safetensors")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    inputs = (DECODER_TOKENS, DECODER_TOKENS.flip(1))[: 1 + name.startswith("t5")]
    logits = []
    for folder in ("theirs", "ours"):
        model = megatfm.load(tmp_path / folder)
        assert [n for n, p in model.named_parameters() if is_misaligned(p)] == []
        assert [n for n, b in model.named_buffers() if is_misaligned(b)] == []
        with assert_aligned_inputs():
            logits.append(model(*inputs).logits)
    fresh = build(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits[0], fresh(*inputs).logits)
    assert torch.equal(logits[1], logits[0])


def test_tensors_of_a_foreign_folder_are_aligned(tmp_path: Path) -> None:
    """Rules reckon with it before it becomes a weight."""
    build_hf_model("gpt1").save_pretrained(tmp_path)
    shift(tmp_path / "model.safetensors")
    opened = HfFolder(tmp_path)
    for name in opened.files:
        assert not is_misaligned(opened.read_tensor(name)), name
