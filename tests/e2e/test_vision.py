"""From images to an evaluated classifier, by the commands that a user types; resumed to the bit."""

import json
import math
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.forked_commands import ForkedCommand, keep_last_override, run_megatfm
from tests.support.images import COLOURS, SHAPES, encode_image, write_captioned_images
from tests.support.training_runs import assert_bitwise_equal, training_curve

SMALL = [
    "train.steps=24", "lr_schedule.warmup_steps=2", "model.n_layers=2", "model.d_model=32", "model.ffn.d_ff=64",
    "train.precision=fp32", "log.every=1", "data.images.mixup=0.4", "checkpoint.every=12", "checkpoint.keep=9",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of corpora that holds the quickstart's."""
    folder = tmp_path_factory.mktemp("digits")
    assert "1,198" in run_megatfm("prep", "quickstart-vision-data", output=folder / "output", cwd=folder)
    return folder / "corpora"


def test_digits_are_prepared_learned_evaluated_and_drawn(tmp_path: Path, corpora: Path) -> None:
    output = tmp_path / "output"
    (tmp_path / "corpora").symlink_to(corpora)
    run_megatfm("train", "quickstart-vision", *SMALL, output=output, cwd=tmp_path)
    run = tmp_path / "runs/quickstart-vision"
    curve = training_curve(run)
    assert curve[-1]["loss"] < curve[0]["loss"]
    in_training = curve[-1]["evaluation"]["validation"]
    table = run_megatfm("evaluate", run, "--images", 3, output=output, cwd=tmp_path)
    assert "top1" in table
    assert "bits" not in table
    evaluated = json.loads((run / "evaluation.json").read_text())["sets"]["validation"]
    assert evaluated["metrics"] == pytest.approx(in_training["metrics"], abs=1 / 599)
    assert 0.1 < evaluated["metrics"]["top1"] < evaluated["metrics"]["top5"] <= 1
    assert evaluated["tokens"] == 599
    counts = np.array(json.loads((run / "confusion.json").read_text())["sets"]["validation"]["counts"])
    assert counts[:, 2].sum() == 599
    count_topk_correct = counts[counts[:, 0] == counts[:, 1], 2].sum()
    assert count_topk_correct / 599 == pytest.approx(evaluated["metrics"]["top1"])
    galleries = json.loads((run / "pictures.json").read_text())["galleries"]
    assert [len(gallery["pictures"]) for gallery in galleries] == [3, 3]
    assert [gallery["title"] for gallery in galleries] == ["Attention rollout", "Surest mistakes, validation"]
    run_megatfm("report", run, output=output, cwd=tmp_path)
    page = (run / "report.html").read_text()
    assert "Top-5 accuracy" in page
    assert "Confusion matrix" in page
    assert page.count("data:image/png") == 6
    drawn = run_megatfm(
        "data", "show", "corpora/quickstart-vision/train", "--config", "quickstart-vision", "--images", "seen.png",
        "--count", 10, output=output, cwd=tmp_path,
    )  # fmt: skip
    assert "10 images of 10 rows" in drawn
    with Image.open(tmp_path / "seen.png") as sheet:
        assert sheet.size == (8 * 134 + 6, 2 * 152 + 6)
    # The last half again, from the checkpoint of the first.
    for path in (run / "checkpoints").glob("step-00000024*"):
        path.rename(tmp_path / "away")
    run_megatfm("train", "quickstart-vision", *SMALL, output=output, cwd=tmp_path)
    resumed_losses = {line["step"]: line["loss"] for line in training_curve(run)}
    assert [resumed_losses[line["step"]] for line in curve] == [line["loss"] for line in curve]


@pytest.mark.slow
def test_killed_training_resumes_to_the_bit(tmp_path: Path, corpora: Path) -> None:
    """Two ranks with worker processes, augmentation, mixed images and averaged weights; all are killed at once."""
    output = tmp_path / "output"
    (tmp_path / "corpora").symlink_to(corpora)
    shorter = keep_last_override([*SMALL, "train.steps=12", "checkpoint.every=3"])
    words = [
        "quickstart-vision", "--nproc", 2, *shorter, "train.micro_batch=32", "data.workers=2",
        'data.images.transforms=[{name = "rand_augment", n_ops = 2, magnitude = 9.0}]', "data.images.cutmix=1.0",
        'optimizer={name = "adamw", lr = 5e-3, ema_decay = 0.9}',
    ]  # fmt: skip
    run_megatfm("launch", *words, "run_dir=whole", output=output, cwd=tmp_path)
    command = ForkedCommand(["launch", *words, "run_dir=killed"], output, tmp_path)
    try:
        command.wait_for_lines(tmp_path / "killed/metrics.jsonl", 7)  # the save of step 6 began after that of step 3
        processes = psutil.Process(command.pid).children(recursive=True)
        assert len(processes) >= 2 + 2 * 2, "ranks and their workers"
        for process in processes:
            process.kill()
    finally:
        command.end()
    saved = {path.name for path in (tmp_path / "killed/checkpoints").glob("step-*")}
    assert {"step-00000003"} <= saved < {f"step-{step:08}" for step in (3, 6, 9, 12)}
    run_megatfm("launch", *words, "run_dir=killed", output=output, cwd=tmp_path)
    assert_bitwise_equal(tmp_path / "whole", tmp_path / "killed", ("exp_avg", "exp_avg_sq", "ema"))


def test_a_folder_of_classes_of_any_shape(tmp_path: Path) -> None:
    """Native resolution, on a corpus whose labels are the names of folders."""
    for number in range(60):
        pixels = np.random.default_rng(number).integers(0, 256, (9 + number % 13, 24 - number % 11, 3), np.uint8)
        pixels[..., 1] //= 1 + 15 * (number % 2)
        path = tmp_path / "photos" / ("grün", "purpur")[number % 2] / f"{number}.webp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_image(pixels, "WEBP", lossless=True))
    output_file = tmp_path / "output_file"
    words = ["read.folder=photos", "read.labels.by=folder", "split.validation_files=", "split.validation=0.3"]
    run_megatfm("prep", "quickstart-vision-data", *words, "out=corpora/photos", output=output_file, cwd=tmp_path)
    (tmp_path / "photos.toml").write_text(
        """
        extends = "quickstart-vision"
        [model]
        embedding = { patch_size = 4, channels = 3, mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }
        extra_heads = { classifier = { n_classes = 2, pool = "mean" } }
        [data]
        train = "corpora/photos/train"
        validation = { photos = "corpora/photos/validation" }
        sequence_length = 48
        images = { max_patches = 16, transforms = ["horizontal_flip", "random_erasing"] }
        """
    )
    shape = [word for word in SMALL if "mixup" not in word] + ["train.global_batch=8", "train.micro_batch=4"]
    output = run_megatfm("train", "photos.toml", *shape, "run_dir=run", output=output_file, cwd=tmp_path)
    assert "Traceback" not in output
    result = training_curve(tmp_path / "run")[-1]["evaluation"]["photos"]
    assert result["metrics"]["top1"] > 0.8
    assert result["tokens"] > result["rows"]  # images, of which rows hold several


MAE = [
    "model.family=masked_autoencoder", 'model.position={name="sinusoidal_2d"}', "model.extra_heads={}",
    "model.pixel_decoder={d_model=16,n_layers=1,n_heads=2,d_ff=32}", 'objective={name="masked_image"}',
    "data.sequence_length=4", "data.target_length=16",
]  # fmt: skip
SIMMIM = [
    "model.family=hierarchical", "model.stages={n_layers=[1,1],n_heads=[2,4],grid=[4,4]}", "model.embedding.norm=true",
    'model.attention={name="windowed",pattern={name="windows_2d",window=2}}', 'model.position={name="relative_2d"}',
    "model.embedding.mask_token=true", "model.extra_heads={pixels={name='pixels',stride=4}}",
    'objective={name="simmim",mask_size=2,mask_ratio=0.75}',
]  # fmt: skip


@pytest.mark.parametrize("words", [MAE, SIMMIM], ids=["mae", "simmim"])
def test_models_of_masked_images_show_what_they_reconstruct(words: list[str], tmp_path: Path, corpora: Path) -> None:
    """Rows that an image fills."""
    output_file, run = tmp_path / "output_file", tmp_path / "runs/mae"
    (tmp_path / "corpora").symlink_to(corpora)
    small = [word for word in SMALL if "mixup" not in word]
    run_megatfm("train", "quickstart-vision", "name=mae", *small, *words, output=output_file, cwd=tmp_path)
    curve = training_curve(run)
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    run_megatfm("evaluate", run, "--images", 2, output=output_file, cwd=tmp_path)
    (gallery,) = json.loads((run / "pictures.json").read_text())["galleries"]
    assert not (run / "confusion.json").exists()
    with Image.open(run / gallery["pictures"][1]["file"]) as picture:
        assert picture.size == (3 * 112 + 2 * 4, 112)
        grey = np.asarray(picture.convert("RGBA"))[..., 0].astype(int)
    masked, filled, original = (grey[:, x : x + 112] for x in (0, 116, 232))
    squares = [(slice(y, y + 28), slice(x, x + 28)) for y in range(0, 112, 28) for x in range(0, 112, 28)]
    visible = [square for square in squares if not (masked[square] == 128).all()]
    assert len(visible) == 4
    for square in visible:
        np.testing.assert_array_equal(masked[square], original[square])
        np.testing.assert_array_equal(filled[square], original[square])
    assert (filled != original).any()
    run_megatfm("report", run, output=output_file, cwd=tmp_path)
    assert "error of masked pixels" in (run / "report.html").read_text()


SHARED = """
optimizer = { name = "adamw", lr = 4e-3 }
lr_schedule = { warmup_steps = 5 }
data.train = "corpora/shapes/train"
data.validation = { shapes = "corpora/shapes/validation" }
data.tokenizer = "corpora/shapes/tokenizer.model"
data.sequence_length = 34
data.images = { size = 16, crop_pct = 1.0 }
"""
"""Keys of both configs below."""
CONFIG = """
name = "towers"
data.target_length = 40
objective = { name = "contrastive" }
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
"""


CAPTIONER = """
name = "captioner"
data.target_length = 80
objective = { name = "image_to_text" }
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
    (folder / "captioner.toml").write_text(SHARED + CAPTIONER)
    run_megatfm("train", "captioner.toml", output=folder / "log", cwd=folder)
    (evaluation,) = training_curve(folder / "runs/captioner")[-1]["evaluation"].values()
    assert evaluation["loss"] < 0.05
    assert evaluation["loss"] < 0.5 * compute_loss_of_text_alone(folder / "images/validation", evaluation["tokens"])
    assert sum(describe_images(folder, 5)) >= 4


def test_a_captioner_trains_on_two_ranks_as_on_one_and_resumes_to_the_bit(folder: Path) -> None:
    log, run = folder / "log", folder / "runs/captioner"
    (folder / "captioner.toml").write_text(SHARED + CAPTIONER)
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
    (folder / "towers.toml").write_text(SHARED + CONFIG)
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
