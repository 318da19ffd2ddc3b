"""A small Transformer of 2017 learns to translate: BLEU and chrF against the number of beams and the length penalty.

    python benchmarks/texts.py debian texts --language de
    python benchmarks/translation.py texts --work runs/translation --out benchmarks/results

English and German paragraphs of Debian's package descriptions, translated by people; packages of one source lie in one
split. An encoder-decoder with the parts of Vaswani et al. 2017 trains from random weights by `megatfm finetune`; its
best checkpoint by the validation file translates the test file once per search, by `megatfm predict`. sacrebleu counts.
A finished training run in WORK is kept: the same command continues.
"""

import argparse
import json
import time
from pathlib import Path

import common
from sacrebleu.metrics import BLEU, CHRF

SEARCHES = ((1, 0.6), (2, 0.6), (4, 0.6), (8, 0.6), (16, 0.6), (4, 0.0), (4, 1.0))
"""Beams and length penalty of each row of the table."""


def main() -> None:
    """Train as far as it isn't done, translate by each search, and write the page."""
    parser = common.make_parser(__doc__)
    parser.add_argument("texts", type=Path, help="folder that texts.py wrote")
    parser.add_argument("--work", type=common.make_output_folder, required=True, help="folder of the run")
    parser.add_argument("--out", type=common.make_output_folder, help="folder of the dated page")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=200, help="of the test file that are translated")
    parser.add_argument("--width", type=int, default=128, help="d_model")
    parser.add_argument("--layers", type=int, default=2, help="of encoder and decoder each")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    page = common.Page(
        common.make_dated_path(args.out, "translation.md"),
        f"# English to German by a small Transformer, {common.today()}",
        "",
        f"`benchmarks/translation.py`: {args.layers} + {args.layers} layers, d_model {args.width}, dropout "
        f"{args.dropout}, label smoothing 0.1, {args.epochs} passes over the training file, one thread of "
        f"{common.get_cpu_name()}; the first {args.rows} rows of the test file. Seconds are of the "
        "whole command, on a machine with other work.",
        "",
        "| Beams | Length penalty | BLEU | chrF | Length of output / reference | Seconds |",
        "|---|---|---|---|---|---|",
    )
    train(args)
    lines = (args.texts / "translation.test.jsonl").read_text(encoding="utf-8").splitlines()[: args.rows]
    test = args.work / "test.jsonl"
    test.write_text("\n".join(lines) + "\n", encoding="utf-8")
    references = [json.loads(line)["target"] for line in lines]
    for beams, penalty in SEARCHES:
        answers, elapsed = translate(args.work, test, beams, penalty)
        score = BLEU().corpus_score(answers, [references])
        chrf = CHRF().corpus_score(answers, [references]).score
        page.add(f"| {beams} | {penalty} | {score.score:.2f} | {chrf:.2f} | {score.ratio:.3f} | {elapsed:.0f} |")


def train(args: argparse.Namespace) -> None:
    """Make a tokenizer of both languages and train, as far as it isn't done."""
    corpus, folder = args.work / "corpus", args.work / "model"
    if not (corpus / "tokenizer.json").exists():
        lines = (args.texts / "translation.train.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [{"text": text} for line in lines for text in json.loads(line).values()]
        both = args.work / "texts" / "both.jsonl"
        both.parent.mkdir(exist_ok=True)
        both.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in texts) + "\n", encoding="utf-8")
        common.run_megatfm(
            *("prep", "quickstart-data", f"out={corpus}", f"read.folder={both.parent}"),
            *('read.include=["both.jsonl"]', "split.validation=0.01"),
            *("tokenizer.kind=byte-bpe", "tokenizer.vocab_size=6000"),
        )
    if (folder / "task.json").exists():
        return
    config = args.work / "translation.toml"
    config.write_text(
        f"""name = "translation"
run_dir = "{folder}"

[model]
family = "encoder_decoder"
d_model = {args.width}
n_layers = {args.layers}
dropout = {args.dropout}
attention = {{ n_heads = 4 }}
ffn = {{ d_ff = {4 * args.width}, activation = "relu", bias = true }}
norm = {{ name = "layer_norm", placement = "post" }}
position = {{ name = "sinusoidal" }}
embedding = {{ scale = "d_model^1/2" }}
lm_head = {{ label_smoothing = 0.1 }}
init = {{ name = "xavier" }}

[task]
form = "generation"
train = "{args.texts}/translation.train.jsonl"
validation = "{args.texts}/translation.validation.jsonl"
text = "source"
label = "target"
too_long = "truncate"
epochs = {args.epochs}

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
precision = "{args.precision}"

[checkpoint]
keep = 1

[log]
sinks = []
"""
    )
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
    return [json.loads(line)["answer"] for line in out.read_text(encoding="utf-8").splitlines()], elapsed


if __name__ == "__main__":
    main()
