"""Examples a second of `megatfm finetune` against Hugging Face's Trainer: same model, files, threads and precision.

    python benchmarks/texts.py debian texts
    python benchmarks/finetuning_speed.py texts --rounds 3 --out benchmarks/results

A BERT with random weights is fine-tuned on one pass over a file of examples of at most 128 tokens, by each side in a
process of its own; sides take turns, and alternate who goes first. The Trainer has its defaults: 8 examples a step,
padded to the longest of them. Ours packs examples into rows, whose number and length hold 8 examples on average. The
seconds are of the training loop and the checkpoint at its end, synced to disk on both sides, by the clock and by the
CPU; loading and tokenizing come before it. A figure is the median over rounds of (the Trainer's seconds / megatfm's
seconds): above 1, megatfm is faster.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import common

LENGTH, EXAMPLES_A_STEP, VOCABULARY = 128, 8, 4096
TASKS = {
    "synopses (short texts)": ("pairs", ("first",)),
    "synopsis and description (pairs)": ("pairs", ("first", "second")),
    "descriptions (long texts)": ("topics", ("text",)),
}
"""Row of the table → file, and the columns of its texts."""


def main() -> None:
    """Write the model and the files; time both sides in turns; write the page."""
    parser = common.make_parser(__doc__)
    parser.add_argument("texts", type=Path, nargs="?", help="folder that texts.py wrote")
    parser.add_argument("--examples", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", type=int, default=256, help="data.sequence_length that is aimed at, in tokens")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="rows of the table")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=common.make_output_folder, help="folder of the dated page")
    parser.add_argument("--job", help="what a process is to do, in JSON: for the script itself")
    args = parser.parse_args()
    if args.job:
        serve_side(json.loads(args.job))
        return
    import transformers

    page = common.Page(
        common.make_dated_path(args.out, "finetuning-speed.md"),
        f"# Fine-tuning against Hugging Face's Trainer, {common.today()}",
        "",
        f"`benchmarks/finetuning_speed.py`: a BERT of {args.layers} layers, width {args.width}, float32, one thread of "
        f"{common.get_cpu_name()}, transformers {transformers.__version__}; {args.examples} examples, at most {LENGTH} "
        f"tokens each, 8 a step on both sides, {args.rounds} rounds.",
        "",
        "| Texts | Tokens an example | Rows × tokens a step | Trainer / megatfm, CPU | lowest – highest | clock |",
        "|---|---|---|---|---|---|",
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer = write_model(work / "bert", args)
        for name in args.only:
            task, columns = TASKS[name]
            rows = read_rows(args.texts, task, 4 * args.examples)
            encoded = tokenizer(*([row[column] for row in rows] for column in columns)).input_ids
            fitting = [(row, len(ids)) for row, ids in zip(rows, encoded, strict=True) if len(ids) <= LENGTH]
            rows, lengths = zip(*fitting[: args.examples], strict=True)
            file = work / f"{task}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            mean = sum(lengths) / len(lengths)
            n_rows = max(1, round(EXAMPLES_A_STEP * mean / args.row))
            row = max(max(lengths), math.ceil(EXAMPLES_A_STEP * mean / n_rows))
            job = {
                "model": str(work / "bert"), "file": str(file), "columns": columns,
                "labels": sorted({row["label"] for row in rows}),
                "rows": n_rows, "row": row,
            }  # fmt: skip
            figures, ratios = compare_sides(job, args.rounds)
            page.add(
                f"| {name} | {mean:.0f} | {n_rows} × {row} | **{figures['cpu']:.2f}** | {min(ratios['cpu']):.2f} – "
                f"{max(ratios['cpu']):.2f} | {figures['wall']:.2f} |"
            )


def compare_sides(job: dict[str, Any], rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the summary of the Trainer's seconds / megatfm's by clock, and those of each round.

    Each side is a process that trains once to warm up, and then once a round.
    """
    sides = {side: common.SideProcess(__file__, {**job, "side": side}) for side in TRAINERS}
    ratios: dict[str, list[float]] = {clock: [] for clock in common.CLOCKS}
    for number in range(rounds):
        elapsed = {side: sides[side]() for side in common.alternate_order(TRAINERS, number)}
        for clock, values in ratios.items():
            values.append(elapsed["trainer"][clock] / elapsed["megatfm"][clock])
        print(f"round {number}: {elapsed}", file=sys.stderr, flush=True)
    for process in sides.values():
        process.close()
    return common.summarize(ratios), ratios


def serve_side(job: dict[str, Any]) -> None:
    """Train once for each line of standard input, and answer with the seconds; what a side prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(TRAINERS[job["side"]]({**job, "folder": folder})), file=answers, flush=True)


def read_rows(texts: Path, task: str, count: int) -> list[dict[str, str]]:
    """Return the first rows of a training file."""
    with (texts / f"{task}.train.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]


def write_model(folder: Path, args: argparse.Namespace) -> Any:
    """Write a BERT of random weights with a WordPiece tokenizer of the texts; return the tokenizer."""
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    words = BertWordPieceTokenizer()
    corpus = [row["text"] for row in read_rows(args.texts, "topics", 5000)]
    words.train_from_iterator(corpus, vocab_size=VOCABULARY, show_progress=False)
    folder.mkdir()
    words.save_model(str(folder))
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
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
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [json.loads(line) for line in Path(job["file"]).read_text(encoding="utf-8").splitlines()]
    columns = [[row[column] for row in rows] for column in job["columns"]]
    encoded = tokenizer(*columns)
    examples = [
        {**{key: encoded[key][i] for key in encoded}, "label": job["labels"].index(row["label"])}
        for i, row in enumerate(rows)
    ]
    model = AutoModelForSequenceClassification.from_pretrained(job["model"], num_labels=len(job["labels"]))
    arguments = TrainingArguments(job["folder"], num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), train_dataset=examples)  # type: ignore[arg-type]
    with Timer() as elapsed:
        trainer.train()
        sync_files(Path(job["folder"]))  # megatfm's checkpoints are
    return elapsed


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
        nonlocal elapsed
        with Timer() as elapsed:
            return loop(trainer, *args)

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


TRAINERS = {"trainer": train_by_transformers, "megatfm": train_by_megatfm}
"""Side → its function."""


class Timer:
    """Clock and CPU seconds of a block, as a dict that is filled at its end."""

    def __enter__(self) -> dict[str, float]:
        self.seconds: dict[str, float] = {}
        self.started = {name: clock() for name, clock in common.CLOCKS.items()}
        return self.seconds

    def __exit__(self, *_: object) -> None:
        self.seconds |= {name: clock() - self.started[name] for name, clock in common.CLOCKS.items()}


if __name__ == "__main__":
    main()
