"""CLIP and SigLIP against transformers, from the same perturbed weights: logits, CLIP's loss and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.clip import modeling_clip
from transformers.models.siglip import modeling_siglip

from megatfm.config import ModelConfig
from tests.support.images import draw_pixels, make_batch
from tests.support.reference_gradients import LargestErrors, assert_documented, build_pair, dtype_fixture

SIDE, EOS, POSITIONS = 4, 49, 7
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
COMMON: dict[str, Any] = {
    "family": "two_towers", "vocab_size": 50, "d_model": 24, "n_layers": 2, "attention.n_heads": 3,
    "attention.bias": True, "ffn.d_ff": 48, "ffn.bias": True, "norm.name": "layer_norm", "embedding.name": "patches",
    "embedding.patch_size": SIDE, "embedding.mean": MEAN, "embedding.std": STD, "position.name": "learned_2d",
    "position.grid": (4, 4), "lm_head.name": "none",
}  # fmt: skip
TEXT = {"d_model": 20, "n_layers": 3, "n_heads": 4, "d_ff": 28, "max_positions": POSITIONS}
MODELS: dict[str, dict[str, Any]] = {
    "CLIPModel": {
        "embedding.norm": True, "embedding.bias": False, "ffn.activation": "quick_gelu", "text_tower": TEXT,
        "contrastive": {"width": 10},
    },
    "SiglipModel": {
        "embedding.n_class_tokens": 0, "ffn.activation": "gelu_tanh", "text_tower": {**TEXT, "causal": False},
        "contrastive": {"loss": "sigmoid", "width": 24, "image_pool": "attention", "project_image": False,
                        "projection_bias": True},
    },
}  # fmt: skip
PRESETS = {"CLIPModel": ["clip-b32", "clip-b16", "clip-l14"], "SiglipModel": ["siglip-b16"]}
SIZES = {"as trained": (16, 16), "odd": (37, 53)}
LENGTHS = [4, 7, 2, 5]


dtype = dtype_fixture(modeling_clip, modeling_siglip)


def captions(*, padded: bool) -> tuple[list[Tensor], Tensor]:
    """Random captions with an end token, and the same filled up with it as one array."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.cat([torch.randint(EOS, (n - 1,), generator=generator), torch.tensor([EOS])]) for n in LENGTHS]
    table = torch.stack([torch.nn.functional.pad(text, (0, POSITIONS - len(text)), value=EOS) for text in texts])
    return (list(table) if padded else texts), table


def text_rows(texts: list[Tensor]) -> dict[str, Tensor]:
    """Two captions a row."""
    rows = [torch.cat(texts[at : at + 2]) for at in range(0, len(texts), 2)]
    documents = [
        torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts[at : at + 2])])
        for at in range(0, len(texts), 2)
    ]
    positions = [torch.cat([torch.arange(len(text)) for text in texts[at : at + 2]]) for at in (0, 2)]

    def stacked(parts: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    return {
        "tokens": stacked(rows, 0), "positions": stacked(positions, 0), "documents": stacked(documents, -1)
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_both_towers_equal_transformers(name: str, size: str, dtype: torch.dtype) -> None:
    config, figures = ModelConfig.from_dotted(COMMON | MODELS[name]), LargestErrors()
    both = build_pair(config, dtype, among=[name])
    images = [draw_pixels(*SIZES[size], seed=seed) for seed in range(len(LENGTHS))]
    n_special = config.embedding.n_special_tokens  # type: ignore[union-attr]
    of_images = make_batch(images, SIDE, n_special, [[0, 1], [2, 3]])
    texts, table = captions(padded=name == "SiglipModel")
    batch = {f"encoder_{field}": values for field, values in of_images.items()} | text_rows(texts)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    normalised = torch.stack([(image.double() / 255 - mean) / std for image in images]).to(dtype)
    if name == "CLIPModel":
        both.reference.text_model.eos_token_id = EOS
    expected = both.reference(input_ids=table, pixel_values=normalised, interpolate_pos_encoding=True, return_loss=True)
    features = both.model(**batch).predictions
    logits = features["scale"] * features["images"] @ features["texts"].T + features.get("bias", 0.0)
    figures.compare_logits(logits, expected.logits_per_image, dtype)
    loss = both.model.compare(features)["contrastive"] / len(images)
    figures.compare_losses(loss, expected.loss, both, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 60
    for preset in PRESETS[name]:
        assert_documented(preset, dtype, figures)
