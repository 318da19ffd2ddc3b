"""A small GPT, BERT, T5 and ELECTRA learn on the quickstart's corpus: each is its preset, made small.

    megatfm prep quickstart-data
    python benchmarks/zoo_learns.py --out benchmarks/results/DATE-zoo-learns.md

The table holds each term of the loss on held-out text, in nats, after STEPS steps. A cross-entropy over the vocabulary
is to be seen beside the entropy of the held-out tokens' frequencies, which a model reaches that has learnt nothing
else. The corpus is the standard library of the Python that made it, so figures differ between machines. The curves
that must repeat are those of `tests/golden`, on text that is the same everywhere.
"""

import json
import subprocess
import sys
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory

import common
import numpy as np
import torch

from megatfm.corpus.corpus import Corpus

SMALL = (
    "model.vocab_size=4096", "model.d_model=64", "model.n_layers=2", "model.attention.n_heads=2", "model.ffn.d_ff=256",
    "model.dropout=0", "model.attention.dropout=0", "data.sequence_length=128", "optimizer.lr=3e-3",
    "lr_schedule.warmup_steps=50", "train.global_batch=16", "train.micro_batch=16", "train.precision=fp32",
    "log.sinks=[]",
)  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2-124m": (),
    "bert-base": (),
    "t5-base": ("data.target_length=64",),
    "electra-small": (
        "model.embedding.dim=32", "model.generator.d_model=32", "model.generator.d_ff=128",
        "model.generator.n_heads=1",
    ),
}  # fmt: skip


def compute_entropy(corpus: Path) -> float:
    """Entropy of the frequencies of a corpus's tokens, in nats."""
    opened = Corpus.open(corpus)
    counts = sum(
        np.bincount(tokens, minlength=4096)
        for number in range(opened.n_blocks)
        for _, tokens in opened.read_block(number)
    )
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def make_overrides(preset: str, corpora: Path, steps: int, run: Path) -> list[str]:
    """Settings of a run, as on the command line."""
    return [
        *SMALL, *MODELS[preset], f"train.steps={steps}", f"run_dir={run}", f"data.train={corpora}/train",
        f"data.validation={{ held-out = '{corpora}/validation' }}", f"data.tokenizer={corpora}/tokenizer.model",
    ]  # fmt: skip


def train_and_evaluate(preset: str, corpora: Path, steps: int, run: Path) -> dict[str, float]:
    """Train in a process of its own; each term of the loss on held-out text after the last step."""
    words = make_overrides(preset, corpora, steps, run)
    subprocess.run([sys.executable, "-m", "megatfm", "train", preset, *words], check=True)
    result = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["evaluation"]["held-out"]
    return result.get("terms") or {"loss": result["loss"]}


def main() -> None:
    """Train all, print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("corpora/quickstart"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=common.make_output_file)
    args = parser.parse_args()
    corpora, rows = args.corpus.resolve(), list[str]()
    known = compute_entropy(corpora / "validation")
    with TemporaryDirectory() as folder:
        for preset in MODELS:
            for term, loss in train_and_evaluate(preset, corpora, args.steps, Path(folder) / preset).items():
                rows.append(f"| `{preset}` | {term} | {loss:.3f} |")
    page = "\n".join(
        [
            f"# Small models of the zoo on the quickstart's corpus, {common.today()}",
            "",
            f"`python benchmarks/zoo_learns.py --steps {args.steps}`, torch {torch.__version__}; the text is the",
            f"standard library of Python {python_version()}. The held-out tokens' frequencies alone: {known:.3f} nats.",
            "",
            "| Preset, made small | Term | Held-out loss, nats |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )
    print(page)
    common.write_text(args.out, page)


if __name__ == "__main__":
    main()
