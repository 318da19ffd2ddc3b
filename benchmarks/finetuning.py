"""Fine-tuning of small models: does pretraining help on real tasks, and examples a second against Hugging Face's.

    python benchmarks/texts.py debian texts
    python benchmarks/finetuning.py compare texts --work runs/tasks-help --out benchmarks/results [--only …]
    python benchmarks/finetuning.py speed texts --rounds 3 --out benchmarks/results

compare: models fine-tuned after pretraining, against random weights. The texts are descriptions of Debian packages;
the labels are sections of the archive, or whether two texts belong to one package. A model pretrains on the training
texts without their labels; then every comparison fine-tunes each of its arms once per seed with `megatfm finetune`, all
with the same labels, passes and learning rate. Nothing is chosen by a result: the last checkpoint is evaluated on the
test file. A page lists the metric of each arm as mean ± sample standard deviation over seeds. Finished runs are kept in
WORK: the same command continues.

speed: a BERT with random weights is fine-tuned on one pass over a file of examples of at most 128 tokens, by each side
in a process of its own; sides take turns, and alternate who goes first. The Trainer has its defaults: 8 examples a
step, padded to the longest of them. Ours packs examples into rows, whose number and length hold 8 examples on average.
The seconds are of the training loop and the checkpoint at its end, synced to disk on both sides, by the clock and by
the CPU; loading and tokenizing come before it. A figure is the median over rounds of (the Trainer's seconds / megatfm's
seconds): above 1, megatfm is faster.
"""

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common

# -------------------------------------------------------------------------------------------------- compare

ARCHITECTURE = ("model.n_layers=2", "data.sequence_length=64")
TRAINING = (
    "train.precision=fp32", "train.global_batch=64", "train.micro_batch=64", "evaluate.every=500", "log.sinks=[]",
)  # fmt: skip
PRETRAINING: Mapping[str, Sequence[str]] = {
    "encoder": ("model.family=encoder", "objective.name=masked"),
    "encoder-nsp": ("model.family=encoder", "objective.name=next_sentence", "model.embedding.n_segments=2",
                    "model.extra_heads.sentence.classes=2"),
    "encoder-mlm": ("model.family=encoder", "objective.name=masked", "model.embedding.n_segments=2"),
    "decoder": (),
}  # fmt: skip
"""Pretrained model → overrides of `megatfm train`."""
RANDOM_WEIGHTS = ("train.init_from=",)
TOPICS = ("task.text=text", "task.label=label")
PAIRS = (
    "task.text=first", "task.text_pair=second", "task.label=label",
    'model.extra_heads.sentence={name="text_classifier", pooler="tanh"}',
)  # fmt: skip
"""All arms have the pooler of next-sentence prediction."""
FROZEN = 'train.freeze=["encoder.*"]'


@dataclass(frozen=True)
class Arm:
    """One way to fine-tune: the pretrained model, and overrides of `megatfm finetune`."""

    model: str
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """Arms that share a task, its number of labelled examples (0: all) and the passes over them."""

    task: str
    n_labels: int
    epochs: int
    columns: Sequence[str]
    arms: Mapping[str, Arm]


def compare_topics(model: str, n_labels: int, epochs: int, **further: Arm) -> Comparison:
    """Return the comparison of a pretrained model with random weights on the sections of the archive."""
    arms = {"pretrained": Arm(model), "random weights": Arm(model, RANDOM_WEIGHTS), **further}
    return Comparison("topics", n_labels, epochs, TOPICS, arms)


AUXILIARY = {"pretrained, lm_weight = 0.5": Arm("decoder", ("task.lm_weight=0.5",))}
PAIR_ARMS = {
    "masked tokens and next sentence": Arm("encoder-nsp"),
    "masked tokens": Arm("encoder-mlm"),
    "random weights": Arm("encoder-mlm", RANDOM_WEIGHTS),
}
COMPARISONS: Mapping[str, Comparison] = {
    "encoder-1000": compare_topics("encoder", 1000, 8, frozen=Arm("encoder", (FROZEN,))),
    "decoder-1000": compare_topics("decoder", 1000, 8, **AUXILIARY),
    "pairs-200": Comparison("pairs", 200, 10, PAIRS, PAIR_ARMS),
    "pairs-2000": Comparison("pairs", 2000, 3, PAIRS, PAIR_ARMS),
    "encoder-100": compare_topics("encoder", 100, 40),
    "decoder-100": compare_topics("decoder", 100, 40),
    "encoder-10000": compare_topics("encoder", 10_000, 3, frozen=Arm("encoder", (FROZEN,))),
    "decoder-10000": compare_topics("decoder", 10_000, 3, **AUXILIARY),
    "encoder-all": compare_topics("encoder", 0, 2),
}  # fmt: skip


