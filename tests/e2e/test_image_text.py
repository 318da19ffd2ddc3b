"""From images with captions to two towers that find them, by the commands that a user types; resumed to the bit."""

import json
from pathlib import Path

from PIL import Image

from tests.support.captioned_images import write_captioned_images
from tests.support.forked_commands import megatfm
from tests.support.training_runs import training_curve

CONFIG = """
name = "towers"
[model]
family = "two_towers"
d_model = 32
n_layers = 2
dropout = 0.1
[model.attention]
n_heads = 2
bias = true
[model.ffn]
d_ff = 64
activation = "gelu"
bias = true
[model.norm]
name = "layer_norm"
[model.embedding]
name = "patches"
patch_size = 4
[model.position]
name = "learned_2d"
grid = [4, 4]
[model.lm_head]
name = "none"
[model.init]
name = "xavier"
[model.text_tower]
d_model = 32
n_layers = 2
n_heads = 2
d_ff = 64
max_positions = 24
[model.contrastive]
width = 16
max_scale = 100.0
[objective]
name = "contrastive"
[data]
train = "corpora/shapes/train"
validation = { shapes = "corpora/shapes/validation" }
tokenizer = "corpora/shapes/tokenizer.model"
sequence_length = 34
target_length = 40
[data.images]
size = 16
crop_pct = 1.0
[optimizer]
name = "adamw"
lr = 4e-3
[lr_schedule]
warmup_steps = 5
[train]
steps = 40
global_batch = 24
micro_batch = 12
precision = "fp32"
[checkpoint]
every = 20
keep = 9
[evaluate]
every = 20
[log]
every = 1
"""


def test_captions_are_prepared_learned_found_and_resumed(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "images", tmp_path / "captions", 400)
    (tmp_path / "towers.toml").write_text(CONFIG)
    log = tmp_path / "log"
    of_text = ["read.folder=captions", "tokenizer.vocab_size=340", "out=corpora/captions"]
    megatfm("prep", "quickstart-data", *of_text, output=log, cwd=tmp_path)
    of_images = [
        "read.folder=images",
        "tokenizer.file=corpora/captions/tokenizer.model",
        "out=corpora/shapes",
    ]
    of_images += ["split.validation_files=validation/*"]
    megatfm("prep", "quickstart-vision-data", *of_images, output=log, cwd=tmp_path)

    megatfm("train", "towers.toml", output=log, cwd=tmp_path)
    run = tmp_path / "runs/towers"
    curve = training_curve(run)
    (in_training,) = curve[-1]["evaluation"].values()
    assert in_training["tokens"] == 80  # pairs of the validation set
    assert in_training["metrics"]["top1"] > 0.03  # 1 / 80 by chance
    assert in_training["metrics"]["top5"] > 0.2
    table = megatfm("evaluate", run, output=log, cwd=tmp_path)
    assert "top1" in table
    assert "bits" not in table
    (evaluated,) = json.loads((run / "evaluation.json").read_text())["sets"].values()
    assert evaluated["metrics"] == in_training["metrics"]
    drawn = megatfm(
        "data", "show", "corpora/shapes/train", "--config", "towers.toml", "--images", "seen.png", "--count", 6,
        output=log, cwd=tmp_path,
    )  # fmt: skip
    assert "6 images of " in drawn
    with Image.open(tmp_path / "seen.png") as sheet:
        assert sheet.size == (6 * 134 + 6, 152 + 6)
    # The last half again, from the checkpoint of the first.
    for path in (run / "checkpoints").glob("step-00000040*"):
        path.rename(tmp_path / "away")
    megatfm("train", "towers.toml", output=log, cwd=tmp_path)
    again = {line["step"]: line["loss"] for line in training_curve(run)}
    assert [again[line["step"]] for line in curve] == [line["loss"] for line in curve]
