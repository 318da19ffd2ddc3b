"""The worth of context to a trained decoder: the loss of the same held-out tokens by how many before them it sees.

    megatfm launch quickstart --nproc 2 parallel.zero=0
    python benchmarks/context_worth.py runs/quickstart --corpus corpora/quickstart/validation --out benchmarks/results

For a context of c tokens the model reads rows of c, each beginning c/2 after the one before. The second half of their
targets counts, which have c/2 + 1 to c tokens before them: every token of a document counts once, and the same ones
at each c (Khandelwal et al. 2018 cut contexts likewise). Targets are told apart by how far back the
same token occurred last: where that is far, far context can pay; where it never did, copying can't. Nats a token.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

from megatfm import load
from megatfm.corpus.corpus import Corpus

SHORTEST = 16
AT_ONCE = 4096
"""Tokens of a forward pass."""


def list_contexts(longest: int) -> list[int]:
    """Return context lengths, each twice the one before."""
    return [2**n for n in range(20) if SHORTEST <= 2**n <= longest]


def find_distances(text: Tensor) -> Tensor:
    """Return the distance to the last occurrence of the same token, int64 [n]; 0 if there is none."""
    last: dict[int, int] = {}
    back = torch.zeros(len(text), dtype=torch.int64)
    for position, token in enumerate(text.tolist()):
        back[position] = position - last.get(token, position)
        last[token] = position
    return back


def compute_losses(model: nn.Module, text: Tensor, context: int, first: int, end: int) -> Tensor:
    """Return the losses of the tokens `first` … `end - 1` of a text [n], with context/2 + 1 to `context` tokens before.

    first - 1 and end - 1 must be multiples of context/2, and first > context.
    """
    half = context // 2
    rows = text[first - 1 - half : end].unfold(0, context + 1, half)
    parts = []
    for some_rows in rows.split(max(AT_ONCE // context, 1)):
        with torch.no_grad():
            logits = model(tokens=some_rows[:, :-1].contiguous()).logits.float()
        predicted_and_targets = logits[:, half:].transpose(1, 2), some_rows[:, half + 1 :]
        parts.append(nn.functional.cross_entropy(*predicted_and_targets, reduction="none").flatten())
    return torch.cat(parts)


def judge(model: nn.Module, texts: Iterator[Tensor], longest: int) -> dict[str, Any]:
    """Return the mean loss by context length, of all targets and by the distance to their last occurrence."""
    bounds = [0, *list_contexts(longest // 2)]
    all_losses: dict[int, list[Tensor]] = {context: [] for context in list_contexts(longest)}
    back = []
    for text in texts:
        first = longest + 1
        end = (len(text) - 1) // (longest // 2) * (longest // 2) + 1
        if end <= first:
            continue
        back.append(find_distances(text)[first:end])
        for context, losses_of_context in all_losses.items():
            losses_of_context.append(compute_losses(model, text, context, first, end))
    far = torch.cat(back)
    groups = {"all": far >= 0}
    groups |= {f"{low + 1} to {high} back": (far > low) & (far <= high) for low, high in pairwise(bounds)}
    groups[f"more than {bounds[-1]} back"] = far > bounds[-1]
    groups["never"] = far == 0
    return {
        name: {
            "of": int(mask.sum()),
            "nats": {
                c: round(float(torch.cat(losses_of_context)[mask].mean()), 3)
                for c, losses_of_context in all_losses.items()
            },
        }
        for name, mask in groups.items()
        if mask.any()
    }


def iter_documents(corpus: Path) -> Iterator[Tensor]:
    """Yield the tokens of each document."""
    opened = Corpus.open(corpus)
    for block in range(opened.n_blocks):
        for _, tokens in opened.read_block(block):
            yield torch.tensor(tokens.astype("int64"))


def main(arguments: list[str] | None = None) -> None:
    """Judge runs one after the other."""
    parser = common.make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--corpus", type=Path, required=True, help="held-out documents, prepared")
    parser.add_argument("--longest", type=int, default=256, help="the longest context, a power of two")
    parser.add_argument("--out", type=common.make_output_folder, help="folder for the result of the day")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "date": common.today(),
        "machine": f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}",
        "runs": {},
    }
    for run in args.runs:
        model = load(run).module
        parameters = sum(p.numel() for p in model.parameters())
        judgement = judge(model, iter_documents(args.corpus), args.longest)
        result["runs"][run.name] = {"parameters": parameters, **judgement}
        print(run.name, json.dumps(judgement, indent=1), flush=True)
        common.write_json(common.make_dated_path(args.out, "context-worth.json"), result)


if __name__ == "__main__":
    main()
