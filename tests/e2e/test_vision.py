"""From images to an evaluated classifier, by the commands that a user types; resumed to the bit."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.forked_commands import megatfm
from tests.support.training_runs import training_curve

SMALL = [
    "train.steps=24", "lr_schedule.warmup_steps=2", "model.n_layers=2", "model.d_model=32", "model.ffn.d_ff=64",
    "train.precision=fp32", "log.every=1", "data.images.mixup=0.4", "checkpoint.every=12", "checkpoint.keep=9",
]  # fmt: skip


def test_digits_are_prepared_learned_evaluated_and_drawn(tmp_path: Path) -> None:
    output = tmp_path / "said"
    prepared = megatfm("prep", "quickstart-vision-data", output=output, cwd=tmp_path)
    assert "1,198" in prepared
    megatfm("train", "quickstart-vision", *SMALL, output=output, cwd=tmp_path)
    run = tmp_path / "runs/quickstart-vision"
    curve = training_curve(run)
    assert curve[-1]["loss"] < curve[0]["loss"]
    in_training = curve[-1]["evaluation"]["validation"]
    table = megatfm("evaluate", run, output=output, cwd=tmp_path)
    assert "top1" in table
    assert "bits" not in table
    evaluated = json.loads((run / "evaluation.json").read_text())["sets"]["validation"]
    assert evaluated["metrics"] == pytest.approx(in_training["metrics"], abs=1 / 599)
    assert 0.1 < evaluated["metrics"]["top1"] < evaluated["metrics"]["top5"] <= 1
    assert evaluated["tokens"] == 599
    megatfm("report", run, output=output, cwd=tmp_path)
    assert "Top-5 accuracy" in (run / "report.html").read_text()
    drawn = megatfm(
        "data", "show", "corpora/quickstart-vision/train", "--config", "quickstart-vision", "--images", "seen.png",
        "--count", 10, output=output, cwd=tmp_path,
    )  # fmt: skip
    assert "10 images of 10 rows" in drawn
    with Image.open(tmp_path / "seen.png") as sheet:
        assert sheet.size == (8 * 134 + 6, 2 * 152 + 6)
    # The last half again, from the checkpoint of the first.
    for path in (run / "checkpoints").glob("step-00000024*"):
        path.rename(tmp_path / "away")
    megatfm("train", "quickstart-vision", *SMALL, output=output, cwd=tmp_path)
    again = {line["step"]: line["loss"] for line in training_curve(run)}
    assert [again[line["step"]] for line in curve] == [line["loss"] for line in curve]


def test_a_folder_of_classes_of_any_shape(tmp_path: Path) -> None:
    """Native resolution, on a corpus whose labels are the names of folders."""
    for number in range(60):
        pixels = np.random.default_rng(number).integers(
            0, 256, (9 + number % 13, 24 - number % 11, 3), np.uint8
        )
        pixels[..., 1] //= 1 + 15 * (number % 2)
        out, path = io.BytesIO(), tmp_path / "photos" / ("grün", "purpur")[number % 2] / f"{number}.webp"
        Image.fromarray(pixels).save(out, "WEBP", lossless=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())
    said = tmp_path / "said"
    words = ["read.folder=photos", "read.labels.by=folder", "split.validation_files=", "split.validation=0.3"]
    megatfm("prep", "quickstart-vision-data", *words, "out=corpora/photos", output=said, cwd=tmp_path)
    (tmp_path / "photos.toml").write_text(
        """
        extends = "quickstart-vision"
        [model.embedding]
        patch_size = 4
        channels = 3
        mean = [0.5, 0.5, 0.5]
        std = [0.5, 0.5, 0.5]
        [model.extra_heads.classifier]
        n_classes = 2
        pool = "mean"
        [data]
        train = "corpora/photos/train"
        validation = { photos = "corpora/photos/validation" }
        sequence_length = 48
        [data.images]
        max_patches = 16
        transforms = ["horizontal_flip", "random_erasing"]
        """
    )
    shape = [word for word in SMALL if "mixup" not in word] + ["train.global_batch=8", "train.micro_batch=4"]
    output = megatfm("train", "photos.toml", *shape, "run_dir=run", output=said, cwd=tmp_path)
    assert "Traceback" not in output
    result = training_curve(tmp_path / "run")[-1]["evaluation"]["photos"]
    assert result["metrics"]["top1"] > 0.8
    assert result["tokens"] > result["rows"]  # images, of which rows hold several
