"""Whole steps of a mixture of experts against a dense model, a capacity, and transformers' Mixtral, on this CPU.

    python benchmarks/moe.py --rounds 12 --out benchmarks/results/DATE-moe.md

A step is a forward pass, a backward pass and AdamW's update (torch's, on the same weights for all), in one process.
Every model has the same number of active weights: experts are 1/K as wide as the dense network, of which a token goes
through K. Rounds are interleaved, begin with each model in turn, and every step has other random tokens, so that
experts get other numbers of rows, as in training. A ratio is the median over rounds of the other's CPU seconds by
ours, so above 1 ours is faster.

Routing: random weights choose nearly evenly; `--skew` lets the logits fall by expert by so many nats (ours alone, so
transformers is left out then). The busiest expert's load is stated. Memory is what is kept between the forward and the
backward pass, without weights, by token.

"bare products" are the matmuls of a step of each of these mixtures, three for a weight matrix, one `torch.mm` after the
other into allocated memory, with even loads: no attention, norm, activation,
gather, loss or optimizer. As long as torch multiplies, no step can be shorter, so transformers' ratio by it bounds
every ratio to transformers.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import ModelConfig
from megatfm.engines.native.compile import compile_all
from megatfm.layers.initialisation import initialise
from megatfm.layers.moe.moe import MoE
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks
from megatfm.train.profiling import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY, HEAD = 4096, 64
BARE = "bare products"


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
        vocab_size=VOCABULARY,
        d_model=args.width,
        n_layers=args.layers,
        **{"attention.n_heads": args.width // HEAD, "ffn": {**section, **ffn}, "embedding.tied": False},
    )
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
    """Build transformers' Mixtral with the same shapes. experts: implementation of the experts."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=args.d_ff // args.top_k,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // HEAD,
        num_key_value_heads=args.width // HEAD,
        num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
        use_cache=False,
        output_router_logits=False,
    )
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
    """Return the bytes saved for the backward pass, each storage once, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in candidate.model.parameters()}
    stored: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in weights:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        candidate.loss(tokens)
    return sum(stored.values())


def compute_imbalance(candidate: Candidate) -> float:
    """Return the largest load of an expert as a multiple of the mean load, averaged over blocks."""
    loads = [m.observed["load"].double() for m in candidate.model.modules() if isinstance(m, MoE)]
    return statistics.fmean(float(load.max() / load.mean()) for load in loads)


def measure(args: argparse.Namespace, name: str) -> Iterator[str]:
    """Yield the rows of the table for a dtype."""
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
    for side in names:
        candidate = sides.get(side)
        ratios = [
            expected / reference
            for expected, reference in zip(seconds_taken[side], seconds_taken["dropless"], strict=True)
        ]
        cells = (
            name,
            side,
            f"{tokens[:, 1:].numel() / statistics.median(seconds_taken[side]):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{measure_saved_bytes(candidate, tokens) / tokens[:, 1:].numel() / 1e3:.1f}" if candidate else "",
            f"{compute_imbalance(candidate):.2f}"
            if candidate and any(isinstance(m, MoE) for m in candidate.model.modules())
            else "",
        )
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Run what the arguments ask for; print a table, and write it where asked to."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=6, help="rounds that don't count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--d-ff", type=int, default=1024, help="of the dense network")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument(
        "--experts-implementations",
        nargs="+",
        default=["eager", "grouped_mm"],
        help="transformers': eager, batched_mm, grouped_mm",
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--out", type=common.make_output_file)
    parser.add_argument("--compiled", action="store_true", help="dropless under train.compile as well")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    keep_freed_memory(torch.device("cpu"))  # as in training
    load = Path("/proc/loadavg")
    load_text = f", a load of {load.read_text().split()[0]} besides" if load.exists() else ""
    page = common.Page(
        args.out,
        f"# Whole steps of a mixture of experts, {common.today()}",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} thread(s){load_text};",
        f"{args.layers} blocks of width {args.width}, dense network of {args.d_ff}, {args.experts} experts of "
        f"{args.d_ff // args.top_k}, {args.top_k} for a token, {args.rows} rows of",
        f"{args.length} tokens, a vocabulary of {VOCABULARY:,}, scores falling by {args.skew:g} nats; {args.rounds} "
        "interleaved rounds. `python benchmarks/moe.py`,",
        "whose head says how it is measured. Ratio: CPU seconds by those of dropless experts, median (range).",
        "",
        "| Numbers | Model | Tokens/s | Ratio | kB kept a token | Busiest expert by the mean |",
        "|---|---|---|---|---|---|",
    )
    for name in args.dtypes:
        for row in measure(args, name):
            page.add(row)


if __name__ == "__main__":
    main()
