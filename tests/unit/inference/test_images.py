"""Images at inference: pictures of reconstructions, attention rollout, confusion counts and surest mistakes."""

import io
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.vit import modeling_vit

from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, TrainConfig, load_config
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.batched_generation import generate_each
from megatfm.inference.decoding import Sampling
from megatfm.inference.image_evaluation import ClassCollector, collect_classes, make_image_evaluation
from megatfm.inference.pictures import (
    Gallery,
    Picture,
    compute_rollout,
    join_panels,
    make_reconstruction_gallery,
    make_rollout_gallery,
    record_attention,
    shade,
    write_pictures,
)
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import TextModel, generate_text, generate_text_beam
from megatfm.models import build
from megatfm.objectives import SpecialTokens, build_objective
from megatfm.tokenizers import SentencePieceTokenizer
from tests.support.image_text_models import LLAVA
from tests.support.images import cut_patches, draw_pixels, encode_noise, make_batch, make_masked_batch
from tests.support.reference_gradients import build_pair, cast_to_float64, perturb
from tests.support.small_runs import random_model
from tests.support.workers import Workers

SIDE = 4
MODEL = {
    "family": "masked_autoencoder", "d_model": 16, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 16,
    "ffn.activation": "gelu", "norm.name": "layer_norm", "position.name": "sinusoidal_2d",
    "embedding.name": "patches", "embedding.patch_size": SIDE, "embedding.mean": (0.5, 0.4, 0.3),
    "embedding.std": (0.2, 0.3, 0.4), "lm_head.name": "none",
    "pixel_decoder": {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8},
}  # fmt: skip
CLASSIFIER = {
    **{key: value for key, value in MODEL.items() if key != "pixel_decoder"},
    "family": "encoder",
    "extra_heads.classifier.n_classes": 3,
}


def run_config(model: ModelConfig) -> SimpleNamespace:
    return SimpleNamespace(model=model, objective=SimpleNamespace(name="masked_image"))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_perfect_model_gives_the_image_back(normalize: bool) -> None:
    """Targets computed here by hand; two images in a row, one of a single colour."""
    images = [draw_pixels(8, 8, seed=1), torch.full((3, 8, 8), 77, dtype=torch.uint8)]
    batch = make_masked_batch(images, SIDE, 1, [[0, 1]], [[2], [0]], (4, 10))
    mean, std = (torch.tensor(MODEL[f"embedding.{key}"], dtype=torch.float64)[:, None, None] for key in ("mean", "std"))
    targets = []
    for image in images:
        patches = cut_patches((image.double() / 255 - mean) / std, SIDE)
        if normalize:
            centred = patches - patches.mean(1, keepdim=True)
            patches = centred / (centred.square().sum(1, keepdim=True) / (3 * SIDE**2 - 1) + 1e-6).sqrt()
        targets.append(torch.cat([torch.zeros(1, 3 * SIDE**2), patches]))

    def perfect(**fields: Tensor) -> SimpleNamespace:
        assert "patches" not in fields
        return SimpleNamespace(logits=torch.cat(targets)[None])

    config = run_config(
        ModelConfig.from_dotted(MODEL | {"pixel_decoder": {**MODEL["pixel_decoder"], "normalize_targets": normalize}})  # type: ignore[dict-item]
    )  # fmt: skip
    gallery = make_reconstruction_gallery(perfect, config, [batch], torch.device("cpu"))  # type: ignore[arg-type]
    assert ("mean and deviation" in gallery.note) == normalize
    for image, picture, visible in zip(images, gallery.pictures, (2, 0), strict=True):
        masked, filled, original = picture.panels
        expected = image.permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(original, expected)
        np.testing.assert_array_equal(filled, expected)
        for number in range(4):
            y, x = divmod(number, 2)
            square = np.s_[y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE]
            assert (masked[square] == (expected[square] if number == visible else 128)).all()


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_rollout_of_two_images_of_a_row(pool: str) -> None:
    names, images = ["grün", "猫"], [draw_pixels(8, 8, seed=1), draw_pixels(12, 4, seed=2)]
    config = ModelConfig.from_dotted(CLASSIFIER | {"extra_heads.classifier.pool": pool})
    model = build(config).double().eval()
    perturb(model)
    for layer in model.encoder.layers.values():  # type: ignore[operator, union-attr]
        torch.nn.init.zeros_(layer.attn.wk.weight)
    for parameter in model.classifier.parameters():  # type: ignore[union-attr]
        torch.nn.init.zeros_(parameter)
    batch = make_batch(images, SIDE, 1, [[0, 1]], labels=[1, 2], row_length=12)
    with torch.no_grad():
        gallery = make_rollout_gallery(model, run_config(config), [batch], torch.device("cpu"), names)  # type: ignore[arg-type]
    captions = [picture.caption for picture in gallery.pictures]
    assert captions == ["label 猫, predicted grün (0.33)", "label 2, predicted grün (0.33)"]
    for image, picture in zip(images, gallery.pictures, strict=True):
        for panel in picture.panels:
            np.testing.assert_array_equal(panel, image.permute(1, 2, 0).numpy())


