"""Greedy generation from batched prompts against `transformers.generate`, on this CPU.

    python benchmarks/generation.py --rounds 10 --out benchmarks/results/DATE-generation.md

A GPT-2 of transformers with random weights is written to a folder, and megatfm opens that. Prompts of uneven lengths
are padded at their left; both sides have a key-value cache, take the likeliest token and never end early, so that they
do the same number of steps. The rounds are interleaved in one process, and the sides alternate who goes first. A figure
is the median over all rounds of (transformers' seconds / megatfm's seconds): above 1, megatfm is faster. Both must make
the same tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from common import cpu_name
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import __version__ as transformers_version

from megatfm.convert.load import load_model
from megatfm.inference.decoding import Prompts, generate


@dataclass(frozen=True)
class Case:
    """A batch: how many prompts, their lengths from and to, and how many tokens follow."""

    rows: int
    shortest: int
    longest: int
    new_tokens: int

    def prompts(self, vocabulary: int) -> list[Tensor]:
        """Draw prompts of evenly spread lengths."""
        random = torch.Generator().manual_seed(0)
        lengths = torch.linspace(self.shortest, self.longest, self.rows).round().int().tolist()
        return [torch.randint(1, vocabulary, (length,), generator=random) for length in lengths]


CASES = (Case(1, 32, 32, 64), Case(8, 16, 64, 64), Case(32, 16, 64, 32), Case(8, 200, 256, 16))


def sides(folder: Path, case: Case) -> dict[str, Callable[[], Tensor]]:
    """Return what each side does in a round; gives the new tokens [rows, new_tokens]."""
    reference = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model, prompts = load_model(folder), case.prompts(reference.config.vocab_size)
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros(case.rows, longest, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1

    def by_transformers() -> Tensor:
        made = reference.generate(
            ids, attention_mask=mask, max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens,
            do_sample=False, num_beams=1, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return made[:, longest:]

    def by_megatfm() -> Tensor:
        return generate(model, Prompts(prompts), max_tokens=case.new_tokens)[:, longest:]

    return {"transformers": by_transformers, "megatfm": by_megatfm}


def compare(folder: Path, case: Case, rounds: int) -> tuple[float, float, float]:
    """Return the median ratio, and the least and largest one. Raises AssertionError where the tokens differ."""
    both = sides(folder, case)
    tokens = {name: side() for name, side in both.items()}
    assert torch.equal(tokens["transformers"], tokens["megatfm"]), "the two make other tokens"
    ratios = []
    for number in range(rounds):
        seconds = {}
        for name in list(both)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            both[name]()
            seconds[name] = time.perf_counter() - start
        ratios.append(seconds["transformers"] / seconds["megatfm"])
    return statistics.median(ratios), min(ratios), max(ratios)


def main() -> None:
    """Run all cases, and print or write a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary, n_positions=512, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    lines = [
        f"# Greedy generation against transformers, {date.today()}",
        "",
        f"{cpu_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}, "
        f"transformers {transformers_version}. GPT-2 of {args.layers} layers, width {args.width}, {args.vocabulary:,} "
        "tokens, float32. "
        f"{args.rounds} interleaved rounds. Ratio: transformers' seconds / megatfm's, median (least to largest).",
        "",
        "| Prompts | Tokens of a prompt | New tokens | Ratio |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(config).save_pretrained(folder)
        for case in CASES:
            median, least, largest = compare(Path(folder), case, args.rounds)
            lines.append(
                f"| {case.rows} | {case.shortest} to {case.longest} | {case.new_tokens} | {median:.2f} ({least:.2f} to "
                f"{largest:.2f}) |"
            )
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
