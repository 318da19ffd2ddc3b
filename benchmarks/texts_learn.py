"""Small models of texts, trained here: shots against size in prompts, and translation by beams.

    python benchmarks/texts.py debian texts --language de
    python benchmarks/texts_learn.py few-shot texts --work runs/few-shot --corpus runs/tasks-help/corpus \
        --out benchmarks/results
    python benchmarks/texts_learn.py translation texts --work runs/translation --out benchmarks/results

few-shot: zero to two solved examples in the prompt, against model size: which text goes on? Decoders of several widths
pretrain on the same descriptions, all on the same tokens. A question shows the beginning of a description of the test
file, and four texts that may go on: its own, and those of three packages of the same section. `megatfm evaluate` picks
the likeliest by byte; chance is 0.25. Shots are solved questions before it.

translation: a small Transformer of 2017 learns to translate; BLEU and chrF against the number of beams and the length
penalty. English and German paragraphs of Debian's package descriptions, translated by people; packages of one source
lie in one split. An encoder-decoder with the parts of Vaswani et al. 2017 trains from random weights by `megatfm
finetune`; its best checkpoint by the validation file translates the test file once per search, by `megatfm predict`.
sacrebleu counts. A finished training run in WORK is kept: the same command continues.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

# ------------------------------------------------------------------------------------------------- few-shot

WIDTHS = (32, 64, 128, 192)
SHOTS = (0, 1, 2)
CHARACTERS = 140
"""Longest beginning, and longest continuation."""


@common.argument("texts", type=Path, help="folder that texts.py wrote")
@common.argument("--work", type=common.make_output_folder, required=True, help="folder of the runs")
@common.argument("--corpus", type=Path, required=True, help="what finetuning.py prepared: its WORK/corpus")
@common.argument("--out", type=common.make_output_folder, help="folder of the dated page")
@common.argument("--steps", type=int, default=1500)
@common.argument("--questions", type=int, default=500)
def run_few_shot(args: argparse.Namespace) -> None:
    """Pretrain as far as it isn't done, evaluate each size with each number of shots, write the page."""
    questions = list(make_questions(args.texts / "topics.test.jsonl"))[: args.questions]
    page = common.Page(
        common.make_dated_path(args.out, "few-shot.md"),
        "Which text goes on: shots against model size",
        f"`benchmarks/texts_learn.py few-shot`: decoders of 2 layers, {args.steps} steps of 16 rows of 256 tokens, one "
        f"thread of {common.get_cpu_name()}; {len(questions)} questions with 4 choices of one section. Accuracy by "
        "bits per byte, with its 95 % interval; bits per byte of the right texts.",
        table="| d_model | Shots | Accuracy | Interval | Bits per byte |",
    )
    common.write_rows(args.work / "questions.jsonl", questions)
    for shots in SHOTS:
        (args.work / f"shots-{shots}.toml").write_text(
            'kind = "choice"\ndata = "questions.jsonl"\nprompt = "{{ beginning }}"\nchoices = "choices"\n'
            f'answer = "answer"\nshots = {shots}\n'
        )
    for width in WIDTHS:
        results = evaluate(args, pretrain_decoder(args, width))
        for shots in SHOTS:
            result = results[f"shots-{shots}"]
            accuracy, (low, high) = (result[key]["accuracy_per_byte"] for key in ("metrics", "intervals"))
            bits = result["metrics"]["bits_per_byte"]
            page.add(f"| {width} | {shots} | {accuracy:.3f} | {low:.3f} – {high:.3f} | {bits:.3f} |")


def make_questions(path: Path) -> Iterator[dict[str, object]]:
    """Yield a question for each description that has a word boundary at its middle."""
    halves: dict[str, list[tuple[str, str]]] = {}
    for row in common.read_rows(path):
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
        heads = width // 16
        common.run_megatfm(
            *("train", "quickstart", f"name=decoder-{width}", f"run_dir={folder}", "model.n_layers=2"),
            *(f"model.d_model={width}", f"model.ffn.d_ff={3 * width}", f"model.attention.n_heads={heads}"),
            *(f"data.train={args.corpus}/train", f'data.validation={{held-out="{args.corpus}/validation"}}'),
            *(f"data.tokenizer={args.corpus}/tokenizer.json", f"train.steps={args.steps}", "evaluate.every=500"),
            *('optimizer={name="adamw", lr=3e-3}', "lr_schedule.warmup_steps=100", "train.micro_batch=16"),
            *("train.precision=fp32", "log.sinks=[]"),
        )
        (folder / "done").touch()
    return folder


def evaluate(args: argparse.Namespace, run: Path) -> dict[str, Any]:
    tasks = [word for shots in SHOTS for word in ("--task", str(args.work / f"shots-{shots}.toml"))]
    common.run_megatfm("evaluate", str(run), *tasks)
    return json.loads((run / "evaluation_tasks.json").read_text())["tasks"]


# ---------------------------------------------------------------------------------------------- translation

