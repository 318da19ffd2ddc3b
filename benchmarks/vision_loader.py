"""Images a second of the loader, beside webdataset with torchvision's transforms, and beside bare loops, in turns.

    python benchmarks/vision_loader.py [--images 512] [--rounds 10] [--out benchmarks/results]

Pictures of 500 × 375 pixels become training batches of 224: decoded, a random part resized, flipped by a coin. Sides:

- ours: PackedDataset and DataLoader, from shards to uint8 patches (the model normalises them on its device)
- webdataset: its tar, decoded by Pillow, then torchvision's RandomResizedCrop, RandomHorizontalFlip, ToTensor and
  Normalize, batched. Without torchvision the same by Pillow and torch, which is what these four do of a PIL image
- decoding: Pillow's decoding to RGB of the same bytes in memory, and nothing else
- bare: our decoding, crop, flip and patches in a loop, without shards, order, packing and batches

All run in one process; CPU seconds are of all of its threads. With simplejpeg installed, ours decodes by it.
"""

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import webdataset
from PIL import Image

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.config.objective import ImageClassificationObjective
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.writer import ShardWriter
from megatfm.data import images
from megatfm.data.dataset import PackedDataset
from megatfm.data.loader import DataLoader
from megatfm.data.sequences import PackingConfig
from megatfm.objectives import Objective, build_objective
from megatfm.rng import ChunkKey

