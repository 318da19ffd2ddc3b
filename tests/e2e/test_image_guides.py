"""Pages on images, and on images and text: their commands, run in their order in one folder a page."""

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import transformers

from megatfm.config.prep import TokenizerConfig
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from tests.support.documentation import FENCE, ROOT
from tests.support.forked_commands import run_megatfm
from tests.support.images import encode_noise, write_captioned_images
from tests.support.prep_files import write_file
from tests.support.training_runs import training_curve
from tests.support.webdatasets import pack_tar

COMMON = ("train.steps=2", "train.global_batch=4", "train.micro_batch=2", "lr_schedule.warmup_steps=1", "log.every=1")
FEW_STEPS = ("train.steps=6", "lr_schedule.warmup_steps=1", "log.every=1")
NARROW = ("model.d_model=24", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.d_ff=48")
LESS = {
    "train quickstart-vision": FEW_STEPS,
    "train photos.toml": (*COMMON, *NARROW),
    "train vit-b16 --from": COMMON,
    "train vit-b16 name=tuned": (*COMMON, *NARROW),
    "train mae-b16": (
        *COMMON, *NARROW, "model.pixel_decoder={d_model=16,n_layers=1,n_heads=2,d_ff=32}",
    ),
    "train simmim-swin-b": (
        *COMMON, "model.d_model=8", "model.stages={layers=[1,1,1,1],heads=[1,2,4,8],grid=[48,48]}", "model.ffn.d_ff=16",
    ),
    "train clip-b32": COMMON,
    "train towers.toml": FEW_STEPS,
    "train captioner.toml": FEW_STEPS,
    "prep quickstart-data": ("tokenizer.vocab_size=340",),
}  # fmt: skip
"""First words of a command → settings that make it small."""


def commands_of(page: str) -> list[list[str]]:
    """The commands of a page, as words, in their order."""
    blocks = FENCE.findall((ROOT / "docs/guide" / page).read_text(encoding="utf-8"))
    lines = [line for language, _, text in blocks if language == "console" for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("megatfm ")]


def walk(page: str, folder: Path, words_of: Mapping[str, str]) -> list[str]:
    """Write the files of a page and run its commands; returns them. words_of: what stands for a word of the page."""
    for _, title, text in FENCE.findall((ROOT / "docs/guide" / page).read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
    commands = commands_of(page)
    for words in commands:
        line = " ".join(words)
        smaller = [setting for start, settings in LESS.items() if line.startswith(start) for setting in settings]
        run_megatfm(*(words_of.get(word, word) for word in words), *smaller, output=folder / "output", cwd=folder)
    return [" ".join(words) for words in commands]


def encode(number: int, kind: str = "JPEG") -> bytes:
    return encode_noise(40 + number, 44, seed=number, format_=kind)


def test_the_page_on_images(tmp_path: Path) -> None:
    for number in range(16):
        name = f"{'validation' if number % 4 == 3 else 'train'}/{('cat', 'dog')[number // 4 % 2]}/{number}.jpg"
        write_file(tmp_path / "photos" / name, encode(number))
    write_file(tmp_path / "imagenet1k/000.tar", pack_tar({"a.jpg": encode(0), "a.cls": b"3"}))
    write_file(tmp_path / "laion/000.tar", pack_tar({"a.png": encode(0, "PNG"), "a.json": b'{"label": "dog"}'}))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    released = transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=224, patch_size=16,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    ))  # fmt: skip
    released.save_pretrained(tmp_path / "released")
    lines = walk("vision.md", tmp_path, {"HF_FOLDER": "released"})
    runs = ("quickstart-vision", "photos", "larger", "mae-b16", "tuned", "simmim-swin-b")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {*runs}
    for run in runs:
        assert training_curve(tmp_path / "runs" / run)[-1]["step"] == (6 if run == runs[0] else 2)
    assert len(json.loads((tmp_path / "runs/photos/pictures.json").read_text())["galleries"]) == 2
    assert (tmp_path / "runs/photos/report.html").is_file()
    assert (tmp_path / "samples.png").is_file()
    assert len(lines) > 12


def test_the_page_on_images_and_text(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "photos", tmp_path / "captions", 120)
    shutil.copy(tmp_path / "photos/validation/0005.png", tmp_path / "photos/validation/2.png")
    shutil.copy(tmp_path / "photos/validation/0005.txt", tmp_path / "photos/validation/2.txt")
    released = transformers.CLIPModel(transformers.CLIPConfig(
        vision_config={
            "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
            "image_size": 64, "patch_size": 32,
        },
        text_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "vocab_size": 512, "max_position_embeddings": 77, "eos_token_id": 2,
        },
        projection_dim=16,
    ))  # fmt: skip
    released.save_pretrained(tmp_path / "released")
    captions = [path.read_text() for path in (tmp_path / "captions").iterdir()]
    kind = TokenizerConfig(kind="byte-bpe", vocab_size=340)
    write_tokenizer(tmp_path / "released", make_tokenizer_files(kind, captions))
    walk("image-text.md", tmp_path, {"HF_FOLDER": "released", "tokenizer.file=HF_FOLDER": "tokenizer.file=released"})
    transformers.CLIPModel.from_pretrained(tmp_path / "out")
    for run in ("towers", "tuned", "captioner", "connector", "both"):
        assert training_curve(tmp_path / "runs" / run)
    assert (tmp_path / "seen.png").is_file()
