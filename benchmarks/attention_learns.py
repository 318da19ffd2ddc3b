"""Which attention patterns learn to look far back, and what a longer context is worth: small models on a CPU.

    python benchmarks/attention_learns.py listops --out benchmarks/results
    python benchmarks/attention_learns.py recall --out benchmarks/results
    python benchmarks/attention_learns.py text --out benchmarks/results [--folder TEXTS]

listops: expressions of 500 to 2,000 tokens as Long Range Arena draws them, ten classes, packed into rows of 4,096
tokens, after shorter ones of 10 to 100 and of 100 to 500. recall: 8 facts in rows of 8,192 tokens, trained on rows of
64 for half of the steps and then on ever longer ones, and judged by how far back the fact lies. text: bytes of
Python's standard library or of other files, and the loss by how many bytes come before. Models of 2 blocks, 64
channels and 4 heads (text: 4 blocks of 96), each pattern alone; the budget is a number of steps, each on new rows of
4,096 (listops), 8,192 (recall) or 2,048 tokens (text, four rows), the same for all. Figures are of rows that were not
trained on. A result holds the models of all runs of its day.
"""

import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from attention_tasks import IGNORED, LISTOPS, Batch, Expressions, ListOps, Recall, Text
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build

Models = dict[str, dict[str, Any]]
Figures = dict[str, Any]
SMALL = {
    "d_model": 64, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 128, "norm.name": "rms_norm",
    "init.name": "xavier",
}  # fmt: skip
REPORT_EVERY = 50
"""Steps between two lines on what is going on."""


GROW = (0.6, 0.25, 0.15)
"""Parts of the steps that are taken on short rows or expressions, on longer ones, and on those that are judged."""


class Sizes(NamedTuple):
    """Amount of work: tokens of a row, steps, rows that are judged; seed: of weights and rows."""

    length: int
    steps: int
    judged: int
    seed: int = 1

    @property
    def first(self) -> int:
        """Return the seed of the first row; runs of different seeds share no row."""
        return (self.seed - 1) * 2**20


FULL_SIZE = {"listops": Sizes(4096, 120, 60), "recall": Sizes(8192, 240, 64), "text": Sizes(2048, 100, 16)}