@common.argument("texts", type=Path, help="folder that texts.py wrote")
@common.argument("--work", type=common.make_output_folder, required=True, help="folder for runs")
@common.argument("--out", type=common.make_output_folder, help="folder of the dated page")
@common.argument("--page", default="tasks-help", help="its name, after the date")
@common.argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
@common.argument("--seeds", type=int, default=3)
@common.argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
@common.argument("--steps", type=int, default=2000, help="of pretraining, by Muon")
@common.argument("--width", type=int, default=64, help="d_model")
@common.argument("--heads", type=int, default=4, help="pairs are learnt with 2")
@common.argument("--vocab", type=int, default=4096, help="size of the tokenizer's vocabulary")
@common.argument("--lr", type=float, default=1e-3, help="of fine-tuning, for all arms")
def run_compare(args: argparse.Namespace) -> None:
    """Prepare, pretrain and compare, as far as it isn't done yet; rewrite the page after every run."""
    chosen = {name: COMPARISONS[name] for name in args.only}
    for comparison in chosen.values():
        prepare_labelled_subset(args.texts, args.work, comparison)
    prepare(args.texts, args.work, args.vocab)
    models = {arm.model for comparison in chosen.values() for arm in comparison.arms.values()}
    scores: dict[str, dict[str, list[float]]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda model: pretrain(args, model), sorted(models)))
        runs = [
            (name, arm, pool.submit(finetune, args, chosen[name], chosen[name].arms[arm], seed))
            for name in chosen
            for seed in range(args.seeds)
            for arm in chosen[name].arms
        ]
        for name, arm, run in runs:
            scores.setdefault(name, {}).setdefault(arm, []).append(run.result())
            write_page(common.make_dated_path(args.out, f"{args.page}.md"), scores, args)


def prepare(texts: Path, work: Path, vocab: int) -> None:
    """Tokenize the training texts into WORK/corpus, once."""
    corpus = work / "corpus"
    if not (corpus / "tokenizer.json").exists():
        common.run_megatfm(
            *("prep", "quickstart-data", f"out={corpus}", f"read.folder={texts}"),
            *('read.include=["topics.train.jsonl"]', "split.validation=0.02"),
            *("tokenizer.kind=byte-bpe", f"tokenizer.vocab_size={vocab}"),
        )


def pretrain(args: argparse.Namespace, model: str) -> None:
    """Pretrain one model, as far as it isn't done."""
    folder, corpus = args.work / model, args.work / "corpus"
    if (folder / "done").exists():
        return
    common.run_megatfm(
        *("train", "quickstart", f"name={model}", f"run_dir={folder}", *ARCHITECTURE, *TRAINING),
        *(f"model.d_model={args.width}", f"model.ffn.d_ff={3 * args.width}"),
        *(f"model.attention.n_heads={args.heads}", *PRETRAINING[model]),
        *(f"data.train={corpus}/train", f'data.validation={{held-out="{corpus}/validation"}}'),
        *(f"data.tokenizer={corpus}/tokenizer.json", f"train.steps={args.steps}"),
    )
    (folder / "done").touch()


def finetune(args: argparse.Namespace, comparison: Comparison, arm: Arm, seed: int) -> float:
    """Fine-tune once, as far as it isn't done; returns the first metric of the task on the test file."""
    words = [comparison.task, str(comparison.n_labels), arm.model, *arm.overrides, str(seed)]
    name = "-".join(words).translate({ord(character): "_" for character in '."=*[]'})
    folder = args.work / name
    if not (folder / "task.json").exists():
        every_row = common.read_rows(args.texts / f"{comparison.task}.train.jsonl")  # a subset may lack some labels
        common.run_megatfm(
            *("finetune", "--from", str(args.work / arm.model), f"name={name}", f"run_dir={folder}"),
            *(f"task.train={prepare_labelled_subset(args.texts, args.work, comparison)}", *comparison.columns),
            f"task.test={args.texts / comparison.task}.test.jsonl",
            f"task.labels={json.dumps(sorted({row['label'] for row in every_row}))}",
            *("task.too_long=truncate", f"task.epochs={comparison.epochs}", f"train.seed={seed}"),
            *("optimizer.name=adamw", f"optimizer.lr={args.lr}", "lr_schedule.name=linear"),
            *("lr_schedule.warmup_steps=20", "train.global_batch=16", "train.micro_batch=16"),
            *("data.sequence_length=64", "train.precision=fp32", "checkpoint.keep=1", "log.sinks=[]"),
            *arm.overrides,
        )
    metrics = json.loads((folder / "task.json").read_text())["sets"]["test"]["metrics"]
    return float(next(iter(metrics.values())))