def test_shade_follows_the_weights() -> None:
    image = np.full((8, 8, 3), 200, np.uint8)
    shaded = shade(image, np.array([[1.0, 0.0], [0.0, 0.0]]))
    assert shaded[0, 0, 0] == 200
    assert shaded[-1, -1, 0] == 0
    assert (shade(image, np.zeros((2, 2))) == 0).all()


def test_files_and_index(tmp_path: Path) -> None:
    panels = [draw_pixels(5, 3, seed=1).permute(1, 2, 0).numpy(), np.zeros((600, 300, 1), np.uint8)]
    count = write_pictures(tmp_path, 3, [Gallery("a", "A", "n", [Picture(panels, "é")] * 2)])
    assert count == 2
    index = json.loads((tmp_path / "pictures.json").read_text())
    assert index["step"] == 3
    assert [entry["file"] for entry in index["galleries"][0]["pictures"]] == ["pictures/a-00.png", "pictures/a-01.png"]
    (tmp_path / "full").write_text("a file in the place of the run")
    with pytest.raises(MegatfmError, match=r"full/pictures/a-00\.png: Not a directory"):
        write_pictures(tmp_path / "full", 3, [Gallery("a", "A", "n", [Picture(panels, "")])])
    with pytest.raises(MegatfmError, match=r"full/pictures\.json: Not a directory"):
        write_pictures(tmp_path / "full", 3, [])
    with Image.open(tmp_path / "pictures/a-01.png") as picture:
        assert picture.size == (3 * 23 + 4 + 112, 224)
    with Image.open(io.BytesIO(join_panels(panels[:1]))) as picture:
        enlarged = np.asarray(picture)[::23, ::23, :3]
    np.testing.assert_array_equal(enlarged, panels[0])


CLASSES, IMAGES = 4, 11
SIZES = [(4 + 4 * (number % 3), 8 - 4 * (number % 2)) for number in range(IMAGES)]


def examples() -> tuple[torch.nn.Module, list[torch.Tensor], list[int]]:
    """A model of random weights, images of several shapes, and labels."""
    torch.manual_seed(5)
    model = build(ModelConfig.from_dotted(CLASSIFIER | {"extra_heads.classifier.n_classes": CLASSES})).double().eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    images = [draw_pixels(*size, seed=number) for number, size in enumerate(SIZES)]
    return model, images, [number * 7 % CLASSES for number in range(IMAGES)]


def collected(rank: int, ranks: int, n_mistakes: int) -> tuple[list[list[int]], list[Any]]:
    """A rank's result after it evaluated its share, in rows of two images; one image is in quarantine."""
    model, images, labels = examples()
    labels[3] = -100
    with torch.no_grad(), collect_classes(model, SIDE, n_mistakes) as collector:
        for first in range(2 * rank, IMAGES, 2 * ranks):
            numbers = list(range(first, min(first + 2, IMAGES)))
            model(**make_batch(images, SIDE, 1, [numbers], labels=labels, row_length=20))
    assert all(getattr(module, "on_classes", None) is None for module in model.modules())
    return collector.gather()


def on_ranks(n_mistakes: int) -> tuple[list[list[int]], list[Any]]:
    """Run inside a process group."""
    return collected(torch.distributed.get_rank(), torch.distributed.get_world_size(), n_mistakes)


