"""From images with captions to two towers that find them, by the commands that a user types; resumed to the bit."""

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from tests.support.forked_commands import run_megatfm
from tests.support.images import COLOURS, SHAPES, write_captioned_images
from tests.support.training_runs import training_curve

CONFIG = """
name = "towers"
objective = { name = "contrastive" }
optimizer = { name = "adamw", lr = 4e-3 }
lr_schedule = { warmup_steps = 5 }
train = { steps = 40, global_batch = 24, micro_batch = 12, precision = "fp32" }
checkpoint = { every = 20, keep = 9 }
evaluate = { every = 20 }
log = { every = 1 }
[model]
family = "two_towers"
d_model = 32
n_layers = 2
dropout = 0.1
attention = { n_heads = 2, bias = true }
ffn = { d_ff = 64, activation = "gelu", bias = true }
norm = { name = "layer_norm" }
embedding = { name = "patches", patch_size = 4 }
position = { name = "learned_2d", grid = [4, 4] }
lm_head = { name = "none" }
init = { name = "xavier" }
text_tower = { d_model = 32, n_layers = 2, n_heads = 2, d_ff = 64, max_positions = 24 }
contrastive = { width = 16, max_scale = 100.0 }
[data]
train = "corpora/shapes/train"
validation = { shapes = "corpora/shapes/validation" }
tokenizer = "corpora/shapes/tokenizer.model"
sequence_length = 34
target_length = 40
images = { size = 16, crop_pct = 1.0 }
"""


CAPTIONER = """
name = "captioner"
objective = { name = "image_to_text" }
optimizer = { name = "adamw", lr = 4e-3 }
lr_schedule = { warmup_steps = 5 }
train = { steps = 240, global_batch = 24, micro_batch = 12, precision = "fp32" }
checkpoint = { every = 30, keep = 9 }
evaluate = { every = 120 }
[model]
family = "vision_language"
d_model = 64
n_layers = 2
attention = { n_heads = 4 }
ffn = { d_ff = 128 }
connector = { image_token_id = 339 }
[model.vision_tower]
d_model = 32
n_layers = 2
n_heads = 4
d_ff = 64
activation = "gelu"
grid = [4, 4]
embedding = { name = "patches", patch_size = 4, bias = false, norm = true }
[data]
train = "corpora/shapes/train"
validation = { shapes = "corpora/shapes/validation" }
tokenizer = "corpora/shapes/tokenizer.model"
sequence_length = 34
target_length = 80
images = { size = 16, crop_pct = 1.0 }
"""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images and captions, and of a tokenizer and two corpora of them."""
    folder = tmp_path_factory.mktemp("shapes")
    log = folder / "log"
    write_captioned_images(folder / "images", folder / "captions", 400)
    of_text = ["read.folder=captions", "tokenizer.vocab_size=340", "out=corpora/captions"]
    run_megatfm("prep", "quickstart-data", *of_text, output=log, cwd=folder)
    of_images = ["read.folder=images", "tokenizer.file=corpora/captions/tokenizer.model", "out=corpora/shapes"]
    of_images += ["split.validation_files=validation/*"]
    run_megatfm("prep", "quickstart-vision-data", *of_images, output=log, cwd=folder)
    return folder


@pytest.fixture
def folder(shapes: Path, tmp_path: Path) -> Path:
    """A folder of the test's own, with these corpora and images."""
    for name in ("corpora", "images"):
        (tmp_path / name).symlink_to(shapes / name)
    return tmp_path


def compute_loss_of_text_alone(images: Path, n_tokens: int) -> float:
    """The lowest mean loss that a model can expect which sees no images.

    Two shapes and two colours are drawn alike and apart, so a caption has (colours × shapes)² equally likely forms; it
    needs the logarithm of their number in nats, however well its other tokens are predicted.
    """
    n_captions = len(list(images.glob("*.txt")))
    return n_captions * 2 * math.log(len(COLOURS) * len(SHAPES)) / n_tokens