SEARCHES = ((1, 0.6), (2, 0.6), (4, 0.6), (8, 0.6), (16, 0.6), (4, 0.0), (4, 1.0))
"""Beams and length penalty of each row of the table."""
CONFIG = """\
name = "translation"
run_dir = "{folder}"

[model]
family = "encoder_decoder"
d_model = {width}
n_layers = {layers}
dropout = {dropout}
attention = {{ n_heads = 4 }}
ffn = {{ d_ff = {d_ff}, activation = "relu", bias = true }}
norm = {{ name = "layer_norm", placement = "post" }}
position = {{ name = "sinusoidal" }}
embedding = {{ scale = "d_model^1/2" }}
lm_head = {{ label_smoothing = 0.1 }}
init = {{ name = "xavier" }}

[task]
form = "generation"
train = "{texts}/translation.train.jsonl"
validation = "{texts}/translation.validation.jsonl"
text = "source"
label = "target"
too_long = "truncate"
epochs = {epochs}

[data]
tokenizer = "{corpus}/tokenizer.json"
sequence_length = 128
target_length = 128

[optimizer]
name = "adamw"
lr = 2e-3
betas = [0.9, 0.98]
weight_decay = 0.0

[lr_schedule]
name = "inverse_sqrt"
warmup_steps = 400

[train]
global_batch = 16
micro_batch = 16
precision = "{precision}"

[checkpoint]
keep = 1

[log]
sinks = []
"""


@common.argument("texts", type=Path, help="folder that texts.py wrote")
@common.argument("--work", type=common.make_output_folder, required=True, help="folder of the run")
@common.argument("--out", type=common.make_output_folder, help="folder of the dated page")
@common.argument("--epochs", type=int, default=4)
@common.argument("--rows", type=int, default=200, help="of the test file that are translated")
@common.argument("--width", type=int, default=128, help="d_model")
@common.argument("--layers", type=int, default=2, help="of encoder and decoder each")
@common.argument("--dropout", type=float, default=0.1)
@common.argument("--precision", default="fp32")
def run_translation(args: argparse.Namespace) -> None:
    """Train as far as it isn't done, translate by each search, and write the page."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    page = common.Page(
        common.make_dated_path(args.out, "translation.md"),
        "English to German by a small Transformer",
        f"`benchmarks/texts_learn.py translation`: {args.layers} + {args.layers} layers, d_model {args.width}, dropout "
        f"{args.dropout}, label smoothing 0.1, {args.epochs} passes over the training file, one thread of "
        f"{common.get_cpu_name()}; the first {args.rows} rows of the test file. Seconds are of the "
        "whole command, on a machine with other work.",
        table="| Beams | Length penalty | BLEU | chrF | Length of output / reference | Seconds |",
    )
    train_translator(args, prepare_both_languages(args))
    rows = common.read_rows(args.texts / "translation.test.jsonl")[: args.rows]
    test = args.work / "test.jsonl"
    common.write_rows(test, rows)
    references = [row["target"] for row in rows]
    for beams, penalty in SEARCHES:
        answers, elapsed = translate(args.work, test, beams, penalty)
        score = BLEU().corpus_score(answers, [references])
        chrf = CHRF().corpus_score(answers, [references]).score
        page.add(f"| {beams} | {penalty} | {score.score:.2f} | {chrf:.2f} | {score.ratio:.3f} | {elapsed:.0f} |")


def prepare_both_languages(args: argparse.Namespace) -> Path:
    """Make a tokenizer of both languages, as far as it isn't done; return its corpus."""
    corpus = args.work / "corpus"
    if not (corpus / "tokenizer.json").exists():
        pairs = common.read_rows(args.texts / "translation.train.jsonl")
        both = args.work / "texts" / "both.jsonl"
        common.write_rows(both, ({"text": text} for pair in pairs for text in pair.values()))
        common.run_megatfm(
            *("prep", "quickstart-data", f"out={corpus}", f"read.folder={both.parent}"),
            *('read.include=["both.jsonl"]', "split.validation=0.01"),
            *("tokenizer.kind=byte-bpe", "tokenizer.vocab_size=6000"),
        )
    return corpus


def train_translator(args: argparse.Namespace, corpus: Path) -> None:
    """Train, as far as it isn't done."""
    folder = args.work / "model"
    if not (folder / "task.json").exists():
        config = args.work / "translation.toml"
        config.write_text(CONFIG.format(**vars(args), folder=folder, corpus=corpus, d_ff=4 * args.width))
        common.run_megatfm("finetune", str(config))


def translate(work: Path, test: Path, beams: int, penalty: float) -> tuple[list[str], float]:
    """Translate the test file; return the texts and the seconds of the command."""
    out = work / f"beams-{beams}-{penalty}.jsonl"
    started = time.perf_counter()
    common.run_megatfm(
        *("predict", str(work / "model"), str(test), "--out", str(out)),
        *("--beams", str(beams), "--length-penalty", str(penalty)),
    )
    elapsed = time.perf_counter() - started
    return [row["answer"] for row in common.read_rows(out)], elapsed


PARTS = {"few-shot": run_few_shot, "translation": run_translation}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
