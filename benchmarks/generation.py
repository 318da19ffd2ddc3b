"""Greedy generation from batched prompts against `transformers.generate`, on this CPU.

    python benchmarks/generation.py --rounds 10 --out benchmarks/results/DATE-generation.md

A GPT-2 of transformers with random weights is written to a folder, and megatfm opens that. Prompts of uneven lengths
are padded at their left; both sides have a key-value cache, take the likeliest token and never end early, so that they
do the same number of steps. The rounds are interleaved in one process, and the sides alternate who goes first. A figure
is the median over all rounds of (transformers' seconds / megatfm's seconds): above 1, megatfm is faster; by the clock
on the wall, and by the processor's, which other work on the machine disturbs less. Both must make the same tokens.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Page, compare, get_cpu_name, make_output_file, make_parser, make_side, summarize, today
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import __version__ as transformers_version

from megatfm.convert.load import load_hf_model
from megatfm.inference.decoding import Prompts, generate


@dataclass(frozen=True)
class Case:
    """A batch: how many prompts, their lengths from and to, and how many tokens follow."""

    rows: int
    shortest: int
    longest: int
    new_tokens: int

    def draw_prompts(self, vocabulary: int) -> list[Tensor]:
        """Draw prompts of evenly spread lengths."""
        random = torch.Generator().manual_seed(0)
        lengths = torch.linspace(self.shortest, self.longest, self.rows).round().int().tolist()
        return [torch.randint(1, vocabulary, (length,), generator=random) for length in lengths]


CASES = (Case(8, 16, 64, 32), Case(32, 16, 64, 24), Case(8, 200, 256, 16), Case(1, 32, 32, 32))


def make_sides(folder: Path, case: Case) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each side, which returns the new tokens [rows, new_tokens]."""
    reference = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model, prompts = load_hf_model(folder), case.draw_prompts(reference.config.vocab_size)
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros(case.rows, longest, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1

    def by_transformers() -> Tensor:
        tokens = reference.generate(
            ids, attention_mask=mask, max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens,
            do_sample=False, num_beams=1, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return tokens[:, longest:]

    def by_megatfm() -> Tensor:
        return generate(model, Prompts(prompts), max_tokens=case.new_tokens)[:, longest:]

    return {"transformers": by_transformers, "megatfm": by_megatfm}


def measure_ratios(folder: Path, case: Case, rounds: int) -> dict[str, float]:
    """Return the median, the lowest and the highest ratio by each clock. Raises AssertionError where tokens differ."""
    both = make_sides(folder, case)
    assert torch.equal(both["transformers"](), both["megatfm"]()), "the sides generate different tokens"
    return summarize(compare(make_side(both["megatfm"]), make_side(both["transformers"]), rounds))


def main() -> None:
    """Run all cases, and print or write a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=make_output_file)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary, n_positions=512, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    page = Page(
        args.out,
        f"# Greedy generation against transformers, {today()}",
        "",
        f"{get_cpu_name()}, {torch.get_num_threads()} threads, other work on the machine: load "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. torch {torch.__version__}, "
        f"transformers {transformers_version}.",
        f"GPT-2 of {args.layers} layers, width {args.width}, {args.vocabulary:,} tokens, float32. {args.rounds} "
        "interleaved rounds.",
        "Ratio: transformers' seconds / megatfm's, median (lowest to highest) over rounds.",
        "",
        "| Prompts | Tokens of a prompt | New tokens | Processor's seconds | Seconds on the wall |",
        "|---|---|---|---|---|",
    )
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(config).save_pretrained(folder)
        for case in CASES:
            measured = measure_ratios(Path(folder), case, args.rounds)
            cells = [
                f"{measured[clock]:.2f} ({measured[f'{clock}_lowest']:.2f} to {measured[f'{clock}_highest']:.2f})"
                for clock in ("cpu", "wall")
            ]
            page.add(
                f"| {case.rows} | {case.shortest} to {case.longest} | {case.new_tokens} | {cells[0]} | {cells[1]} |"
            )


if __name__ == "__main__":
    main()
