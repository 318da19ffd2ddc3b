"""Do two small towers find the caption of an image of an unseen typeface among 100? Trained in CPU minutes.

    python benchmarks/captions_learn.py IMAGES --work runs/captions --out benchmarks/results

IMAGES: as for vision_learns.py, with a caption as .txt beside each image. An image and a text encoder train on all
training images. Then images of the test set look for their caption among those of groups of 100 pairs. Runs that the
work folder holds are not repeated.
"""

import argparse
import json
import random
import statistics
import tarfile
from pathlib import Path

import common
from vision_learns import add_file

GROUP = 100
CONFIG = """
name = "captions"
[model]
family = "two_towers"
d_model = 96
n_layers = 4
attention = { n_heads = 4, bias = true }
ffn = { d_ff = 384, activation = "gelu", bias = true }
norm = { name = "layer_norm" }
embedding = { name = "patches", patch_size = 4, channels = 1, mean = [0.5], std = [0.5] }
position = { name = "learned_2d", grid = [8, 8] }
lm_head = { name = "none" }
init = { name = "xavier" }
text_tower = { d_model = 96, n_layers = 2, n_heads = 4, d_ff = 384, max_positions = 32 }
contrastive = { width = 64, max_scale = 100.0 }
[objective]
name = "contrastive"
[data]
sequence_length = 65
target_length = 32
[data.images]
size = 32
crop_pct = 1.0
transforms = [{ name = "random_crop", padding = 2 }]
[optimizer]
name = "adamw"
lr = 1e-3
[lr_schedule]
warmup_steps = 100
[train]
global_batch = 128
micro_batch = 128
precision = "fp32"
[checkpoint]
every = 1000000
[evaluate]
every = 1000000
"""


def read_pairs(path: Path) -> list[tuple[str, bytes, bytes]]:
    """Return key, image and caption of each sample, in random order."""
    files: dict[str, bytes] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            if content := tar.extractfile(member):
                files[member.name] = content.read()
    keys = sorted({name.partition(".")[0] for name in files})
    random.Random(0).shuffle(keys)
    return [(key, files[f"{key}.png"], files[f"{key}.txt"]) for key in keys]


def prepare(work: Path, name: str, pairs: list[tuple[str, bytes, bytes]]) -> None:
    """Write pairs as a tar and prepare it, unless that was done before."""
    folder = work / "tars" / name
    if (work / "corpora" / name / "prep.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "pairs.tar", "w") as tar:
        for key, image, caption in pairs:
            add_file(tar, f"{key}.png", image)
            add_file(tar, f"{key}.txt", caption)
    config = work / f"{name}.toml"
    config.write_text(
        f'out = "{work}/corpora/{name}"\n[read]\nfolder = "{folder}"\nformat = "images"\n'
        f'[split]\nvalidation = 0\n[tokenizer]\nfile = "{work}/corpora/text/tokenizer.model"\n'
    )
    common.run_megatfm("prep", str(config))


def train_tokenizer(work: Path, pairs: list[tuple[str, bytes, bytes]]) -> None:
    """Train a tokenizer on the captions, unless that was done before."""
    folder = work / "text"
    if not (work / "corpora" / "text" / "prep.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "captions.txt").write_bytes(b"\n".join(caption for _, _, caption in pairs))
        words = (
            f"read.folder={folder}",
            f"out={work}/corpora/text",
            "tokenizer.vocab_size=800",
            "split.validation=0",
        )
        common.run_megatfm("prep", "quickstart-data", *words)  # fmt: skip


def train(work: Path, groups: list[str], steps: int, seed: int) -> dict[str, float]:
    """Train once; return the mean of top1 and top5 over all groups, and CPU seconds."""
    folder = work / f"towers-{seed}"
    result = folder / "learned.json"
    if not result.exists():
        config = work / "towers.toml"
        config.write_text(CONFIG)
        sets = ",".join(f"{group}='{work}/corpora/{group}/train'" for group in groups)
        seconds = common.run_megatfm(
            *("train", str(config), f"name={folder.name}", f"run_dir={folder}", f"train.seed={seed}"),
            *(f"train.steps={steps}", f"data.train={work}/corpora/train/train"),
            *(f"data.tokenizer={work}/corpora/text/tokenizer.model", f"data.validation={{{sets}}}"),
        )
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics = [values["metrics"] for values in lines[-1]["evaluation"].values()]
        means = {name: statistics.mean(group[name] for group in metrics) for name in ("top1", "top5")}
        result.write_text(json.dumps({**means, "cpu_seconds": round(seconds)}))
    figures: dict[str, float] = json.loads(result.read_text())
    print(seed, figures, flush=True)
    return figures


def main() -> None:
    """Prepare, train with each seed, write the page."""
    parser = common.make_parser(__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/captions"))
    parser.add_argument("--out", type=common.make_output_folder)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    work = args.work.absolute()
    pairs = read_pairs(args.images / "train.tar")
    train_tokenizer(work, pairs)
    prepare(work, "train", pairs)
    tested = read_pairs(args.images / "test.tar")
    groups = [f"group_{i}" for i in range(len(tested) // GROUP)]
    for i, group in enumerate(groups):
        prepare(work, group, tested[i * GROUP : (i + 1) * GROUP])
    runs = [train(work, groups, args.steps, seed) for seed in range(args.seeds)]
    page = common.Page(
        common.make_dated_path(args.out, "captions-learn.md"),
        *describe(args, len(pairs), len(groups)),
        "| Seed | Own caption first, % | among the first five, % | CPU s |",
        "|---|---|---|---|",
    )
    for seed, figures in enumerate(runs):
        page.add(f"| {seed} | {100 * figures['top1']:.1f} | {100 * figures['top5']:.1f} | {figures['cpu_seconds']} |")


def describe(args: argparse.Namespace, n_pairs: int, n_groups: int) -> list[str]:
    """Return the lines above the table."""
    return [
        f"# Captions found among {GROUP}, {common.today()}",
        "",
        f"`benchmarks/captions_learn.py IMAGES --steps {args.steps}`: an image encoder of 4 layers and a text "
        "encoder of 2, d_model 96, features of 64 numbers; CLIP's loss over 128 pairs a step, "
        f"{n_pairs:,} training pairs, one thread of {common.get_cpu_name()}. Images of typefaces that are not among "
        f"the training images look for their caption among {GROUP}; mean of {n_groups} groups. By chance: 1 and 5 %.",
        "",
    ]


if __name__ == "__main__":
    main()
