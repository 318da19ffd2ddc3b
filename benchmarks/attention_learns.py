"""Which attention patterns learn to look far back: key–value recall, a task made by rule.

    python benchmarks/attention_learns.py --length 128 --steps 400 --out benchmarks/results

A row holds FACTS facts, each a key and its value, at random places among filler tokens, and ends in as many
questions, each a key whose value is to be said. Facts within a question's reach can be answered, whatever lies
further back can't. Small models of 2 blocks, each step on new rows; the share of right answers is of rows that were
not trained on. A guess is right once in VALUES times. Decoders see earlier tokens alone, encoders all.
"""

import argparse
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build

FACTS, VALUES, FILLERS = 8, 8, 8
VOCABULARY = FACTS * VALUES + FACTS + FILLERS
SMALL = {
    "vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 128,
    "norm.name": "rms_norm", "init.name": "xavier",
}  # fmt: skip


def patterns(length: int) -> dict[str, dict[str, Any]]:
    """Models by name; a window is a sixteenth of the row, so that two blocks of them reach an eighth of it."""
    near = max(length // 16, 4)
    learned = {"position.name": "learned", "position.max_positions": length}
    encoder = {"family": "encoder", "head.bias": True, **learned}

    def of(model: dict[str, Any], **pattern: Any) -> dict[str, Any]:
        return {**model, "attention.pattern": pattern}

    return {
        "full": {},
        "window": of({}, name="window", width=near),
        "window, then full": {
            "blocks": ["near", "all"], "block.near.attention.pattern": {"name": "window", "width": near},
            "block.all": {},
        },
        "dilated": of({}, name="window", width=near, step=8),
        "chunked": of({}, name="chunked", size=near),
        "strided": of({}, name="strided", stride=near),
        "fixed": of({}, name="fixed", stride=near, summary=4),
        "bigbird of a decoder": of({}, name="bigbird", block=max(near // 4, 2), random=3),
        "local, then compressed": {
            **learned, "blocks": ["local", "compressed"],
            "block.local.attention.pattern": {"name": "chunked", "size": near},
            "block.compressed.attention.name": "compressed",
        },
        "full, encoder": encoder,
        "bigbird": of(encoder, name="bigbird", block=max(near // 4, 2), random=3),
        "longformer": of(encoder, name="longformer", width=near, tokens=[0, 1, 2, 3]),
        "linformer": {**encoder, "attention.name": "linformer", "attention.length": length,
                      "attention.rank": max(length // 4, 8), "attention.share": "headwise"},
    }  # fmt: skip


def rows(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [count, length]; −100 where nothing is asked."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.stack([torch.randperm(FACTS, generator=random) for _ in range(count)])
    values = torch.randint(VALUES, (count, FACTS), generator=random)
    places = torch.stack([torch.randperm(length - FACTS, generator=random)[:FACTS] for _ in range(count)])
    tokens = torch.randint(VOCABULARY - FILLERS, VOCABULARY, (count, length), generator=random)
    tokens.scatter_(1, places, keys * VALUES + values)
    asked = torch.stack([torch.randperm(FACTS, generator=random) for _ in range(count)])
    tokens[:, -FACTS:] = FACTS * VALUES + keys.gather(1, asked)
    targets = torch.full_like(tokens, -100)
    targets[:, -FACTS:] = values.gather(1, asked)
    return tokens, targets


def learnt(model: dict[str, Any], length: int, steps: int, batch: int) -> float:
    """The share of questions that are answered after training."""
    made = build(ModelConfig.of({**SMALL, **model})).train()
    initialise(made, 1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        tokens, targets = rows(batch, length, step)
        loss = torch.stack([*made(tokens, targets=targets).losses.values()]).sum() / (targets >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    tokens, targets = rows(32, length, 2**40)
    with torch.no_grad():
        said = made.eval()(tokens).logits[:, -FACTS:].argmax(-1)
    return float((said == targets[:, -FACTS:]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, model in patterns(options.length).items():
        if options.only and name not in options.only:
            continue
        begun = time.process_time()
        share = learnt(model, options.length, options.steps, options.batch)
        found[name] = {"right": round(share, 3), "cpu_seconds": round(time.process_time() - begun, 1)}
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}",
        "length": options.length, "steps": options.steps, "batch": options.batch, "recall": found,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        (options.out / f"{result['date']}-attention-learns.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