def prepare_labelled_subset(texts: Path, work: Path, comparison: Comparison) -> Path:
    """Return the training file of a comparison; its examples are drawn once, the same for every arm and seed."""
    every_label = texts / f"{comparison.task}.train.jsonl"
    path = work / f"{comparison.task}.train.{comparison.n_labels}.jsonl" if comparison.n_labels else every_label
    if not path.exists():
        common.write_rows(path, random.Random(0).sample(common.read_rows(every_label), comparison.n_labels))
    return path


def write_page(
    path: Path | None, scores: Mapping[str, Mapping[str, Sequence[float]]], args: argparse.Namespace
) -> None:
    page = common.Page(
        path,
        "Fine-tuning with and without pretraining",
        f"`benchmarks/finetuning.py compare`: models of 2 layers, d_model {args.width}, {args.heads} heads; "
        f"{args.steps} steps of pretraining by Muon on 64 rows of 64 tokens, on one thread of {common.get_cpu_name()}; "
        f"fine-tuning by AdamW at a learning rate of {args.lr:g} for all arms, on the first 64 tokens of each text, "
        "one subset of labels for all seeds, the last checkpoint. The metric is accuracy on the test file.",
        table="| Comparison | Task, labels, passes | Arm | Mean ± sd | Seeds |",
    )
    for name, arms in scores.items():
        comparison = COMPARISONS[name]
        task = f"{comparison.task}, {comparison.n_labels or 'all'}, {comparison.epochs}"
        for arm, values in arms.items():
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            seeds = ", ".join(f"{value:.4f}" for value in values)
            page.add(f"| {name} | {task} | {arm} | {statistics.mean(values):.4f}{spread} | {seeds} |")


# ---------------------------------------------------------------------------------------------------- speed

LENGTH, EXAMPLES_A_STEP, VOCABULARY = 128, 8, 4096
TASKS = {
    "synopses (short texts)": ("pairs", ("first",)),
    "synopsis and description (pairs)": ("pairs", ("first", "second")),
    "descriptions (long texts)": ("topics", ("text",)),
}
"""Row of the table → file, and the columns of its texts."""


