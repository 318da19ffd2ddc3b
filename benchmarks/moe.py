"""A mixture of experts on this CPU: steps against a dense model and transformers' Mixtral, and routes by layout.

    python benchmarks/moe.py speed --rounds 12 --out benchmarks/results/DATE-moe.md
    python benchmarks/moe.py flips --out benchmarks/results/DATE-moe-flips.md

speed: a step is a forward pass, a backward pass and AdamW's update (torch's, on the same weights for all), in one
process. Every model has the same number of active weights: experts are 1/K as wide as the dense network, of which a
token goes through K. Rounds are interleaved, begin with each model in turn, and every step has other random tokens, so
that experts get other numbers of rows, as in training. A ratio is the median over rounds of the other's CPU seconds by
ours, so above 1 ours is faster.

Routing: random weights choose nearly evenly; `--skew` lets the logits fall by expert by so many nats (ours alone, so
transformers is left out then). The busiest expert's load is stated. Memory is what is kept between the forward and the
backward pass, without weights, by token.

"bare products" are the matmuls of a step of each of these mixtures, three for a weight matrix, one `torch.mm` after the
other into allocated memory, with even loads: no attention, norm, activation,
gather, loss or optimizer. As long as torch multiplies, no step can be shorter, so transformers' ratio by it bounds
every ratio to transformers.

flips: share of tokens that are routed to other experts on another layout, because sums over ranks round in another
order. The model is one of `tests/parity/test_experts.py`, without dropout: two of four blocks have 12 experts, of which
2 are chosen, with initial weights, whose probabilities nearly tie: the worst case. Tokens are drawn anew for each
batch. A token of a block counts where its set of experts isn't that of data ranks alone, as many as the layout has
ranks.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import common
import torch
import transformers
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.compile import compile_all
from megatfm.layers.initialisation import initialise
from megatfm.layers.moe.moe import MoE
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks
from megatfm.train.process_state import keep_freed_memory
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    TP2,
    moe_layers,
    objective_for,
)
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

# ---------------------------------------------------------------------------------------------------- speed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY, HEAD = 4096, 64
BARE = "bare products"
THEIRS = "transformers': eager, batched_mm, grouped_mm"


class Candidate(NamedTuple):
    """A model, and its loss on tokens [B, T + 1]."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]


