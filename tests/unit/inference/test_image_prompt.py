"""A prompt with several images has the tokens and image fields of a training sample of the same images and text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, TrainConfig
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import PackingConfig
from megatfm.errors import UsageError
from megatfm.inference.decoding import Sampling
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import TextModel, generate_text, generate_text_beam
from megatfm.objectives import SpecialTokens, build_objective
from megatfm.tokenizers import SentencePieceTokenizer
from tests.support.images import encode_noise
from tests.support.llava_models import LLAVA
from tests.support.trained_runs import random_model

PLACE, N_IMAGES, LENGTHS = "東京", 3, (20, 64)
"""The text's word for an image, the number of images, and the lengths of both rows."""
TEXTS = {"in_text": f"import {PLACE} text {PLACE}{PLACE} wrap", "before_text": "import textwrap"}


def make_text_model(tokenizer_model: bytes, placement: str) -> TextModel:
    tokenizer = SentencePieceTokenizer(tokenizer_model)
    image_token = int(tokenizer.encode(PLACE)[-1])
    changes = {"vocab_size": 400, "connector": {"image_token_id": image_token}}
    model = ModelConfig.from_dotted(LLAVA | changes)
    data: dict[str, Any] = dict(zip(("sequence_length", "target_length"), LENGTHS, strict=True))
    config = Config(
        name="small", model=model, objective={"name": "image_to_text", "image_placement": placement},
        data=DataConfig(train="nowhere", tokenizer="nowhere", images={"size": 8, "crop_pct": 1.0}, **data),
        optimizer=AdamWConfig(lr=1e-3), train=TrainConfig(steps=30, global_batch=2, micro_batch=2),
    )  # fmt: skip
    return TextModel(random_model(model, torch.float32), tokenizer, config, 0, None)


def write_images(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(N_IMAGES)]
    for number, path in enumerate(paths):
        path.write_bytes(encode_noise(seed=number))
    return paths


@pytest.mark.parametrize("placement", ["before_text", "in_text"])
def test_several_images_stand_as_in_training(placement: str, tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded, images = make_text_model(tokenizer_model, placement), write_images(tmp_path)
    prompts = build_prompts(loaded, TEXTS[placement], PromptOptions(images=images), samples=2)
    config, tokenizer = loaded.config, loaded.tokenizer
    special = SpecialTokens(tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size)
    objective = build_objective(config.objective, config.model, special, LENGTHS, config.data.images)
    files = {f"{number}.png": path.read_bytes() for number, path in enumerate(images)}
    text = np.array(tokenizer.encode(TEXTS[placement]), np.uint16)
    row = pack_in_memory([text], PackingConfig(objective, LENGTHS, 0), members=[files]).build_row(0)
    n_tokens, n_image_tokens = int((row["documents"] == 0).sum()), int((row["encoder_documents"] >= 0).sum())
    assert [tokens.tolist() for tokens in prompts.tokens] == [row["tokens"][:n_tokens].tolist()] * 2
    assert prompts.images is not None
    assert prompts.images.keys() == {name for name in row if name.startswith("encoder_")}
    for name, values in prompts.images.items():
        np.testing.assert_array_equal(values.numpy(), np.stack([row[name][:n_image_tokens]] * 2), name)


def test_every_image_is_seen(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded, images = make_text_model(tokenizer_model, "before_text"), write_images(tmp_path)
    greedy = Sampling(0.0, 0, 1.0, 0, vocab_size=400)
    texts = {
        order: generate_text(loaded, "import", greedy, 8, 1, PromptOptions(images=[images[place] for place in order]))
        for order in [(0, 1, 2), (0, 1), (0, 2)]
    }
    assert len({text for (text,) in texts.values()}) == len(texts)
    assert generate_text_beam(loaded, "import", 8, 1, 0.6, PromptOptions(images=images)) == texts[0, 1, 2][0]


def test_a_prompt_names_all_of_its_images_or_none(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded, images = make_text_model(tokenizer_model, "in_text"), write_images(tmp_path)
    with pytest.raises(UsageError, match=r"the prompt names 1 images .* the number of images .* is 3: name each once"):
        build_prompts(loaded, f"import {PLACE}", PromptOptions(images=images))
    with pytest.raises(UsageError, match=r"gone\.png: there is no such image"):
        build_prompts(loaded, "import", PromptOptions(images=[*images, tmp_path / "gone.png"]))