@common.argument("texts", type=Path, help="folder that texts.py wrote")
@common.argument("--examples", type=int, default=1200)
@common.argument("--rounds", type=int, default=3)
@common.argument("--row", type=int, default=256, help="data.sequence_length that is aimed at, in tokens")
@common.argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="rows of the table")
@common.argument("--width", type=int, default=256, help="of the model")
@common.argument("--layers", type=int, default=4)
@common.argument("--out", type=common.make_output_folder, help="folder of the dated page")
def run_speed(args: argparse.Namespace) -> None:
    import transformers

    page = common.Page(
        common.make_dated_path(args.out, "finetuning-speed.md"),
        "Fine-tuning against Hugging Face's Trainer",
        f"`benchmarks/finetuning.py speed`: a BERT of {args.layers} layers, width {args.width}, float32, one thread of "
        f"{common.get_cpu_name()}, transformers {transformers.__version__}; {args.examples} examples, at most {LENGTH} "
        f"tokens each, 8 a step on both sides, {args.rounds} rounds.",
        table="| Texts | Tokens an example | Rows × tokens a step | Trainer / megatfm, CPU | lowest, highest | clock |",
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = write_model(work / "bert", args)
        for name in args.only:
            job, mean = make_job(args, name, work, tokenizer)
            side, peer_side = (common.SideProcess(__file__, {**job, "side": kind}) for kind in ("megatfm", "trainer"))
            ratios = common.summarize(common.compare(side, peer_side, args.rounds, warmup=0))
            side.close()
            peer_side.close()
            page.add(
                f"| {name} | {mean:.0f} | {job['rows']} × {job['row']} | **{ratios['cpu']:.2f}** | "
                f"{ratios['cpu_lowest']:.2f} – {ratios['cpu_highest']:.2f} | {ratios['wall']:.2f} |"
            )


def make_job(args: argparse.Namespace, name: str, work: Path, tokenizer: Any) -> tuple[dict[str, Any], float]:
    """Write the file of a row of the table; return what both sides are to do, and the mean length of its examples."""
    task, columns = TASKS[name]
    rows = common.read_rows(args.texts / f"{task}.train.jsonl")[: 4 * args.examples]
    encoded = tokenizer(*([row[column] for row in rows] for column in columns)).input_ids
    fitting = [(row, len(ids)) for row, ids in zip(rows, encoded, strict=True) if len(ids) <= LENGTH]
    rows, lengths = zip(*fitting[: args.examples], strict=True)
    file = work / f"{task}.jsonl"
    common.write_rows(file, rows)
    mean = sum(lengths) / len(lengths)
    n_rows = max(1, round(EXAMPLES_A_STEP * mean / args.row))
    job = {
        "model": str(work / "bert"), "file": str(file), "columns": columns,
        "labels": sorted({row["label"] for row in rows}), "rows": n_rows,
        "row": max(max(lengths), math.ceil(EXAMPLES_A_STEP * mean / n_rows)),
    }  # fmt: skip
    return job, mean


def serve_side(job: dict[str, Any]) -> None:
    """Train once for each line of standard input, and answer with the seconds; what a side prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(TRAINERS[job["side"]]({**job, "folder": folder})), file=answers, flush=True)


def write_model(folder: Path, args: argparse.Namespace) -> Any:
    """Write a BERT of random weights with a WordPiece tokenizer of the texts; return the tokenizer."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    words = BertWordPieceTokenizer()
    corpus = [row["text"] for row in common.read_rows(args.texts / "topics.train.jsonl")[:5000]]
    words.train_from_iterator(corpus, vocab_size=VOCABULARY, show_progress=False)
    folder.mkdir()
    words.save_model(str(folder))
    tokenizer = BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=args.width, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64, intermediate_size=4 * args.width,
        max_position_embeddings=512,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return tokenizer


def train_by_transformers(job: dict[str, Any]) -> dict[str, float]:
    """Fine-tune as the example script of transformers for text classification does."""
    import torch
    from transformers import AutoModelForSequenceClassification as Model
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = common.read_rows(Path(job["file"]))
    columns = [[row[column] for row in rows] for column in job["columns"]]
    encoded = tokenizer(*columns)
    examples = [
        {**{key: encoded[key][i] for key in encoded}, "label": job["labels"].index(row["label"])}
        for i, row in enumerate(rows)
    ]
    model = Model.from_pretrained(job["model"], num_labels=len(job["labels"]))
    arguments = TrainingArguments(job["folder"], num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), train_dataset=examples)

    def train_to_disk() -> None:
        trainer.train()
        sync_files(Path(job["folder"]))  # megatfm's checkpoints are

    return common.make_side(train_to_disk)()


def sync_files(folder: Path) -> None:
    """Write the files below a folder to disk, which their writer has left to the system."""
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def train_by_megatfm(job: dict[str, Any]) -> dict[str, float]:
    """Fine-tune as `megatfm finetune` does; the loop is timed from the first step to the last checkpoint on disk."""
    import torch

    from megatfm import cli
    from megatfm.train.trainer import Trainer

    torch.set_num_threads(1)
    elapsed: dict[str, float] = {}
    loop = Trainer.train

    def timed_loop(trainer: Trainer, *args: Any) -> int:
        steps: list[int] = []
        elapsed.update(common.make_side(lambda: steps.append(loop(trainer, *args)))())
        return steps[0]

    text, *pair = job["columns"]
    words = [
        *("finetune", "--from", job["model"], f"run_dir={job['folder']}/run", f"task.train={job['file']}"),
        *(f"task.text={text}", *(f"task.text_pair={column}" for column in pair), "task.label=label"),
        *(f"task.labels={json.dumps(job['labels'])}", "task.epochs=1"),
        *(f"data.sequence_length={job['row']}", f"train.global_batch={job['rows']}"),
        *(f"train.micro_batch={job['rows']}", "train.precision=fp32", "optimizer.name=adamw", "optimizer.lr=5e-5"),
    ]  # fmt: skip
    with mock.patch.object(Trainer, "train", timed_loop), contextlib.suppress(SystemExit):
        cli.main(words)
    if not elapsed:
        raise SystemExit("megatfm finetune has not trained")
    return elapsed


TRAINERS = {"megatfm": train_by_megatfm, "trainer": train_by_transformers}
"""Side → its function."""

PARTS = {"compare": run_compare, "speed": run_speed}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        serve_side(json.loads(sys.argv[2]))
    else:
        common.run_part(__doc__, PARTS)
