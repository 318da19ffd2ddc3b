"""Which attention patterns learn to look far back: small models on a CPU.

    python benchmarks/attention_learns.py listops|recall --out benchmarks/results

listops: expressions of 500 to 2,000 tokens as Long Range Arena draws them, ten classes, packed into rows of 4,096
tokens, after shorter ones of 10 to 100 and of 100 to 500. recall: 8 facts in rows of 8,192 tokens, trained on rows of
64 for half of the steps and then on ever longer ones, and judged by how far back the fact lies. Models of 2 blocks, 64
channels and 4 heads, each pattern alone; the budget is a number of steps, each on new rows of 4,096 (listops) or 8,192
tokens (recall), the same for all. Figures are of rows that were not trained on. A result holds the models of all runs
of its day.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.initialisation import initialise
from megatfm.models import build

Batch = dict[str, Tensor]
"""Inputs of a model by name, and its targets: −100 where nothing is asked."""
IGNORED = -100
LISTOPS = 17
"""Tokens: MIN, MAX, MED, SM, the closing bracket, ten digits, a token before the expression and one after it."""
CLOSE, DIGIT, BEFORE, AFTER = 4, 5, 15, 16
DEPTH, ARGUMENTS, OPERATOR_SHARE = 10, 10, 0.25
"""The deepest expression, most arguments, and the share of nested items that are operators and not digits."""


@dataclass(frozen=True)
class Expressions:
    """Which expressions are drawn; by default those of Long Range Arena (Tay et al. 2021, its published generator)."""

    longer_than: int = 500
    shorter_than: int = 2000

    def draw(self, random: Random) -> tuple[list[int], int]:
        """Draw one; return its tokens, with a token before and one after it, and its value."""
        while True:
            tokens: list[int] = []
            value = self._grow(random, 1, tokens)
            if self.longer_than < len(tokens) < self.shorter_than:
                return [BEFORE, *tokens, AFTER], value

    def _grow(self, random: Random, depth: int, tokens: list[int]) -> int:
        if depth >= DEPTH or random.random() > OPERATOR_SHARE:
            value = random.randrange(10)
            tokens.append(DIGIT + value)
            return value
        operator = random.randrange(4)
        tokens.append(operator)
        values = sorted(
            # Once it is too long it is thrown away: nothing of it matters any more.
            self._grow(random, depth + 1 if len(tokens) < self.shorter_than else DEPTH, tokens)
            for _ in range(random.randint(2, ARGUMENTS))
        )
        tokens.append(CLOSE)
        median = (values[len(values) // 2] + values[(len(values) - 1) // 2]) // 2
        return (values[0], values[-1], median, sum(values) % 10)[operator]


@dataclass(frozen=True)
class ListOps:
    """Rows of `length` tokens, packed with expressions, whose value is asked at their end or (encoders) front."""

    length: int
    expressions: Expressions = Expressions()

    def iter_batches(self, seed: int, *, encoder: bool) -> Iterator[Batch]:
        """Yield batches of one row without end, the same for every model."""
        random = Random(seed)
        waiting: tuple[list[int], int] | None = None
        while True:
            tokens = torch.full((1, self.length), AFTER)
            documents, targets = torch.full_like(tokens, -1), torch.full_like(tokens, IGNORED)
            positions, filled, number = torch.arange(self.length)[None].clone(), 0, 0
            while True:
                text, value = waiting or self.expressions.draw(random)
                end = filled + len(text)
                if end > self.length:
                    waiting = text, value
                    break
                tokens[0, filled:end] = torch.tensor(text)
                documents[0, filled:end], positions[0, filled:end] = number, torch.arange(len(text))
                targets[0, filled if encoder else end - 1] = value
                waiting, filled, number = None, end, number + 1
            positions[0, filled:] = torch.arange(self.length - filled) % (self.expressions.shorter_than + 1)
            yield {"tokens": tokens, "documents": documents, "positions": positions, "targets": targets}

    def measure_guesses(self, count: int, seed: int) -> dict[str, float]:
        """Return the accuracy of guessing one value, and of guessing by the outermost operator."""
        random = Random(seed)
        drawn = [self.expressions.draw(random) for _ in range(count)]
        table = torch.zeros(LISTOPS, 10)
        for text, value in drawn:
            table[text[1], value] += 1
        right = {"one value": table.sum(0).max(), "by the first operator": table.max(1).values.sum()}
        return {guess: round(float(number) / count, 3) for guess, number in right.items()}


@dataclass(frozen=True)
class Recall:
    """Rows of facts, each a key and its value in one token, among fillers, and at the end a question for each key."""

    facts: int = 8
    values: int = 8
    fillers: int = 8

    @property
    def vocabulary(self) -> int:
        return self.facts * self.values + self.facts + self.fillers

    def draw_batch(self, count: int, length: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        keys = torch.stack([torch.randperm(self.facts, generator=random) for _ in range(count)])
        values = torch.randint(self.values, (count, self.facts), generator=random)
        free = length - self.facts
        places = torch.stack([torch.randperm(free, generator=random)[: self.facts] for _ in range(count)])
        tokens = torch.randint(self.vocabulary - self.fillers, self.vocabulary, (count, length), generator=random)
        tokens.scatter_(1, places, keys * self.values + values)
        asked = torch.stack([torch.randperm(self.facts, generator=random) for _ in range(count)])
        tokens[:, -self.facts :] = self.facts * self.values + keys.gather(1, asked)
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -self.facts :] = values.gather(1, asked)
        return {"tokens": tokens, "targets": targets}

    def find_distances(self, batch: Batch) -> Tensor:
        """Return the distance in tokens from the fact to each question of a batch's first row, int64 [facts]."""
        row = batch["tokens"][0]
        places = (row < self.facts * self.values).nonzero()[:, 0]
        of_key = torch.empty(self.facts, dtype=torch.int64)
        of_key[row[places] // self.values] = places
        asked = row[-self.facts :] - self.facts * self.values
        return torch.arange(len(row) - self.facts, len(row)) - of_key[asked]


Models = dict[str, dict[str, Any]]
Figures = dict[str, Any]
SMALL = {
    "d_model": 64, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 128, "norm.name": "rms_norm",
    "init.name": "xavier",
}  # fmt: skip
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
        return (self.seed - 1) * 2**20  # of the first row; runs of different seeds share no row


def stack_near_and_full(pattern: dict[str, Any]) -> dict[str, Any]:
    """Return overrides for a block of a pattern, and a block of full attention after it."""
    return {"layer_types": ["near", "all"], "layer_type.near.attention.pattern": pattern, "layer_type.all": {}}


def make_models(length: int, near: int, positions: str) -> Models:
    """Return overrides of each model by name.

    length: tokens of the longest row; near: width of windows; positions: of encoders and of compressed attention.
    """
    elsewhere = {"position.name": positions} | ({"position.max_positions": length} if positions == "learned" else {})
    encoder = {"family": "encoder", "lm_head.bias": True, **elsewhere}

    def with_pattern(model: dict[str, Any], **pattern: Any) -> dict[str, Any]:
        return {**model, "attention.pattern": pattern}

    chunked = {"name": "chunked", "size": near}
    blocks = {"block_size": max(near // 4, 2), "n_random_blocks": 3}
    window = {"name": "window", "width": near}
    return {
        "full": {},
        "window": with_pattern({}, **window),
        "window, then full": stack_near_and_full(window),
        "dilated": with_pattern({}, **window, dilation=8),
        "chunked": with_pattern({}, **chunked),
        "chunked, then full": stack_near_and_full(chunked),
        "strided": with_pattern({}, name="strided", stride=near),
        "fixed": with_pattern({}, name="fixed", stride=near, n_summary_tokens=4),
        "bigbird of a decoder": with_pattern({}, name="bigbird", **blocks),
        "local, then compressed": {
            **elsewhere, "layer_types": ["local", "compressed"], "layer_type.local.attention.pattern": chunked,
            "layer_type.compressed.attention.name": "compressed",
        },
        "full, encoder": encoder,
        "window, encoder": with_pattern(encoder, **window),
        "bigbird": with_pattern(encoder, name="bigbird", **blocks),
        "longformer": with_pattern(encoder, name="longformer", width=near, global_tokens=[0]),
        "linformer": {**encoder, "attention.name": "linformer", "attention.max_length": length,
                      "attention.projected_length": max(length // 32, 8), "attention.share": "headwise"},
    }  # fmt: skip


def train(model: dict[str, Any], batches: Iterator[Batch], sizes: Sizes, rate: float = 3e-3) -> tuple[nn.Module, float]:
    """Train a model by AdamW, warmed up over a tenth of the steps; return it and the CPU seconds."""
    start, steps = time.process_time(), sizes.steps
    network = build(ModelConfig.from_dotted({**SMALL, **model})).train()
    initialise(network, sizes.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for batch in islice(batches, steps):
        asked = (batch["targets"] != IGNORED).sum()
        loss = torch.stack([*network(**batch).losses.values()]).sum() / asked
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.eval(), time.process_time() - start


def compute_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [questions, classes] at targets that aren't ignored."""
    inputs = {name: values for name, values in batch.items() if name != "targets"}
    with torch.no_grad():
        return model(**inputs).logits[batch["targets"] != IGNORED]


def check_answers(model: nn.Module, batch: Batch) -> Tensor:
    """Return 1.0 for each question that is answered correctly, else 0.0."""
    return (compute_logits(model, batch).argmax(-1) == batch["targets"][batch["targets"] != IGNORED]).float()


def summarize(right: Tensor) -> Figures:
    """Return the share of questions that are answered correctly, and their number."""
    return {"right": round(float(right.mean()), 3) if len(right) else None, "of": len(right)}


def select(models: Models, only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the models with these names; all without names."""
    return ((name, model) for name, model in models.items() if not only or name in only)


def learn_listops(args: argparse.Namespace, sizes: Sizes) -> Iterator[tuple[str, Figures]]:
    """Yield the accuracy of each pattern, trained on expressions that grow, and that of guesses without a model."""
    bounds = ((10, 100), (100, 500), (500, 2000)) if sizes.length > 2001 else ((5, 20), (10, 30), (20, 60))
    stages = [ListOps(sizes.length, Expressions(*bound)) for bound in bounds]
    yield "guesses", stages[-1].measure_guesses(sizes.judged * 50, 2)
    for name, model in select(make_models(sizes.length, max(sizes.length // 32, 8), "learned"), args.only):
        encoder = "family" in model
        batches = chain.from_iterable(
            islice(stage.iter_batches(sizes.first + i, encoder=encoder), round(sizes.steps * part))
            for i, (stage, part) in enumerate(zip(stages, GROW, strict=True))
        )
        network, seconds = train({**model, "vocab_size": LISTOPS}, batches, sizes)
        figures: Figures = {}
        for i, ((low, high), stage) in enumerate(zip(bounds, stages, strict=True)):
            judged = islice(stage.iter_batches(9, encoder=encoder), max(sizes.judged // (3 - i) ** 2, 1))
            figures[f"{low} to {high} tokens"] = summarize(
                torch.cat([check_answers(network, batch) for batch in judged])
            )
        yield name, {**figures, "seconds": seconds}


def learn_recall(args: argparse.Namespace, sizes: Sizes) -> Iterator[tuple[str, Figures]]:
    """Yield each pattern's accuracy in the longest rows by distance, trained on rows that double.

    No model has positions: facts don't depend on them, and rotations would have to be learnt for each length.
    """
    task, near = Recall(), sizes.length // 16
    lengths = [2**n for n in range(6, 32) if 2**n < sizes.length]
    short, steps_a_length = sizes.steps // 2, sizes.steps // 2 // (len(lengths) + 1)
    course = [lengths[0]] * short + [length for length in lengths[1:] for _ in range(steps_a_length)]
    course += [sizes.length] * (sizes.steps - len(course))
    for name, model in select(make_models(sizes.length, near, "none"), args.only):
        batches = (
            task.draw_batch(sizes.length // length, length, sizes.first + step) for step, length in enumerate(course)
        )
        settings = {**model, "vocab_size": task.vocabulary, "position.name": "none"}
        network, seconds = train(settings, batches, sizes)
        yield name, {**measure_by_distance(network, task, sizes, near), "seconds": seconds}


def measure_by_distance(model: nn.Module, task: Recall, sizes: Sizes, near: int) -> Figures:
    """Return the accuracy by the distance from question to fact; the first range is the window."""
    bounds = [0, *(2**n * near for n in range(20) if 2**n * near < sizes.length), sizes.length]
    distances, answers = [], []
    for row in range(sizes.judged):
        batch = task.draw_batch(1, sizes.length, 2**40 + row)
        distances.append(task.find_distances(batch))
        answers.append(check_answers(model, batch))
    distance, right = torch.cat(distances), torch.cat(answers)
    stretches = {
        f"{low} to {high}": summarize(right[(distance >= low) & (distance < high)]) for low, high in pairwise(bounds)
    }
    return {**stretches, "all": summarize(right)}


TASKS = {
    "listops": (learn_listops, Sizes(4096, 120, 60)),
    "recall": (learn_recall, Sizes(8192, 240, 64)),
}
"""Task → its function, and the sizes of a full run."""


def add_to_results(out: Path, task: str, settings: Figures, name: str, figures: Figures) -> None:
    """Add a model's figures to the results of the day with the same settings."""
    path = out / f"{settings['date']}-attention-learns-{task}.json"
    previous = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    models = previous["models"] if {**previous, "models": None} == {**settings, "models": None} else {}
    common.write_json(path, {**settings, "models": {**models, name: figures}})


@common.argument("task", choices=TASKS)
@common.argument("--out", type=common.make_output_folder)
@common.argument("--only", nargs="+", default=[])
@common.argument("--sizes", nargs=3, type=int, metavar=("LENGTH", "STEPS", "JUDGED"))
@common.argument("--seed", type=int, default=1, help="of weights and rows; another than 1 is named in the result")
def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    learn, full_size = TASKS[args.task]
    sizes = (Sizes(*args.sizes) if args.sizes else full_size)._replace(seed=args.seed)
    machine = f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}"
    amounts = {"length": sizes.length, "steps": sizes.steps, "judged": sizes.judged}
    settings = {"date": common.today(), "machine": machine, **amounts}
    for name, figures in learn(args, sizes):
        if "seconds" in figures:
            figures["seconds"] = round(figures["seconds"])
        name = name if sizes.seed == 1 else f"{name} (seed {sizes.seed})"
        print(name, json.dumps(figures), flush=True)
        if args.out:
            add_to_results(args.out, args.task, settings, name, figures)


if __name__ == "__main__":
    common.run_script(__doc__, main)
