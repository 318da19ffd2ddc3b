"""LLaVA against transformers, from the same perturbed weights: logits, loss and every gradient; and packed rows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.clip import modeling_clip
from transformers.models.llama import modeling_llama
from transformers.models.llava import modeling_llava
from transformers.models.siglip import modeling_siglip

from megatfm.config import ModelConfig
from tests.support.images import draw_pixels, make_batch
from tests.support.reference_gradients import LargestErrors, assert_documented, build_pair, dtype_fixture

SIDE, IMAGE_TOKEN, GRID = 4, 55, 3
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
LLAVA: dict[str, Any] = {
    "family": "vision_language",
    "vocab_size": 60,
    "d_model": 32,
    "n_layers": 2,
    "attention.n_heads": 4,
    "attention.n_kv_heads": 2,
    "ffn.d_ff": 48,
    "vision_tower": {
        "d_model": 24, "n_layers": 3, "n_heads": 3, "d_ff": 36, "grid": (GRID, GRID),
        "embedding": {"name": "patches", "patch_size": SIDE, "bias": False, "norm": True, "mean": MEAN, "std": STD},
    },
    "connector": {"image_token_id": IMAGE_TOKEN},
}  # fmt: skip
SIGLIP: dict[str, Any] = LLAVA | {
    "vision_tower": LLAVA["vision_tower"]
    | {
        "activation": "gelu_tanh", "norm_eps": 1e-6,
        "embedding": {"name": "patches", "patch_size": SIDE, "n_class_tokens": 0, "mean": MEAN, "std": STD},
    }
}  # fmt: skip
ENCODERS = {"clip": ModelConfig.from_dotted(LLAVA), "siglip": ModelConfig.from_dotted(SIGLIP)}
N_PATCHES = GRID**2
UNUSED = [f"model.vision_tower.post_layernorm.{part}" for part in ("weight", "bias")]
"""The norm of the vector that stands for an image: CLIP's class token, SigLIP's pool."""

dtype = dtype_fixture(modeling_clip, modeling_siglip, modeling_llama, modeling_llava)


def texts() -> list[Tensor]:
    """Texts with the image first, in the middle, and last."""
    generator = torch.Generator().manual_seed(3)
    image = torch.full((N_PATCHES,), IMAGE_TOKEN)
    parts = [(0, 5), (4, 3), (6, 1)]
    return [
        torch.cat([torch.randint(IMAGE_TOKEN, (before,), generator=generator), image,
                   torch.randint(IMAGE_TOKEN, (after,), generator=generator)])
        for before, after in parts
    ]  # fmt: skip


def text_targets(tokens: Tensor) -> Tensor:
    """The next token, where it is text."""
    following = torch.cat([tokens[1:], torch.tensor([-100])])
    return torch.where(following == IMAGE_TOKEN, -100, following)


def packed(images: list[Tensor], rows: list[list[int]], n_special: int = 1) -> dict[str, Tensor]:
    """A batch whose rows hold the samples of these numbers, on both sides."""
    batch = {f"encoder_{field}": values for field, values in make_batch(images, SIDE, n_special, rows).items()}
    all_tokens = texts()
    length = max(sum(len(all_tokens[number]) for number in row) for row in rows) + 2
    batch |= {"tokens": torch.zeros(len(rows), length, dtype=torch.int64)}
    batch |= {"targets": torch.full((len(rows), length), -100), "documents": torch.full((len(rows), length), -1)}
    batch["positions"] = torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        begin = 0
        for document, number in enumerate(row):
            tokens = all_tokens[number]
            place = slice(begin, begin + len(tokens))
            batch["tokens"][index, place], batch["targets"][index, place] = tokens, text_targets(tokens)
            batch["positions"][index, place] = torch.arange(len(tokens))
            batch["documents"][index, place] = document
            begin += len(tokens)
    return batch


def normalised(images: list[Tensor], dtype: torch.dtype) -> Tensor:
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    return torch.stack([(image.double() / 255 - mean) / std for image in images]).to(dtype)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("rows", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0, 1]]], ids=str)
def test_logits_and_gradients(rows: list[list[int]], encoder: str, dtype: torch.dtype) -> None:
    config, figures = ENCODERS[encoder], LargestErrors()
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    images = [draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(3)]
    batch, losses = packed(images, rows, n_special=int(encoder == "clip")), []
    flat = batch["documents"].flatten() >= 0
    targets = batch.pop("targets")
    logits = pair.model(**batch).logits.flatten(0, 1)[flat]
    begin = 0
    for number in (number for row in rows for number in row):
        tokens = texts()[number]
        expected = pair.reference(input_ids=tokens[None], pixel_values=normalised([images[number]], dtype))
        figures.compare_logits(logits[begin : begin + len(tokens)], expected.logits[0], dtype)
        losses.append(torch.nn.functional.cross_entropy(expected.logits[0], text_targets(tokens), reduction="sum"))
        begin += len(tokens)
    loss = pair.model(**batch, targets=targets).losses["causal"]
    figures.compare_losses(loss, torch.stack(losses).sum(), pair, dtype)
    assert figures.logits > 0, "the same code can't be its own oracle"
    assert figures.compared > 50
    assert_documented("llava-1.5-7b", dtype, figures)


def test_a_text_of_two_images(dtype: torch.dtype) -> None:
    """Images don't see one another, and the text sees both."""
    config, figures = ENCODERS["clip"], LargestErrors()
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    images = [draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(2)]
    image = [IMAGE_TOKEN] * N_PATCHES
    tokens = torch.tensor([3, *image, 4, 5, *image, 6])
    side = {f"encoder_{field}": values for field, values in make_batch(images, SIDE, 1, [[0, 1]]).items()}
    expected = pair.reference(input_ids=tokens[None], pixel_values=normalised(images, dtype)).logits
    figures.compare_logits(pair.model(tokens=tokens[None], **side).logits, expected, dtype)
    targets = text_targets(tokens)
    pair.model(tokens=tokens[None], **side, targets=targets[None]).losses["causal"].backward()
    torch.nn.functional.cross_entropy(expected[0], targets, reduction="sum").backward()
    figures.compare_gradients(pair, dtype)


def test_text_alone_is_a_decoder(dtype: torch.dtype) -> None:
    config = ENCODERS["clip"]
    pair = build_pair(config, dtype, among=["LlavaForConditionalGeneration"], unused=UNUSED)
    tokens = torch.arange(1, 9)[None]
    expected = pair.reference(input_ids=tokens).logits
    LargestErrors().compare_logits(pair.model(tokens).logits, expected, dtype)


def test_another_number_of_image_tokens_is_refused() -> None:
    config = ENCODERS["clip"]
    model = build_pair(config, torch.float64, among=["LlavaForConditionalGeneration"], unused=UNUSED).model
    batch = packed([draw_pixels(SIDE * GRID, SIDE * GRID, seed=seed) for seed in range(3)], [[0], [1, 2]])
    batch["tokens"][1, -3] = IMAGE_TOKEN
    with pytest.raises(TypeError, match="row 1 has 19 image tokens and images of 18 patches"):
        model(**batch)