def build_megatfm(args: argparse.Namespace, dtype: torch.dtype, **ffn: Any) -> Candidate:
    """Build a megatfm decoder; dense without `ffn`."""
    section = {"d_ff": args.d_ff}
    if ffn:
        section = {"name": "moe", "d_ff": args.d_ff // args.top_k, "n_experts": args.experts, "top_k": args.top_k}
    config = ModelConfig.from_dotted(
        vocab_size=VOCABULARY, d_model=args.width, n_layers=args.layers,
        **{"attention.n_heads": args.width // HEAD, "ffn": {**section, **ffn}, "embedding.tied": False},
    )  # fmt: skip
    model = build(config)
    initialise(model, 0)
    model = model.to(dtype).train()
    for module in model.modules():
        if isinstance(module, MoE):
            skew_router(module.router, args.skew)

    def loss(tokens: Tensor) -> Tensor:
        passed = model(tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
        return passed.losses["causal"] / tokens[:, 1:].numel()

    return Candidate(model, loss)


class BareMatmuls:
    """The products of a step's weight matrices, of rows [M, I] with W [O, I]: x Wᵀ, g W and gᵀ x."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        tokens, of_expert = args.rows * args.length, args.d_ff // args.top_k
        chosen, d = tokens * args.top_k // args.experts, args.width
        attention, expert = [(tokens, d, d)] * 4, [(chosen, d, of_expert)] * 2 + [(chosen, of_expert, d)]
        block = [*attention, (tokens, d, args.experts), *expert * args.experts]
        self._products = []
        for m, i, o in [*block * args.layers, (tokens, d, VOCABULARY)]:
            x, w, g = (torch.randn(shape, dtype=dtype) for shape in ((m, i), (o, i), (m, o)))
            for left, right in ((x, w.T), (g, w), (g.T, x)):
                self._products.append((left, right, left.new_empty(len(left), right.shape[1])))

    def time(self) -> float:
        """Return the CPU seconds of all products, over all threads."""

        def multiply() -> None:
            for left, right, out in self._products:
                torch.mm(left, right, out=out)

        return common.time_call(multiply, time.process_time)


def build_mixtral(args: argparse.Namespace, dtype: torch.dtype, experts: str) -> Candidate:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=args.d_ff // args.top_k,
        num_hidden_layers=args.layers, num_attention_heads=args.width // HEAD, num_key_value_heads=args.width // HEAD,
        num_local_experts=args.experts, num_experts_per_tok=args.top_k, use_cache=False, output_router_logits=False,
    )  # fmt: skip
    options = {"attn_implementation": "sdpa", "experts_implementation": experts}
    model = transformers.MixtralForCausalLM._from_config(config, **options).to(dtype).train()
    return Candidate(model, lambda tokens: model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss)


def skew_router(router: Any, nats: float) -> None:
    """Let a router's logits fall by expert, from 0 to −`nats`."""
    logits, slope_E = router.logits, torch.linspace(0, -nats, len(router.weight))
    router.logits = lambda x_BTD: logits(x_BTD) + slope_E


def time_step(candidate: Candidate, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Return the CPU seconds of a step, over all threads."""

    def step() -> None:
        candidate.loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return common.time_call(step, time.process_time)


def measure_saved_bytes(candidate: Candidate, tokens: Tensor) -> int:
    return common.measure_saved_bytes(lambda: candidate.loss(tokens), candidate.model.parameters())[0]


def compute_imbalance(candidate: Candidate) -> float:
    """Return the largest load of an expert as a multiple of the mean load, averaged over blocks."""
    loads = [m.observed["load"].double() for m in candidate.model.modules() if isinstance(m, MoE)]
    return statistics.fmean(float(load.max() / load.mean()) for load in loads)


def measure(args: argparse.Namespace, name: str) -> Iterator[str]:
    dtype = DTYPES[name]
    router = {"name": "top_k"}
    sides = {
        "dropless": build_megatfm(args, dtype, router=router),
        "dense": build_megatfm(args, dtype),
        "capacity 1.25": build_megatfm(args, dtype, router=router, capacity_factor=1.25),
    }
    if args.compiled:
        sides["dropless, compiled"] = compiled = build_megatfm(args, dtype, router=router)
        compile_all(iter_blocks(compiled.model), autotune=False)
    if not args.skew:
        for experts in args.experts_implementations:
            sides[f"transformers, {experts}"] = build_mixtral(args, dtype, experts)
    optimizers = {
        side: torch.optim.AdamW(candidate.model.parameters(), fused=True) for side, candidate in sides.items()
    }
    bare = BareMatmuls(args, dtype)
    seconds_taken: dict[str, list[float]] = {side: [] for side in (*sides, BARE)}
    names = list(seconds_taken)
    for number in range(-args.warmup, args.rounds):
        tokens = torch.randint(VOCABULARY, (args.rows, args.length + 1))
        first = number % len(names)
        for side in names[first:] + names[:first]:
            spent = bare.time() if side == BARE else time_step(sides[side], optimizers[side], tokens)
            if number >= 0:
                seconds_taken[side].append(spent)
    tokens = torch.randint(VOCABULARY, (args.rows, args.length + 1))
    n_tokens = tokens[:, 1:].numel()
    for side in names:
        ratios = [a / b for a, b in zip(seconds_taken[side], seconds_taken["dropless"], strict=True)]
        candidate = sides.get(side)
        modules = candidate.model.modules() if candidate else ()
        cells = (
            name,
            side,
            f"{n_tokens / statistics.median(seconds_taken[side]):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{measure_saved_bytes(candidate, tokens) / n_tokens / 1e3:.1f}" if candidate else "",
            f"{compute_imbalance(candidate):.2f}" if candidate and any(isinstance(m, MoE) for m in modules) else "",
        )
        yield f"| {' | '.join(cells)} |"


@common.argument("--rounds", type=int, default=12)
@common.argument("--warmup", type=int, default=6, help="rounds that don't count")
@common.argument("--threads", type=int, default=1)
@common.argument("--width", type=int, default=256)
@common.argument("--d-ff", type=int, default=1024, help="of the dense network")
@common.argument("--layers", type=int, default=2)
@common.argument("--experts", type=int, default=8)
@common.argument("--top-k", type=int, default=2)
@common.argument("--rows", type=int, default=8)
@common.argument("--length", type=int, default=256)
@common.argument("--skew", type=float, default=0.0)
@common.argument("--experts-implementations", nargs="+", default=["eager", "grouped_mm"], help=THEIRS)
@common.argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
@common.argument("--out", type=common.make_output_file)
@common.argument("--compiled", action="store_true", help="dropless under train.compile as well")
def run_speed(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep_freed_memory(torch.device("cpu"))  # as in training
    page = common.Page(
        args.out,
        "Whole steps of a mixture of experts",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} thread(s), a load of "
        f"{os.getloadavg()[0]:.1f} besides;",
        f"{args.layers} blocks of width {args.width}, dense network of {args.d_ff}, {args.experts} experts of "
        f"{args.d_ff // args.top_k}, {args.top_k} for a token, {args.rows} rows of",
        f"{args.length} tokens, a vocabulary of {VOCABULARY:,}, scores falling by {args.skew:g} nats; {args.rounds} "
        "interleaved rounds. `python benchmarks/moe.py speed`,",
        "whose head says how it is measured. Ratio: CPU seconds by those of dropless experts, median (range).",
        table="| Numbers | Model | Tokens/s | Ratio | kB kept a token | Busiest expert by the mean |",
    )
    for name in args.dtypes:
        for row in measure(args, name):
            page.add(row)


# ---------------------------------------------------------------------------------------------------- flips

DATA_RANKS = "data ranks"
LAYOUTS: dict[int, dict[str, ParallelConfig]] = {
    2: {
        DATA_RANKS: ParallelConfig(dp_shard=2, zero=1),
        "ep2": EXPERT_LAYOUTS[2]["ep2, zero1"],
        "tp2": TP2,
        **EXPERT_TP_LAYOUTS[2],
        "cp2": ParallelConfig(dp_shard=1, cp=2),
        "ep2 of cp2": ParallelConfig(dp_shard=1, cp=2, ep=2),
        "pp2": ParallelConfig(pp=2),
    },
    4: {
        DATA_RANKS: ParallelConfig(dp_shard=4, zero=1),
        "ep4": EXPERT_LAYOUTS[4]["ep4, zero1"],
        "ep2 × tp2": EXPERT_LAYOUTS[4]["ep2 × tp2"],
        "ep4 of 2 × tp2": EXPERT_TP_LAYOUTS[4]["ep4 of 2 × tp2, zero1"],
        "ep2 × tp2 by channels": EXPERT_TP_LAYOUTS[4]["ep2 × tp2 by channels, zero1"],
        "ep2 × cp2": EXPERT_CONTEXT_LAYOUTS["ep2 × cp2, zero1"],
        "ep4 of 2 × cp2": EXPERT_CONTEXT_LAYOUTS["ep4 of 2 × cp2, zero1"],
        "ep2 × pp2": EXPERT_LAYOUTS[4]["ep2 × pp2, zero1"],
    },
}
Choices = dict[tuple[int, str, int, int], frozenset[int]]
"""Chosen experts by batch, block, row and position."""


def make_model() -> ModelConfig:
    """Return the config of a model that every layout can run."""
    return ModelConfig.model_validate({**EXPERT_MODELS["by batch"].model_dump(), "dropout": 0.0})


def draw_batch(config: ModelConfig, number: int) -> dict[str, Tensor]:
    """Draw a batch whose rows are one document each."""
    batch, generator = family_batch(config), torch.Generator().manual_seed(number)
    rows, length = batch["tokens"].shape
    assert config.vocab_size
    drawn = torch.randint(1, config.vocab_size, (rows, length + 1), generator=generator)
    places = {"positions": torch.arange(length).repeat(rows, 1), "documents": torch.zeros_like(drawn[:, 1:])}
    return {**batch, **places, "tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


def record_choices(parallel: ParallelConfig, precision: str, batches: int) -> Choices:
    """Return the chosen experts of the tokens that this rank routes."""
    config, experts_chosen = make_model(), Choices()
    engine = build_engine(config, parallel, precision=precision)
    number = 0

    def note(path: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, SequenceMetadata], routing: Any) -> None:
            x_BTD, sequence = inputs
            assert sequence.rng_keys is not None
            keys_BT = sequence.rng_keys[:, None].expand_as(sequence.positions)
            tokens, part = x_BTD.shape[:2].numel(), engine.mesh.rank("tp")
            # Under sequence parallelism, this rank's part of the tokens, counted through the rows.
            parts = keys_BT.numel() // tokens
            of_tokens = (full.flatten().chunk(parts)[part % parts] for full in (keys_BT, sequence.positions))
            chosen_NK = routing.expert_indices.flatten(0, 1)
            for key, place, chosen_K in zip(*(x.tolist() for x in (*of_tokens, chosen_NK)), strict=True):
                experts_chosen[number, path, key, place] = frozenset(chosen_K)

        return hook

    for path, module in moe_layers(engine.model).items():
        module.router.register_forward_hook(note(path))
    for number in range(batches):
        batch = draw_batch(config, number)
        engine.forward_backward(microbatches(engine, batch), objective_for(config, batch))
        engine.zero_grad()
    return experts_chosen


def record_all_choices(ranks: int, precision: str, batches: int) -> dict[str, Choices]:
    return {name: record_choices(parallel, precision, batches) for name, parallel in LAYOUTS[ranks].items()}


def format_rows(choices_of_ranks: list[Mapping[str, Choices]], ranks: int, precision: str) -> list[str]:
    merged = {
        name: {key: experts for rank in choices_of_ranks for key, experts in rank[name].items()}
        for name in choices_of_ranks[0]
    }
    plain, lines = merged.pop(DATA_RANKS), []
    for name, other_choices in merged.items():
        assert other_choices.keys() == plain.keys(), name
        flipped = sum(other_choices[key] != experts for key, experts in plain.items())
        lines.append(
            f"| {precision} | {ranks} | {name} | {flipped} of {len(plain):,} | {100 * flipped / len(plain):.2f} |"
        )
    return lines


@common.argument("--batches", type=int, default=8)
@common.argument("--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
@common.argument("--precisions", nargs="+", default=["bf16", "fp32"])
@common.argument("--out", type=common.make_output_file)
def run_flips(args: argparse.Namespace) -> None:
    page = common.Page(
        args.out,
        "Routes that differ between layouts",
        f"`python benchmarks/moe.py flips`, whose head says what is counted; torch {torch.__version__}, gloo.",
        table="| Numbers | Ranks | Layout | Tokens with other experts | % |",
    )
    workers = Workers()
    for precision in args.precisions:
        for ranks in args.ranks:
            choices_of_ranks = workers.run(record_all_choices, ranks, ranks, precision, args.batches, timeout=500.0)
            page.add(*format_rows(choices_of_ranks, ranks, precision))


PARTS = {"speed": run_speed, "flips": run_flips}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
