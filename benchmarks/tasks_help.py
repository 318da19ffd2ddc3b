"""Does pretraining help on real tasks? Small models, pretrained here: fine-tuned, or shown solved examples.

    python benchmarks/texts.py debian texts
    python benchmarks/tasks_help.py finetune texts --work runs/tasks-help --out benchmarks/results [--only …]
    python benchmarks/tasks_help.py few-shot texts --work runs/few-shot --corpus runs/tasks-help/corpus \
        --out benchmarks/results

finetune: models fine-tuned after pretraining, against random weights. The texts are descriptions of Debian packages;
the labels are sections of the archive, or whether two texts belong to one package. A model pretrains on the training
texts without their labels; then every comparison fine-tunes each of its arms once per seed with `megatfm finetune`, all
with the same labels, passes and learning rate. Nothing is chosen by a result: the last checkpoint is evaluated on the
test file. A page lists the metric of each arm as mean ± sample standard deviation over seeds. Finished runs are kept in
WORK: the same command continues.

few-shot: zero to two solved examples in the prompt, against model size: which text goes on? Decoders of several widths
pretrain on the same descriptions, all on the same tokens. A question shows the beginning of a description of the test
file, and four texts that may go on: its own, and those of three packages of the same section. `megatfm evaluate` picks
the likeliest by byte; chance is 0.25. Shots are solved questions before it.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

# ------------------------------------------------------------------------------------------------- finetune

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


def add_finetune(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("texts", type=Path, help="folder that texts.py wrote")
    parser.add_argument("--work", type=common.make_output_folder, required=True, help="folder for runs")
    parser.add_argument("--out", type=common.make_output_folder, help="folder of the dated page")
    parser.add_argument("--page", default="tasks-help", help="its name, after the date")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--steps", type=int, default=2000, help="of pretraining, by Muon")
    parser.add_argument("--width", type=int, default=64, help="d_model")
    parser.add_argument("--heads", type=int, default=4, help="pairs are learnt with 2")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the tokenizer's vocabulary")
    parser.add_argument("--lr", type=float, default=1e-3, help="of fine-tuning, for all arms")
    return run_finetune


def run_finetune(args: argparse.Namespace) -> None:
    """Prepare, pretrain and compare, as far as it isn't done yet; rewrite the page after every run."""
    chosen = {name: COMPARISONS[name] for name in args.only}
    for comparison in chosen.values():
        write_labelled_subset(args.texts, args.work, comparison)
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
            print(f"{name}  {arm}: {run.result():.4f}", flush=True)
            common.write_text(common.make_dated_path(args.out, f"{args.page}.md"), format_page(scores, args))


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
        common.run_megatfm(
            *("finetune", "--from", str(args.work / arm.model), f"name={name}", f"run_dir={folder}"),
            *(f"task.train={get_subset_path(args.texts, args.work, comparison)}", *comparison.columns),
            f"task.test={args.texts / comparison.task}.test.jsonl",
            f"task.labels={json.dumps(read_labels(args.texts, comparison.task))}",
            *("task.too_long=truncate", f"task.epochs={comparison.epochs}", f"train.seed={seed}"),
            *("optimizer.name=adamw", f"optimizer.lr={args.lr}", "lr_schedule.name=linear"),
            *("lr_schedule.warmup_steps=20", "train.global_batch=16", "train.micro_batch=16"),
            *("data.sequence_length=64", "train.precision=fp32", "checkpoint.keep=1", "log.sinks=[]"),
            *arm.overrides,
        )
    metrics = json.loads((folder / "task.json").read_text())["sets"]["test"]["metrics"]
    return float(next(iter(metrics.values())))


