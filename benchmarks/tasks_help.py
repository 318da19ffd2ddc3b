"""Does pretraining help on real tasks? Small models, fine-tuned after pretraining and from random weights.

    python benchmarks/debian_texts.py texts --language de
    python benchmarks/tasks_help.py texts --work runs/tasks-help --out benchmarks/results [--only encoder-1000 …]

The texts are descriptions of Debian packages; the labels are sections, debtags and translations. A model pretrains on
the training texts without their labels; then every comparison fine-tunes each of its arms once per seed with
`megatfm finetune`, all with the same labels, epochs and learning rate. The page lists the metric on the test file of
each arm as mean ± sample standard deviation over seeds. Each finished run is kept in WORK: the same command goes on.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import common

ARCHITECTURE = ("model.n_layers=2", "model.attention.n_heads=4", "data.sequence_length=64")
TRAINING = (
    "train.precision=fp32", "train.global_batch=64", "train.micro_batch=64", "evaluate.every=350", "log.sinks=[]",
)  # fmt: skip
PRETRAINING: Mapping[str, Sequence[str]] = {
    "encoder": ("model.family=encoder", "objective.name=masked"),
    "encoder-nsp": ("model.family=encoder", "objective.name=next_sentence", "model.embedding.n_segments=2",
                    "model.extra_heads.sentence.classes=2"),
    "encoder-mlm": ("model.family=encoder", "objective.name=masked", "model.embedding.n_segments=2"),
    "decoder": (),
}  # fmt: skip
"""Pretrained model → overrides of `megatfm train`."""
SCRATCH = ("train.init_from=",)
TOPICS = ("task.text=text", "task.label=label")
PAIRS = ("task.text=first", "task.text_pair=second", "task.label=label")
FROZEN = {"encoder": 'train.freeze=["encoder.*"]', "decoder": 'train.freeze=["decoder.*"]'}


@dataclass(frozen=True)
class Arm:
    """One way to fine-tune: the pretrained model, or its architecture alone, and overrides of `megatfm finetune`."""

    source: str
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """Arms that share a task, its number of labelled examples (0: all) and the passes over them."""

    task: str
    n_labels: int
    epochs: int
    columns: Sequence[str]
    arms: Mapping[str, Arm]


def _topics(family: str, n_labels: int, epochs: int, **further: Arm) -> Comparison:
    arms = {"pretrained": Arm(family), "from random weights": Arm(family, SCRATCH), **further}
    return Comparison("topics", n_labels, epochs, TOPICS, arms)


COMPARISONS: Mapping[str, Comparison] = {
    "encoder-1000": _topics("encoder", 1000, 6),
    "decoder-1000": _topics("decoder", 1000, 6),
    "encoder-100": _topics("encoder", 100, 30),
    "encoder-frozen": Comparison(
        "topics", 1000, 6, TOPICS,
        {"tuned": Arm("encoder"), "frozen, head trained": Arm("encoder", (FROZEN["encoder"],))},
    ),
    "decoder-auxiliary-loss": Comparison(
        "topics", 1000, 6, TOPICS,
        {"without": Arm("decoder"), "lm_weight = 0.5": Arm("decoder", ("task.lm_weight=0.5",))},
    ),
    "pairs-next-sentence": Comparison(
        "pairs", 1000, 6, PAIRS,
        {"masked tokens and next sentence": Arm("encoder-nsp"), "masked tokens": Arm("encoder-mlm"),
         "from random weights": Arm("encoder-mlm", SCRATCH)},
    ),
    "encoder-all": _topics("encoder", 0, 2),
}  # fmt: skip


def main() -> None:
    """Prepare, pretrain and compare, as far as it isn't done yet; rewrite the page after every run."""
    parser = common.make_parser(__doc__)
    parser.add_argument("texts", type=Path, help="folder that debian_texts.py wrote")
    parser.add_argument("--work", type=common.output_folder, required=True, help="folder for runs")
    parser.add_argument("--out", type=common.output_folder, help="folder of the dated page")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=700, help="of pretraining")
    parser.add_argument("--width", type=int, default=64, help="d_model")
    parser.add_argument("--lr", type=float, default=1e-3, help="of fine-tuning, for all arms")
    args = parser.parse_args()
    scores: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, float] = {}
    for name in args.only:
        comparison = COMPARISONS[name]
        for source in {arm.source: None for arm in comparison.arms.values()}:
            seconds[source] = pretrain(args.texts, args.work, source, args.steps, args.width)
        for seed in range(args.seeds):
            for arm_name, arm in comparison.arms.items():
                score = finetune(args.texts, args.work, comparison, arm, seed, args.lr)
                scores.setdefault(name, {}).setdefault(arm_name, []).append(score)
                print(f"{name}  {arm_name}  seed {seed}: {score:.4f}", flush=True)
                page = format_page(scores, seconds, args)
                common.write_text(common.dated(args.out, "tasks-help.md"), page)


