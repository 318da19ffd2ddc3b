"""Zero to two solved examples in the prompt, against model size: which text goes on? Decoders pretrained here.

    python benchmarks/debian_texts.py texts
    python benchmarks/few_shot.py texts --work runs/few-shot --out benchmarks/results

Decoders of several widths pretrain on the descriptions of Debian's packages, all on the same tokens. A question shows
the beginning of a description of the test file, and four texts that may go on: its own, and those of three packages of
the same section. `megatfm evaluate` picks the likeliest by byte; chance is 0.25. Shots are solved questions before it.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

WIDTHS = (32, 64, 128, 192)
SHOTS = (0, 1, 2)
CHARACTERS = 140
"""Longest beginning, and longest continuation."""


def main() -> None:
    """Pretrain as far as it isn't done, evaluate each size with each number of shots, write the page."""
    parser = common.make_parser(__doc__)
    parser.add_argument("texts", type=Path, help="folder that debian_texts.py wrote")
    parser.add_argument("--work", type=common.make_output_folder, required=True, help="folder of the runs")
    parser.add_argument("--corpus", type=Path, required=True, help="what tasks_help.py prepared: its WORK/corpus")
    parser.add_argument("--out", type=common.make_output_folder, help="folder of the dated page")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--questions", type=int, default=500)
    args = parser.parse_args()
    questions = list(make_questions(args.texts / "topics.test.jsonl"))[: args.questions]
    page = common.Page(
        common.make_dated_path(args.out, "few-shot.md"),
        f"# Which text goes on: shots against model size, {common.today()}",
        "",
        f"`benchmarks/few_shot.py`: decoders of 2 layers, {args.steps} steps of 16 rows of 256 tokens, one thread "
        f"of {common.get_cpu_name()}; {len(questions)} questions with 4 choices of one section. Accuracy by bits per "
        "byte, with its 95 % interval; bits per byte of the right texts.",
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
        results = evaluate(args, pretrain(args, width))
        for shots in SHOTS:
            result = results[f"shots-{shots}"]
            accuracy, interval = (
                result["metrics"]["accuracy_per_byte"],
                result["intervals"]["accuracy_per_byte"],
            )
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


def pretrain(args: argparse.Namespace, width: int) -> Path:
    """Pretrain a decoder, as far as it isn't done; return its run."""
    folder = args.work / f"decoder-{width}"
    if not (folder / "done").exists():
        common.run_megatfm(
            *("train", "quickstart", f"name=decoder-{width}", f"run_dir={folder}", "model.n_layers=2"),
            *(
                f"model.d_model={width}",
                f"model.ffn.d_ff={3 * width}",
                f"model.attention.n_heads={width // 16}",
            ),
            *(f"data.train={args.corpus}/train", f'data.validation={{held-out="{args.corpus}/validation"}}'),
            *(
                f"data.tokenizer={args.corpus}/tokenizer.json",
                f"train.steps={args.steps}",
                "evaluate.every=500",
            ),
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


if __name__ == "__main__":
    main()