def read_labels(texts: Path, task: str) -> list[str]:
    """Return the labels of the full training file: a subset may lack some."""
    lines = (texts / f"{task}.train.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted({json.loads(line)["label"] for line in lines})


def get_subset_path(texts: Path, work: Path, comparison: Comparison) -> Path:
    """Return the training file with as many labelled examples as the comparison takes."""
    if not comparison.n_labels:
        return texts / f"{comparison.task}.train.jsonl"
    return work / f"{comparison.task}.train.{comparison.n_labels}.jsonl"


def write_labelled_subset(texts: Path, work: Path, comparison: Comparison) -> None:
    """Draw the training file of a comparison, the same for every arm and seed."""
    path = get_subset_path(texts, work, comparison)
    if not path.exists():
        lines = (texts / f"{comparison.task}.train.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = random.Random(0).sample(lines, comparison.n_labels)
        path.write_text("\n".join(chosen) + "\n", encoding="utf-8")


def format_page(scores: Mapping[str, Mapping[str, Sequence[float]]], args: argparse.Namespace) -> str:
    """Format results as a page in Markdown."""
    lines = [
        f"# Fine-tuning with and without pretraining, {common.today()}",
        "",
        f"`benchmarks/tasks_help.py finetune`: models of 2 layers, d_model {args.width}, {args.heads} heads; "
        f"{args.steps} steps of pretraining by Muon on 64 rows of 64 tokens, on one thread of {common.get_cpu_name()}; "
        f"fine-tuning by AdamW at a learning rate of {args.lr:g} for all arms, on the first 64 tokens of each text, "
        "one subset of labels for all seeds, the last checkpoint. The metric is accuracy on the test file.",
        "",
        "| Comparison | Task, labels, passes | Arm | Mean ± sd | Seeds |",
        "|---|---|---|---|---|",
    ]
    for name, arms in scores.items():
        comparison = COMPARISONS[name]
        task = f"{comparison.task}, {comparison.n_labels or 'all'}, {comparison.epochs}"
        for arm, values in arms.items():
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            seeds = ", ".join(f"{value:.4f}" for value in values)
            lines.append(f"| {name} | {task} | {arm} | {statistics.mean(values):.4f}{spread} | {seeds} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- few-shot

WIDTHS = (32, 64, 128, 192)
SHOTS = (0, 1, 2)
CHARACTERS = 140
"""Longest beginning, and longest continuation."""


def add_few_shot(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("texts", type=Path, help="folder that texts.py wrote")
    parser.add_argument("--work", type=common.make_output_folder, required=True, help="folder of the runs")
    parser.add_argument("--corpus", type=Path, required=True, help="what the part finetune prepared: its WORK/corpus")
    parser.add_argument("--out", type=common.make_output_folder, help="folder of the dated page")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--questions", type=int, default=500)
    return run_few_shot


def run_few_shot(args: argparse.Namespace) -> None:
    """Pretrain as far as it isn't done, evaluate each size with each number of shots, write the page."""
    questions = list(make_questions(args.texts / "topics.test.jsonl"))[: args.questions]
    page = common.Page(
        common.make_dated_path(args.out, "few-shot.md"),
        f"# Which text goes on: shots against model size, {common.today()}",
        "",
        f"`benchmarks/tasks_help.py few-shot`: decoders of 2 layers, {args.steps} steps of 16 rows of 256 tokens, one "
        f"thread of {common.get_cpu_name()}; {len(questions)} questions with 4 choices of one section. Accuracy by "
        "bits per byte, with its 95 % interval; bits per byte of the right texts.",
        "",
        "| d_model | Shots | Accuracy | Interval | Bits per byte |",
        "|---|---|---|---|---|",
    )
    (args.work / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    for shots in SHOTS:
        (args.work / f"shots-{shots}.toml").write_text(
            'kind = "choice"\ndata = "questions.jsonl"\nprompt = "{{ beginning }}"\nchoices = "choices"\n'
            f'answer = "answer"\nshots = {shots}\n'
        )
    for width in WIDTHS:
        results = evaluate(args, pretrain_decoder(args, width))
        for shots in SHOTS:
            result = results[f"shots-{shots}"]
            accuracy, interval = (result["metrics"]["accuracy_per_byte"], result["intervals"]["accuracy_per_byte"])
            page.add(
                f"| {width} | {shots} | {accuracy:.3f} | {interval[0]:.3f} – {interval[1]:.3f} "
                f"| {result['metrics']['bits_per_byte']:.3f} |"
            )


def make_questions(path: Path) -> Iterator[dict[str, object]]:
    """Yield a question for each description that has a word boundary at its middle."""
    halves: dict[str, list[tuple[str, str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = " ".join(row["text"].split())
        middle = text.find(" ", min(len(text) // 2, CHARACTERS))
        if middle > 0:
            pair = text[:middle], text[middle + 1 :][:CHARACTERS]
            halves.setdefault(row["label"], []).append(pair)
    draw = random.Random(0)
    questions = []
    for pairs in halves.values():
        for i, (beginning, continuation) in enumerate(pairs):
            others = [text for j, (_, text) in enumerate(pairs) if j != i and text != continuation]
            if len(others) >= 3:
                choices = [continuation, *draw.sample(others, 3)]
                draw.shuffle(choices)
                questions.append({"beginning": beginning, "choices": choices, "answer": choices.index(continuation)})
    draw.shuffle(questions)
    yield from questions


def pretrain_decoder(args: argparse.Namespace, width: int) -> Path:
    """Pretrain a decoder, as far as it isn't done; return its run."""
    folder = args.work / f"decoder-{width}"
    if not (folder / "done").exists():
        common.run_megatfm(
            *("train", "quickstart", f"name=decoder-{width}", f"run_dir={folder}", "model.n_layers=2"),
            *(f"model.d_model={width}", f"model.ffn.d_ff={3 * width}", f"model.attention.n_heads={width // 16}"),
            *(f"data.train={args.corpus}/train", f'data.validation={{held-out="{args.corpus}/validation"}}'),
            *(f"data.tokenizer={args.corpus}/tokenizer.json", f"train.steps={args.steps}", "evaluate.every=500"),
            *('optimizer={name="adamw", lr=3e-3}', "lr_schedule.warmup_steps=100", "train.micro_batch=16"),
            *("train.precision=fp32", "log.sinks=[]"),
        )
        (folder / "done").touch()
    return folder


def evaluate(args: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Return the results of every number of shots."""
    tasks = [word for shots in SHOTS for word in ("--task", str(args.work / f"shots-{shots}.toml"))]
    common.run_megatfm("evaluate", str(run), *tasks)
    return json.loads((run / "evaluation_tasks.json").read_text())["tasks"]


PARTS = {"finetune": add_finetune, "few-shot": add_few_shot}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