def pretrain(texts: Path, work: Path, source: str, steps: int, width: int) -> float:
    """Prepare the corpus, pretrain one model as far as it isn't done; returns the seconds it took."""
    corpus, record = work / "corpus", work / source / "seconds.json"
    if record.exists():
        return float(json.loads(record.read_text()))
    megatfm(
        *("prep", "quickstart-data", f"out={corpus}", f"read.folder={texts}"),
        *('read.include=["topics.train.jsonl"]', "split.validation=0.02"),
        *("tokenizer.kind=byte-bpe", "tokenizer.vocab_size=4096"),
    )
    started = time.perf_counter()
    megatfm(
        *("train", "quickstart", f"name={source}", f"run_dir={work / source}"),
        *(f"model.d_model={width}", f"model.ffn.d_ff={3 * width}", *ARCHITECTURE, *TRAINING),
        *(*PRETRAINING[source], f"data.train={corpus}/train"),
        *(f'data.validation={{held-out="{corpus}/validation"}}', f"data.tokenizer={corpus}/tokenizer.json"),
        *(f"train.steps={steps}", 'optimizer={name="adamw", lr=3e-3}', "lr_schedule.warmup_steps=50"),
    )
    elapsed = time.perf_counter() - started
    record.write_text(json.dumps(elapsed))
    return elapsed


def finetune(
    texts: Path, work: Path, comparison: Comparison, arm: Arm, seed: int, learning_rate: float
) -> float:
    """Fine-tune once, as far as it isn't done; returns the first metric of the task on the test file.

    No validation file: nothing is chosen by its result, so all arms end after the same number of epochs.
    """
    train = labelled_subset(texts, work, comparison)
    run_name = "-".join(
        [comparison.task, str(comparison.n_labels), arm.source, *arm.overrides, str(seed)]
    ).translate({ord(character): "_" for character in '."=*[]'})
    folder = work / run_name
    if not (folder / "task.json").exists():
        megatfm(
            *("finetune", "--from", str(work / arm.source), f"name={run_name}", f"run_dir={folder}"),
            *(f"task.train={train}", f"task.test={texts / comparison.task}.test.jsonl", *comparison.columns),
            f"task.labels={json.dumps(all_labels(texts, comparison.task))}",
            *("task.too_long=truncate", f"task.epochs={comparison.epochs}", f"train.seed={seed}"),
            *("optimizer.name=adamw", f"optimizer.lr={learning_rate}", "lr_schedule.name=linear"),
            *("lr_schedule.warmup_steps=20", "train.global_batch=16", "train.micro_batch=16"),
            *("data.sequence_length=64", "train.precision=fp32", "checkpoint.keep=1", "log.sinks=[]"),
            *arm.overrides,
        )
    metrics = json.loads((folder / "task.json").read_text())["sets"]["test"]["metrics"]
    return float(next(iter(metrics.values())))


def all_labels(texts: Path, task: str) -> list[str]:
    """Return the labels of the whole training file: a small subset may lack some."""
    lines = (texts / f"{task}.train.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({json.loads(line)["label"] for line in lines})


def labelled_subset(texts: Path, work: Path, comparison: Comparison) -> Path:
    """Write the training file with as many labelled examples as the comparison takes; the same for every arm."""
    whole_file = texts / f"{comparison.task}.train.jsonl"
    if not comparison.n_labels:
        return whole_file
    subset = work / f"{comparison.task}.train.{comparison.n_labels}.jsonl"
    if not subset.exists():
        lines = whole_file.read_text(encoding="utf-8").splitlines()
        chosen = random.Random(0).sample(lines, comparison.n_labels)
        subset.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return subset


def megatfm(*words: str) -> None:
    """Run one command; its output is shown only where it fails."""
    command = [sys.executable, "-m", "megatfm", *words]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}\n{finished.stdout[-2000:]}{finished.stderr[-4000:]}")


def format_page(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    seconds: Mapping[str, float],
    args: argparse.Namespace,
) -> str:
    """Format results as a page in Markdown."""
    pretraining = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lines = [
        f"# Fine-tuning with and without pretraining, {common.today()}",
        "",
        f"`benchmarks/tasks_help.py`: models of 2 layers, d_model {args.width}; {args.steps} pretraining steps of 64 "
        f"rows of 64 tokens ({pretraining} of wall time, one thread, on a machine shared with other work); fine-tuning "
        f"at a learning rate of {args.lr:g} for all arms, on the first 64 tokens of each text, one subset of labels "
        "for all seeds, the last checkpoint.",
        "",
        "| Comparison | Task, labels, epochs | Arm | Test metric, mean ± sd | Seeds |",
        "|---|---|---|---|---|",
    ]
    for name, arms in scores.items():
        comparison = COMPARISONS[name]
        task = f"{comparison.task}, {comparison.n_labels or 'all'}, {comparison.epochs}"
        for arm, values in arms.items():
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            each = ", ".join(f"{value:.4f}" for value in values)
            lines.append(f"| {name} | {task} | {arm} | {statistics.mean(values):.4f}{spread} | {each} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