def expected_predictions() -> dict[int, tuple[int, int, float]]:
    """Image → label, predicted class and its probability, each image alone in a row."""
    model, images, labels = examples()
    predictions = {}
    for number in set(range(IMAGES)) - {3}:
        with torch.no_grad():
            logits = model(**make_batch([images[number]], SIDE, 1, [[0]])).predictions["classifier"][0].tolist()
        powers = [math.exp(value - max(logits)) for value in logits]
        best = max(range(CLASSES), key=lambda c: powers[c])
        predictions[number] = labels[number], best, powers[best] / sum(powers)
    return predictions


def test_counts_and_mistakes_of_one_rank() -> None:
    counts, mistakes = collected(0, 1, 3)
    expected = expected_predictions()
    pairs = Counter((label, predicted) for label, predicted, _ in expected.values())
    assert sorted(map(tuple, counts)) == sorted((*pair, count) for pair, count in pairs.items())
    wrong = {number: entry for number, entry in expected.items() if entry[0] != entry[1]}
    surest = sorted(wrong, key=lambda number: -wrong[number][2])[:3]
    assert len(mistakes) == len(surest) == 3
    _, images, _ = examples()
    for mistake, number in zip(mistakes, surest, strict=True):
        assert (mistake.label, mistake.predicted) == wrong[number][:2]
        assert mistake.probability == pytest.approx(wrong[number][2])
        np.testing.assert_array_equal(mistake.pixels, images[number].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_agree_with_one(ranks: int, workers: Workers) -> None:
    """Some of 5 ranks with rows of two images have one row, the last but one image."""
    counts, mistakes = collected(0, 1, 4)
    for result in workers.run(on_ranks, ranks, 4):
        assert result[0] == counts
        assert [entry[:3] for entry in result[1]] == [entry[:3] for entry in mistakes]


def test_equally_sure_mistakes_of_batches_of_several_sizes() -> None:
    """All are kept. Probabilities of 1 are frequent, and images may be in a set twice."""
    collector = ClassCollector(SIDE, 7)
    images = [draw_pixels(8, 8, seed=number) for number in range(7)]
    for numbers in ([0, 1, 2, 3], [4, 5], [6]):
        batch = make_batch([images[number] for number in numbers], SIDE, 1, [list(range(len(numbers)))], labels=[1] * 4)
        collector.remember_batch(torch.nn.Identity(), (), batch)
        collector.add(torch.tensor([[99.0, 0.0]] * len(numbers)), torch.ones(len(numbers), dtype=torch.int64))
    counts, mistakes = collector.gather()
    assert counts == [[1, 0, 7]]
    images_of_mistakes = {mistake.pixels.tobytes() for mistake in mistakes}
    assert images_of_mistakes == {image.permute(1, 2, 0).numpy().tobytes() for image in images}


def test_nothing_evaluated() -> None:
    model, *_ = examples()
    with collect_classes(model, SIDE) as collector:
        pass
    assert collector.gather() == ([], [])


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
THREE_LAYERS = ModelConfig.from_dotted(
    {"family": "encoder", "d_model": 24, "n_layers": 3, "attention.n_heads": 3, "attention.bias": True,
     "ffn.d_ff": 48, "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm", "norm.eps": 1e-6,
     "embedding.name": "patches", "embedding.patch_size": SIDE, "embedding.mean": MEAN, "embedding.std": STD,
     "position.name": "learned_2d", "position.grid": (4, 4), "lm_head.name": "none",
     "extra_heads.classifier.n_classes": 5},
)  # fmt: skip


def product(attentions: Any) -> NDArray[np.float64]:
    """Rollout [n, T, T] of attentions [n, N, T, T] by the paper's recursion, an image and a layer at a time."""
    images = []
    for number in range(len(attentions[0])):
        reached = None
        for layer in attentions:
            mean = layer[number].double().numpy().mean(axis=0)
            mixed = 0.5 * mean + 0.5 * np.eye(len(mean))
            mixed /= mixed.sum(axis=1, keepdims=True)
            reached = mixed if reached is None else np.matmul(mixed, reached)
        images.append(reached)
    return np.stack(images)  # type: ignore[arg-type]


def recorded(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Rollout, and the logits of the same pass."""
    with torch.no_grad(), record_attention(model) as maps:
        output = model(**batch)
    return compute_rollout(maps), output.predictions["classifier"]


def test_transformers_attention() -> None:
    """Two images share a row, whose tokens don't reach one another; recording changes no output."""
    pair = build_pair(THREE_LAYERS, torch.float64, among=["ViTForImageClassification"])
    images = [draw_pixels(16, 16, seed=seed) for seed in range(3)]
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    values = torch.stack([(image.double() / 255 - mean) / std for image in images])
    with torch.no_grad(), cast_to_float64(torch.float64, modeling_vit):
        expected = pair.reference(pixel_values=values, output_attentions=True)
    expected_rollout = product(expected.attentions)
    reached, logits = recorded(pair.model, make_batch(images, SIDE, 1, [[0, 1], [2]]))
    for number, (row, begin) in enumerate([(0, 0), (0, 17), (1, 0)]):
        block = reached[row, begin : begin + 17]
        rollout = torch.from_numpy(expected_rollout[number])
        torch.testing.assert_close(block[:, begin : begin + 17], rollout, rtol=1e-9, atol=1e-11)
        assert block.sum(-1) == pytest.approx(torch.ones(17).tolist())
    assert (reached[0, :17, 17:] == 0).all()
    torch.testing.assert_close(logits, expected.logits, rtol=1e-9, atol=1e-10)
    assert all(not module._forward_pre_hooks for module in pair.model.modules())


def test_one_layer_without_attention_reaches_itself() -> None:
    """Nothing moves under A = I; half stays under uniform attention."""
    torch.testing.assert_close(compute_rollout([torch.eye(3)[None]]), torch.eye(3)[None])
    uniform = torch.full((1, 4, 4), 0.25)
    torch.testing.assert_close(compute_rollout([uniform]), 0.5 * torch.eye(4)[None] + 0.125)


def test_layers_that_see_parts_are_refused() -> None:
    """A Swin transformer, whose maps shrink from stage to stage."""
    config = ModelConfig.from_dotted(
        {"family": "hierarchical", "d_model": 8, "stages": {"n_layers": [1, 1], "n_heads": [1, 2], "grid": [3, 3]},
         "attention": {"name": "windowed", "pattern": {"name": "windows_2d", "window": 2}},
         "position.name": "relative_2d", "ffn.d_ff": 16, "ffn.activation": "gelu", "norm.name": "layer_norm",
         "embedding": {"name": "patches", "patch_size": SIDE, "n_class_tokens": 0}, "lm_head.name": "none"},
    )  # fmt: skip
    message = r"'hierarchical' with model\.attention\.name = 'windowed'"
    with pytest.raises(UsageError, match=message), record_attention(build(config)):
        pytest.fail("should have refused")


@pytest.mark.parametrize(("preset", "reason"), [
    ("clip-b32", "'contrastive' has no pictures"),
    ("llava-1.5-7b", "'image_to_text' has no pictures"),
    ("quickstart", "'causal' reads no images"),
])  # fmt: skip
def test_pictures_of_a_run_that_has_none_are_refused(preset: str, reason: str) -> None:
    engine: Any = SimpleNamespace(model=None)
    with pytest.raises(UsageError, match=f"--images: objective.name = {reason}.*: leave it out"):
        make_image_evaluation(load_config(preset, ["data.tokenizer=t"]), engine, 3)


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
    options = PromptOptions(images=images)
    assert generate_text_beam(loaded, "import", 8, 1, 0.6, options) == texts[0, 1, 2][0]
    questions = ["import", "def f(x):", "import"]
    alone = [generate_text(loaded, question, greedy, 8, 1, options)[0] for question in questions]
    assert generate_each(loaded, questions, greedy, 8, options) == alone


def test_a_prompt_names_all_of_its_images_or_none(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded, images = make_text_model(tokenizer_model, "in_text"), write_images(tmp_path)
    with pytest.raises(UsageError, match=r"the prompt names 1 images .* the number of images .* is 3: name each once"):
        build_prompts(loaded, f"import {PLACE}", PromptOptions(images=images))
    with pytest.raises(UsageError, match=r"gone\.png: there is no such image"):
        build_prompts(loaded, "import", PromptOptions(images=[*images, tmp_path / "gone.png"]))