def make_models(length: int, near: int, positions: str) -> Models:
    """Return overrides of each model by name.

    length: tokens of the longest row; near: width of windows; positions: of encoders and of compressed attention.
    """
    elsewhere = {"position.name": positions}
    if positions == "learned":
        elsewhere["position.max_positions"] = length
    encoder = {"family": "encoder", "lm_head.bias": True, **elsewhere}

    def with_pattern(model: dict[str, Any], **pattern: Any) -> dict[str, Any]:
        return {**model, "attention.pattern": pattern}

    blocks = {"block_size": max(near // 4, 2), "n_random_blocks": 3}
    window = {"name": "window", "width": near}
    return {
        "full": {},
        "window": with_pattern({}, **window),
        "window, then full": {
            "layer_types": ["near", "all"], "layer_type.near.attention.pattern": window, "layer_type.all": {},
        },
        "dilated": with_pattern({}, **window, dilation=8),
        "chunked": with_pattern({}, name="chunked", size=near),
        "chunked, then full": {
            "layer_types": ["near", "all"], "layer_type.near.attention.pattern": {"name": "chunked", "size": near},
            "layer_type.all": {},
        },
        "strided": with_pattern({}, name="strided", stride=near),
        "fixed": with_pattern({}, name="fixed", stride=near, n_summary_tokens=4),
        "bigbird of a decoder": with_pattern({}, name="bigbird", **blocks),
        "local, then compressed": {
            **elsewhere, "layer_types": ["local", "compressed"],
            "layer_type.local.attention.pattern": {"name": "chunked", "size": near},
            "layer_type.compressed.attention.name": "compressed",
        },
        "full, encoder": encoder,
        "window, encoder": with_pattern(encoder, **window),
        "bigbird": with_pattern(encoder, name="bigbird", **blocks),
        "longformer": with_pattern(encoder, name="longformer", width=near, global_tokens=[0]),
        "linformer": {**encoder, "attention.name": "linformer", "attention.max_length": length,
                      "attention.projected_length": max(length // 32, 8), "attention.share": "headwise"},
    }  # fmt: skip


def train(model: dict[str, Any], batches: Iterator[Batch], sizes: Sizes, rate: float = 3e-3) -> nn.Module:
    """Train a model by AdamW, warmed up over a tenth of the steps."""
    steps = sizes.steps
    network = build(ModelConfig.from_dotted({**SMALL, **model})).train()
    initialise(network, sizes.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    recent: list[float] = []
    for step, batch in enumerate(islice(batches, steps), 1):
        asked = (batch["targets"] != IGNORED).sum()
        loss = torch.stack([*network(**batch).losses.values()]).sum() / asked
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[1 - REPORT_EVERY :], loss.item()]
        if step % REPORT_EVERY == 0:
            print(f"  step {step}: loss {sum(recent) / len(recent):.3f}", file=sys.stderr, flush=True)
    return network.eval()


def compute_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [questions, classes] at targets that aren't ignored."""
    inputs = {name: values for name, values in batch.items() if name != "targets"}
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits[batch["targets"] != IGNORED]


def measure_accuracy(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float | int]:
    """Return the share of questions that are answered correctly, and their number."""
    right = asked = 0
    for batch in batches:
        targets = batch["targets"][batch["targets"] != IGNORED]
        right += int((compute_logits(model, batch).argmax(-1) == targets).sum())
        asked += len(targets)
    return {"right": round(right / asked, 3), "of": asked}


def learn_listops(only: list[str], sizes: Sizes) -> Iterator[tuple[str, Figures]]:
    """Yield the accuracy of each pattern, trained on expressions that grow, and that of guesses without a model."""
    bounds = ((10, 100), (100, 500), (500, 2000)) if sizes.length > 2001 else ((5, 20), (10, 30), (20, 60))
    stages = [(ListOps(sizes.length, Expressions(*bound)), part) for bound, part in zip(bounds, GROW, strict=True)]
    task = stages[-1][0]
    yield "guesses", task.measure_guesses(sizes.judged * 50, 2)
    for name, model in make_models(sizes.length, max(sizes.length // 32, 8), "learned").items():
        if only and name not in only:
            continue
        encoder = "family" in model
        start = time.process_time()
        batches = chain.from_iterable(
            islice(stage.iter_batches(sizes.first + i, encoder=encoder), round(sizes.steps * part))
            for i, (stage, part) in enumerate(stages)
        )
        network = train({**model, "vocab_size": LISTOPS}, batches, sizes)
        spent = time.process_time() - start
        shares = {
            "{} to {} tokens".format(*bound): measure_accuracy(
                network, islice(stage.iter_batches(9, encoder=encoder), max(sizes.judged // (3 - i) ** 2, 1))
            )
            for i, (bound, (stage, _)) in enumerate(zip(bounds, stages, strict=True))
        }
        yield name, {**shares, "seconds": spent}


def learn_recall(only: list[str], sizes: Sizes) -> Iterator[tuple[str, Figures]]:
    """Yield each pattern's accuracy in the longest rows by distance, trained on rows that double.

    No model has positions: facts don't depend on them, and rotations would have to be learnt for each length.
    """
    task, near = Recall(), sizes.length // 16
    lengths = [2**n for n in range(6, 32) if 2**n < sizes.length]
    short, steps_a_length = sizes.steps // 2, sizes.steps // 2 // (len(lengths) + 1)
    course = [lengths[0]] * short + [length for length in lengths[1:] for _ in range(steps_a_length)]
    course += [sizes.length] * (sizes.steps - len(course))
    for name, model in make_models(sizes.length, near, "none").items():
        if only and name not in only:
            continue
        start = time.process_time()
        batches = (
            task.draw_batch(sizes.length // length, length, sizes.first + step) for step, length in enumerate(course)
        )
        settings = {**model, "vocab_size": task.vocabulary, "position.name": "none"}
        network = train(settings, batches, sizes)
        spent = time.process_time() - start
        yield name, {**measure_by_distance(network, task, sizes, near), "seconds": spent}


def measure_by_distance(model: nn.Module, task: Recall, sizes: Sizes, near: int) -> Figures:
    """Return the accuracy by the distance from question to fact; the first range is the window."""
    bounds = [0, *(2**n * near for n in range(20) if 2**n * near < sizes.length), sizes.length]
    right, asked = torch.zeros(len(bounds) - 1), torch.zeros(len(bounds) - 1)
    for row in range(sizes.judged):
        batch = task.draw_batch(1, sizes.length, 2**40 + row)
        which = torch.bucketize(task.find_distances(batch), torch.tensor(bounds[1:-1]), right=True)
        is_right = compute_logits(model, batch).argmax(-1) == batch["targets"][batch["targets"] != IGNORED]
        right.index_add_(0, which, is_right.float())
        asked.index_add_(0, which, torch.ones(len(which)))
    stretches = {
        f"{low} to {high}": {"right": round(float(r / n), 3) if n else None, "of": int(n)}
        for (low, high), r, n in zip(pairwise(bounds), right, asked, strict=True)
    }
    return {**stretches, "all": {"right": round(float(right.sum() / asked.sum()), 3), "of": int(asked.sum())}}


def measure_by_position(model: nn.Module, text: Text, rows: int) -> dict[str, float]:
    """Return the loss in nats a byte by the number of bytes before it, in ranges that double."""
    total = torch.zeros(text.length)
    for row in range(rows):
        batch = text.draw_batch(1, 2**40 + row, held_out=True)
        total += nn.functional.cross_entropy(compute_logits(model, batch), batch["targets"][0], reduction="none")
    bounds = [0, *(2**n for n in range(6, 20) if 2**n < text.length), text.length]
    return {f"{low} to {high}": round(float(total[low:high].mean()) / rows, 4) for low, high in pairwise(bounds)}


def learn_text(only: list[str], sizes: Sizes, folder: Path) -> Iterator[tuple[str, Figures]]:
    """Yield the loss of decoders of four blocks: full attention, windows, and windows in three blocks of four."""
    text, near = Text(folder, sizes.length), max(sizes.length // 32, 8)
    window = {"name": "window", "width": near}
    models: Models = {
        "full": {}, "window": {"attention.pattern": window},
        "window three times, then full": {
            "layer_types": ["near", "near", "near", "all"], "layer_type.near.attention.pattern": window,
            "layer_type.all": {},
        },
    }  # fmt: skip
    for name, model in models.items():
        if only and name not in only:
            continue
        start = time.process_time()
        batches = (text.draw_batch(max(8192 // sizes.length, 1), step) for step in count(sizes.first))
        wider = {"vocab_size": 256, "n_layers": 4, "d_model": 96, "ffn.d_ff": 256}
        network = train({**wider, **model}, batches, sizes)
        spent = time.process_time() - start
        yield (name, {"width": near, "nats a byte": measure_by_position(network, text, sizes.judged), "seconds": spent})


def add_to_results(out: Path, task: str, settings: Figures, name: str, figures: Figures) -> None:
    """Add a model's figures to the results of the day with the same settings."""
    path = out / f"{settings['date']}-attention-learns-{task}.json"
    previous = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    models = previous["models"] if {**previous, "models": None} == {**settings, "models": None} else {}
    common.write_json(path, {**settings, "models": {**models, name: figures}})


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("task", choices=FULL_SIZE)
    parser.add_argument("--out", type=common.make_output_folder)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--sizes", nargs=3, type=int, metavar=("LENGTH", "STEPS", "JUDGED"))
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of weights and rows; a seed other than 1 is added to the names in the result",
    )
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (Sizes(*args.sizes) if args.sizes else FULL_SIZE[args.task])._replace(seed=args.seed)
    tasks: dict[str, Callable[[], Iterator[tuple[str, Figures]]]] = {
        "listops": lambda: learn_listops(args.only, sizes),
        "recall": lambda: learn_recall(args.only, sizes),
        "text": lambda: learn_text(args.only, sizes, args.folder),
    }
    settings = {
        "date": common.today(),
        "machine": f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}",
        "length": sizes.length,
        "steps": sizes.steps,
        "judged": sizes.judged,
    }
    for name, figures in tasks[args.task]():
        if "seconds" in figures:
            figures["seconds"] = round(figures["seconds"])
        name = name if sizes.seed == 1 else f"{name} (seed {sizes.seed})"
        print(name, json.dumps(figures), flush=True)
        if args.out:
            add_to_results(args.out, args.task, settings, name, figures)


if __name__ == "__main__":
    main()