def describe_images(folder: Path, count: int) -> list[bool]:
    """Let the run describe images that it never saw; returns whether each description is right."""
    right = []
    for image in sorted((folder / "images/validation").glob("*.png"))[:count]:
        words = ["--image", image, "--temperature", "0", "--max-tokens", "40"]
        text = run_megatfm("generate", folder / "runs/captioner", *words, output=folder / "log", cwd=folder)
        right.append(image.with_suffix(".txt").read_text().strip() in text)
    return right


@pytest.mark.extended  # that it trains, goes on and generates is below, and its gradients are in tests/parity
def test_images_are_described(folder: Path) -> None:
    """A vision-language model describes images that it never saw."""
    (folder / "captioner.toml").write_text(CAPTIONER)
    run_megatfm("train", "captioner.toml", output=folder / "log", cwd=folder)
    (evaluation,) = training_curve(folder / "runs/captioner")[-1]["evaluation"].values()
    assert evaluation["loss"] < 0.05
    assert evaluation["loss"] < 0.5 * compute_loss_of_text_alone(folder / "images/validation", evaluation["tokens"])
    assert sum(describe_images(folder, 5)) >= 4


def test_a_captioner_trains_on_two_ranks_as_on_one_and_resumes_to_the_bit(folder: Path) -> None:
    log, run = folder / "log", folder / "runs/captioner"
    (folder / "captioner.toml").write_text(CAPTIONER)
    words = ["captioner.toml", "train.steps=20", "checkpoint.every=10"]
    run_megatfm("train", *words, output=log, cwd=folder)
    curve = training_curve(run)
    assert curve[-1]["loss"] < 0.7 * curve[0]["loss"]
    describe_images(folder, 1)
    for path in (run / "checkpoints").glob("step-00000020*"):
        path.rename(folder / "away")
    run_megatfm("train", *words, output=log, cwd=folder)
    resumed_losses = {line["step"]: line["loss"] for line in training_curve(run)}
    assert [resumed_losses[line["step"]] for line in curve] == [line["loss"] for line in curve]
    run_megatfm("launch", "captioner.toml", "--nproc", "2", "name=two", "train.steps=6", output=log, cwd=folder)
    on_two_ranks = training_curve(folder / "runs/two")[:5]  # while the learning rate still rises alike
    for line, alone in zip(on_two_ranks, curve[:5], strict=True):
        assert abs(line["loss"] - alone["loss"]) < 1e-4 * alone["loss"]


def test_captions_are_prepared_learned_found_and_resumed(folder: Path) -> None:
    log = folder / "log"
    (folder / "towers.toml").write_text(CONFIG)
    run_megatfm("train", "towers.toml", output=log, cwd=folder)
    run = folder / "runs/towers"
    curve = training_curve(run)
    (in_training,) = curve[-1]["evaluation"].values()
    assert in_training["tokens"] == 80  # pairs of the validation set
    assert in_training["metrics"]["top1"] > 0.03  # 1 / 80 by chance
    assert in_training["metrics"]["top5"] > 0.2
    table = run_megatfm("evaluate", run, output=log, cwd=folder)
    assert "top1" in table
    assert "bits" not in table
    (evaluated,) = json.loads((run / "evaluation.json").read_text())["sets"].values()
    assert evaluated["metrics"] == in_training["metrics"]
    drawn = run_megatfm(
        "data", "show", "corpora/shapes/train", "--config", "towers.toml", "--images", "seen.png", "--count", 6,
        output=log, cwd=folder,
    )  # fmt: skip
    assert "6 images of " in drawn
    with Image.open(folder / "seen.png") as sheet:
        assert sheet.size == (6 * 134 + 6, 152 + 6)
    # The last half again, from the checkpoint of the first.
    for path in (run / "checkpoints").glob("step-00000040*"):
        path.rename(folder / "away")
    run_megatfm("train", "towers.toml", output=log, cwd=folder)
    resumed_losses = {line["step"]: line["loss"] for line in training_curve(run)}
    assert [resumed_losses[line["step"]] for line in curve] == [line["loss"] for line in curve]