SIZE, PATCH, BATCH = 224, 16, 32
TOKENS = 1 + (SIZE // PATCH) ** 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def draw_photo(number: int) -> bytes:
    """Draw a JPEG with structure at every scale, of about 4 bits a pixel, as photos have."""
    random, pixels = np.random.default_rng(number), np.zeros((375, 500, 3), np.float32)
    for octave in range(2, 9):
        small = random.standard_normal((2 ** (octave - 1), 2**octave, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[..., channel]).resize((500, 375), Image.Resampling.BICUBIC)
            pixels[..., channel] += np.asarray(layer) * 0.75**octave
    pixels = 128 + pixels * (55 / pixels.std())
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def make_objective() -> Objective:
    model = ModelConfig.from_dotted({
        "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
        "embedding.name": "patches", "embedding.patch_size": PATCH, "lm_head.name": "none",
        "extra_heads.classifier": {"n_classes": 1000},
    })  # fmt: skip
    changes = {"size": SIZE, "transforms": ["random_resized_crop", "horizontal_flip"], "interpolation": "bilinear"}
    return build_objective(ImageClassificationObjective(), model, None, (TOKENS,), ImagesConfig.model_validate(changes))


def iter_batches(corpus: Corpus, result: Objective, n_batches: int) -> Iterator[dict[str, Any]]:
    rows = PackedDataset(corpus, PackingConfig(result, (TOKENS,), seed=0), streams=32)
    with DataLoader(rows, global_batch=BATCH, micro_batch=BATCH, end_position=n_batches * BATCH) as loader:
        for (batch,) in loader:
            yield batch


def make_transforms() -> tuple[Callable[[Image.Image], torch.Tensor], str]:
    """Return four transforms of torchvision, or the same by hand where it isn't installed, and their name."""
    try:
        common.declare_torchvision_operators()
        from torchvision import __version__, transforms

        composed: Callable[[Image.Image], torch.Tensor] = transforms.Compose([
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ])  # fmt: skip
        return composed, f"torchvision {__version__}"
    except (ImportError, RuntimeError):
        return transform_by_hand, "torchvision's four transforms by Pillow and torch"


def transform_by_hand(image: Image.Image) -> torch.Tensor:
    random = np.random
    area = image.width * image.height * random.uniform(0.08, 1.0)
    ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
    width, height = (min(image.width, round((area * ratio) ** 0.5)), min(image.height, round((area / ratio) ** 0.5)))
    left, top = random.randint(image.width - width + 1), random.randint(image.height - height + 1)
    image = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.uniform() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return pixels.sub_(mean).div_(std)


def write_corpora(folder: str, pictures: list[bytes]) -> None:
    """Write the pictures with labels to our shards, FOLDER/ours, and to webdataset's tar, FOLDER/theirs.tar."""
    with (
        ShardWriter(Path(folder, "ours"), tokenizer_hash="none", token_dtype="uint16") as writer,
        webdataset.TarWriter(f"{folder}/theirs.tar") as tar,
    ):
        for number, data in enumerate(pictures):
            files = {"jpg": data, "cls": b"%d" % (number % 1000)}
            writer.add(f"{number:06d}", np.zeros(0, np.uint16), "made", 0, files)
            tar.write({"__key__": f"{number:06d}", **files})
        writer.finish({})


@dataclass(frozen=True)
class Epochs:
    """An epoch of each side over the pictures that `write_corpora` wrote to a folder. transform: webdataset's."""

    folder: str
    corpus: Corpus
    pictures: list[bytes]
    result: Objective
    transform: Callable[[Image.Image], torch.Tensor]

    def read_ours(self) -> None:
        n = len(self.pictures)
        assert sum(len(batch["labels"]) for batch in iter_batches(self.corpus, self.result, n // BATCH)) == n

    def read_webdataset(self) -> None:
        stream = webdataset.WebDataset(f"{self.folder}/theirs.tar", shardshuffle=False, empty_check=False)
        rows = stream.decode("pil").to_tuple("jpg", "cls").map_tuple(self.transform, lambda label: label).batched(BATCH)
        assert sum(len(labels) for _, labels in rows) == len(self.pictures)

    def decode(self) -> None:
        for data in self.pictures:
            with Image.open(io.BytesIO(data)) as image:
                image.convert("RGB")

    def build_bare(self) -> None:
        reader = self.result.reader  # type: ignore[attr-defined]
        for number, data in enumerate(self.pictures):
            reader.build({"jpg": data}, ChunkKey(0, 0, number, 0))


def make_page(args: argparse.Namespace, pictures: list[bytes], peer: str) -> common.Page:
    """Start the page of results. peer: the library of webdataset's transforms."""
    n = len(pictures)
    return common.Page(
        common.make_dated_path(args.out, "vision-loader.md"),
        "Images a second of the loader",
        f"`python benchmarks/vision_loader.py --images {args.images} --rounds {args.rounds}`: "
        f"{common.describe_system()}, {common.get_cpu_name()}; {n} JPEGs of 500 × 375, "
        f"{sum(map(len, pictures)) // n:,} bytes each; "
        f"Pillow {version('pillow')}, simplejpeg "
        f"{'present' if images.simplejpeg else 'absent'}; webdataset {webdataset.__version__}, {peer}. Ratios are "
        "the others' seconds over ours, of pairs in turns: median, lowest, highest.",
        table="| Beside | CPU seconds | | | wall | | | ours, images/s of CPU |",
    )


def compare_row(name: str, ours: common.Step, theirs: common.Step, n_images: int, rounds: int) -> str:
    """Time a side against ours in turns; return its row of the page."""
    rates: list[float] = []

    def our_side() -> dict[str, float]:
        seconds = common.make_side(ours)()
        rates.append(n_images / seconds["cpu"])
        return seconds

    ratios = common.summarize(common.compare(our_side, common.make_side(theirs), rounds))
    cells = [f"{ratios[clock + end]:.2f}" for clock in ("cpu", "wall") for end in ("", "_lowest", "_highest")]
    return f"| {name} | {' | '.join(cells)} | {np.median(rates[2:]):,.0f} |"


@common.argument("--images", type=int, default=512)
@common.argument("--rounds", type=int, default=10)
@common.argument("--out", type=common.make_output_folder)
def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    n = args.images // BATCH * BATCH
    pictures = [draw_photo(number) for number in range(n)]
    transform, peer = make_transforms()
    with tempfile.TemporaryDirectory() as folder:
        write_corpora(folder, pictures)
        corpus = Corpus.open(Path(folder, "ours"))
        epochs = Epochs(folder, corpus, pictures, make_objective(), transform)
        sides = {"webdataset": epochs.read_webdataset, "decoding": epochs.decode, "bare": epochs.build_bare}
        page = make_page(args, pictures, peer)
        for name, side in sides.items():
            page.add(compare_row(name, epochs.read_ours, side, n, args.rounds))


if __name__ == "__main__":
    common.run_script(__doc__, main)
