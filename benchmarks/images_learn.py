"""Do small models of images learn in CPU minutes, with labels, with few of them, or with captions?

    python benchmarks/images_learn.py labels IMAGES --work runs/vision-learns --out benchmarks/results
    python benchmarks/images_learn.py captions IMAGES --work runs/captions --out benchmarks/results

IMAGES: a folder with train.tar, validation.tar and test.tar of square grey images, 32 pixels a side, with a .cls (for
captions a .txt) each, as the webdataset library writes them. Runs that the work folder holds are not repeated. CPU
seconds are those of the whole command, evaluation included.

labels: a ViT and a Swin transformer learn all training images. Then a masked autoencoder learns without labels, once,
and its encoder, against a new one, is trained on a few images of each class over several seeds. Each of the two takes
the learning rate, of those in --scales, that is best on the validation images with the first seed. Each run is `megatfm
train` on one thread, its figure top-1 accuracy on test.tar.

captions: an image and a text encoder train on all training images. Then images of the test set look for their caption
among those of groups of 100 pairs, against one in a hundred by chance.
"""

import argparse
import io
import json
import random
import statistics
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

# --------------------------------------------------------------------------------------------------- labels

Sample = tuple[str, bytes, bytes]
CLASSIFIER = (
    "data.images.size=32", 'data.images.transforms=[{name="random_crop",padding=2}]', "train.micro_batch=64",
    "evaluate.every=1000000", "checkpoint.every=1000000", "log.every=50",
)  # fmt: skip
WIDE = ("model.d_model=128", "model.ffn.d_ff=512")
VIT_8 = (*WIDE, "model.embedding.patch_size=8", "data.sequence_length=16")
VIT_4 = (
    *WIDE, "model.embedding.patch_size=4", 'model.position={name="sinusoidal_2d"}', "data.sequence_length=64",
)  # fmt: skip
SWIN = (
    "model.family=hierarchical", "model.d_model=64", "model.ffn.d_ff=256", "model.embedding.patch_size=4",
    "model.stages={n_layers=[2,2],n_heads=[2,4],grid=[8,8]}", "model.embedding.norm=true", "data.sequence_length=64",
    'model.attention={name="windowed",pattern={name="windows_2d",window=4}}', 'model.position={name="relative_2d"}',
)  # fmt: skip
MAE = (
    *VIT_4, "model.family=masked_autoencoder", 'objective={name="masked_image"}', "data.sequence_length=16",
    "data.target_length=64", "model.extra_heads={}", "data.validation={}",
    "model.pixel_decoder={d_model=64,n_layers=2,n_heads=4,d_ff=256}",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    work: Path
    images: Path
    steps: int
    pretraining_steps: int
    few_steps: int
    per_class: int

    def corpus(self, name: str) -> str:
        return str((self.work / "corpora" / name).absolute())


def read_samples(path: Path, extension: str = "cls") -> list[Sample]:
    """Return key, image, and label or caption of each sample, in random order."""
    files: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            if kind in ("png", extension) and (content := tar.extractfile(member)):
                files[key][kind] = content.read()
    samples = [(key, parts["png"], parts[extension]) for key, parts in files.items()]
    random.Random(0).shuffle(samples)
    return samples


def write_tar(path: Path, samples: Iterable[Sample], extension: str = "cls") -> None:
    """Write samples as a tar, as the webdataset library does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, image, text in samples:
            for name, content in ((f"{key}.png", image), (f"{key}.{extension}", text)):
                header = tarfile.TarInfo(name)
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))


def prepare_corpora(plan: Plan) -> dict[str, int]:
    """Prepare three corpora in random order, and of each seed one with a few images of each class; return counts."""
    samples = {name: read_samples(plan.images / f"{name}.tar") for name in ("train", "validation", "test")}
    samples |= {f"few-{seed}": choose_few(samples["train"], plan.per_class, seed) for seed in range(3)}
    for name, of_corpus in samples.items():
        folder = plan.work / "tars" / name
        if not (plan.work / "corpora" / name / "prep.json").exists():
            write_tar(folder / "images.tar", of_corpus)
            words = (f"read.folder={folder}", "split.validation_files=", "split.validation=0")
            common.run_megatfm("prep", "quickstart-vision-data", *words, f"out={plan.work / 'corpora' / name}")
    return {name: len(of_corpus) for name, of_corpus in samples.items()}


def choose_few(samples: list[Sample], per_class: int, seed: int) -> list[Sample]:
    shuffled = random.Random(seed).sample(samples, len(samples))
    counts: dict[bytes, int] = defaultdict(int)
    chosen = []
    for sample in shuffled:
        counts[sample[2]] += 1
        if counts[sample[2]] <= per_class:
            chosen.append(sample)
    return chosen


def train(plan: Plan, name: str, corpus: str, steps: int, seed: int, *words: str) -> dict[str, Any]:
    """Train once; return top-1 accuracy on test and validation images, or the loss without any, and CPU seconds."""
    folder = plan.work / f"{name}-{seed}"
    result = folder / "learned.json"
    if not result.exists():
        n_classes = len({label for _, _, label in read_samples(plan.images / "validation.tar")})
        changes = [
            f"name={folder.name}", f"run_dir={folder}", f"train.seed={seed}", f"train.steps={steps}",
            f"data.train={plan.corpus(corpus)}/train", *CLASSIFIER,
            f"data.validation={{test='{plan.corpus('test')}/train',held_out='{plan.corpus('validation')}/train'}}",
            f'model.extra_heads={{classifier={{name="classifier",n_classes={n_classes},pool="mean"}}}}', *words,
        ]  # fmt: skip
        by_key = {word.partition("=")[0]: word for word in changes}  # a later word wins
        seconds = common.run_megatfm("train", "quickstart-vision", *by_key.values())
        last = common.read_rows(folder / "metrics.jsonl")[-1]
        sets = last.get("evaluation", {})
        figures = {name: values["metrics"]["top1"] for name, values in sets.items()} or {"loss": last["loss"]}
        result.write_text(json.dumps({**figures, "cpu_seconds": round(seconds), "steps": steps}))
    figures = json.loads(result.read_text())
    print(name, seed, figures, flush=True)
    return dict(figures)


def train_on_few(plan: Plan, name: str, scale: float, seed: int, words: Sequence[str]) -> dict[str, Any]:
    """Train on a few images of each class, the preset's learning rates multiplied by `scale`."""
    rates = (f"optimizer.lr={1e-2 * scale:g}", f"optimizer.matrix_lr={2e-2 * scale:g}")
    return train(plan, f"{name}-{scale:g}", f"few-{seed}", plan.few_steps, seed, *VIT_4, *rates, *words)


def find_best_scale(plan: Plan, name: str, scales: Sequence[float], words: Sequence[str]) -> float:
    """Return the scale of the learning rates that is best on the validation images with the first seed."""
    return max(scales, key=lambda scale: train_on_few(plan, name, scale, 0, words)["held_out"])


@common.argument("images", type=Path)
@common.argument("--work", type=Path, default=Path("runs/vision-learns"))
@common.argument("--out", type=common.make_output_folder)
@common.argument("--steps", type=int, default=1200)
@common.argument("--pretraining-steps", type=int, default=1000)
@common.argument("--few-steps", type=int, default=200)
@common.argument("--per-class", type=int, default=10)
@common.argument("--seeds", type=int, default=3, help="of the comparison with few labels (3)")
@common.argument("--supervised-seeds", type=int, default=2)
@common.argument("--scales", type=float, nargs="+", default=[1, 0.3, 0.1], help="of the preset's learning rates")
def run_labels(args: argparse.Namespace) -> None:
    plan = Plan(args.work, args.images, args.steps, args.pretraining_steps, args.few_steps, args.per_class)
    counts = prepare_corpora(plan)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    runs["mae"].append(train(plan, "mae", "train", plan.pretraining_steps, 0, *MAE))
    start = (f"train.init_from={plan.work / 'mae-0'}", "train.init_include=encoder.*")
    for name, words in {"scratch": (), "pretrained": start}.items():
        scale = find_best_scale(plan, name, args.scales, words)
        for seed in range(args.seeds):
            runs[name].append(train_on_few(plan, name, scale, seed, words))
            runs[name][-1]["scale"] = scale
    for seed in range(args.supervised_seeds):
        runs["vit"].append(train(plan, "vit", "train", plan.steps, seed, *VIT_8))
        runs["swin"].append(train(plan, "swin", "train", plan.steps, seed, *SWIN))
    write_labels_page(args, counts, runs)


def write_labels_page(
    args: argparse.Namespace, counts: Mapping[str, int], runs: Mapping[str, list[dict[str, Any]]]
) -> None:
    few = f"{args.per_class} images of each class"
    titles = {
        "vit": ("ViT, patches of 8, 4 layers, d_model 128", "all labels"),
        "swin": ("Swin, patches of 4, stages of 2 and 2 layers, d_model 64 and 128", "all labels"),
        "scratch": ("ViT, patches of 4, from scratch", few),
        "pretrained": ("ViT, patches of 4, from the masked autoencoder", few),
    }
    page = common.Page(
        common.make_dated_path(args.out, "vision-learns.md"),
        "Small models of images",
        f"`python benchmarks/images_learn.py labels IMAGES --steps {args.steps} --pretraining-steps "
        f"{args.pretraining_steps} --few-steps {args.few_steps} --per-class {args.per_class}`, one thread of a shared "
        "machine.",
        f"{counts['train']:,} training and {counts['test']:,} test images. Rows of 64 images a step. Top-1 accuracy on "
        "the test images, a figure for each seed.",
        f"Pretraining without labels: {args.pretraining_steps:,} steps once, {runs['mae'][0]['cpu_seconds']} CPU "
        "seconds. The seeds after it differ in labelled images, classifier and order.",
        table="| Model | Labels | Steps | CPU s | Top-1, % | Mean ± sd |",
    )
    for name, (title, labels) in titles.items():
        if not (values := [100 * run["test"] for run in runs[name]]):
            continue
        scale = f", learning rates × {runs[name][0]['scale']:g}" if "scale" in runs[name][0] else ""
        seconds = statistics.mean(run["cpu_seconds"] for run in runs[name])
        figures = " ".join(f"{value:.1f}" for value in values)
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        steps = f"{runs[name][0]['steps']:,} | {seconds:.0f}"
        page.add(f"| {title}{scale} | {labels} | {steps} | {figures} | {statistics.mean(values):.1f}{spread} |")


# ------------------------------------------------------------------------------------------------- captions

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


def prepare_pairs(work: Path, name: str, pairs: list[Sample]) -> None:
    """Write pairs as a tar and prepare it, unless that was done before."""
    folder = work / "tars" / name
    if (work / "corpora" / name / "prep.json").exists():
        return
    write_tar(folder / "pairs.tar", pairs, "txt")
    config = work / f"{name}.toml"
    config.write_text(
        f'out = "{work}/corpora/{name}"\n[read]\nfolder = "{folder}"\nformat = "images"\n'
        f'[split]\nvalidation = 0\n[tokenizer]\nfile = "{work}/corpora/text/tokenizer.model"\n'
    )
    common.run_megatfm("prep", str(config))


def train_tokenizer(work: Path, pairs: list[Sample]) -> None:
    """Train a tokenizer on the captions, unless that was done before."""
    folder = work / "text"
    if not (work / "corpora" / "text" / "prep.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "captions.txt").write_bytes(b"\n".join(caption for _, _, caption in pairs))
        words = (f"read.folder={folder}", f"out={work}/corpora/text", "tokenizer.vocab_size=800", "split.validation=0")
        common.run_megatfm("prep", "quickstart-data", *words)  # fmt: skip


def train_towers(work: Path, groups: list[str], steps: int, seed: int) -> dict[str, float]:
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
        evaluation = common.read_rows(folder / "metrics.jsonl")[-1]["evaluation"]
        metrics = [values["metrics"] for values in evaluation.values()]
        means = {name: statistics.mean(group[name] for group in metrics) for name in ("top1", "top5")}
        result.write_text(json.dumps({**means, "cpu_seconds": round(seconds)}))
    figures: dict[str, float] = json.loads(result.read_text())
    print(seed, figures, flush=True)
    return figures


@common.argument("images", type=Path)
@common.argument("--work", type=Path, default=Path("runs/captions"))
@common.argument("--out", type=common.make_output_folder)
@common.argument("--steps", type=int, default=1500)
@common.argument("--seeds", type=int, default=3)
def run_captions(args: argparse.Namespace) -> None:
    work = args.work.absolute()
    pairs = read_samples(args.images / "train.tar", "txt")
    train_tokenizer(work, pairs)
    prepare_pairs(work, "train", pairs)
    tested = read_samples(args.images / "test.tar", "txt")
    groups = [f"group_{i}" for i in range(len(tested) // GROUP)]
    for i, group in enumerate(groups):
        prepare_pairs(work, group, tested[i * GROUP : (i + 1) * GROUP])
    runs = [train_towers(work, groups, args.steps, seed) for seed in range(args.seeds)]
    page = common.Page(
        common.make_dated_path(args.out, "captions-learn.md"),
        f"Captions found among {GROUP}",
        f"`benchmarks/images_learn.py captions IMAGES --steps {args.steps}`: an image encoder of 4 layers and a text "
        "encoder of 2, d_model 96, features of 64 numbers; CLIP's loss over 128 pairs a step, "
        f"{len(pairs):,} training pairs, one thread of {common.get_cpu_name()}. Images of typefaces that are not among "
        f"the training images look for their caption among {GROUP}; mean of {len(groups)} groups. By chance: 1 and 5 "
        "%.",
        table="| Seed | Own caption first, % | among the first five, % | CPU s |",
    )
    for seed, figures in enumerate(runs):
        page.add(f"| {seed} | {100 * figures['top1']:.1f} | {100 * figures['top5']:.1f} | {figures['cpu_seconds']} |")


PARTS = {"labels": run_labels, "captions": run_captions}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
