"""Cost of attention patterns: forward and backward on a CPU, against dense causal attention and others' layers; memory.

    python benchmarks/attention.py --out benchmarks/results [--parts speed --dtypes float32 --only window]

One row of 2 heads of 64 channels, one thread, whose CPU time is measured; freed memory is kept as `megatfm train` keeps
it. Each round runs every case once, in another order; medians of the ratios within a round are quoted, which
other work on the machine disturbs little. What a call measures is added to the results of its day, so that a table can
be made by several calls, of `--parts`, `--lengths`, `--dtypes` and `--only` (beginnings of cases' names).

speed: how many times as fast as dense attention. flat: microseconds a token at all lengths, which take turns, and their
ratio to the shortest. packed: rows of documents against one document of the same tokens. linformer: it against full
attention, fused or not. peers: transformers' layers for long rows against ours. memory: bytes beside the inputs at
several lengths, each in a process of its own.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Full, Longformer, Window
from megatfm.layers.attention.patterns.mask import PatternMask
from megatfm.layers.block import Block
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.reference import AttentionOptions, attention_reference
from megatfm.train.process_state import keep_freed_memory

HEADS, WIDTH, RANK = 2, 64, 128
LINFORMER = f"linformer {RANK}"
D_MODEL = HEADS * WIDTH
ALL_AT_ONCE = 4096
"""Tokens of a row above which attention that is not fused is computed by a quarter of so many queries at a time, lest
its scores fill the memory."""

Case = Callable[..., Tensor]
CaseWithInputs = tuple[Case, Sequence[Tensor]]
WINDOW, DOCUMENT = 512, 1000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASKED = 4096
"""Longest row that is compared with a dense mask, whose size is quadratic."""

PACKED = (1000, 250, 64, 32)
"""Tokens of documents in rows that are compared with one document."""

UNEQUAL = 16, 500
"""The shortest and the longest of documents whose lengths are drawn."""

Times = dict[str, list[float]]


def make_block_sparse_case(pattern: AttentionPattern, length: int, document: int = 0) -> Case:
    """Return block-sparse attention by a pattern. document: tokens of each; 0: one a row; −1: drawn."""
    places = torch.arange(length)[None]
    documents = draw_document_numbers(length) if document < 0 else places // document if document else None
    mask = PatternMask(pattern, SequenceMetadata(places, documents), 0, HEADS)
    return lambda q, k, v: block_sparse.block_sparse_attention(q, k, v, mask, None, AttentionOptions(), None)


def draw_document_numbers(length: int) -> Tensor:
    """Draw document numbers [1, length], with lengths between both of UNEQUAL."""
    drawn = torch.randint(*UNEQUAL, (length // UNEQUAL[0],), generator=torch.Generator().manual_seed(0))
    return torch.arange(len(drawn)).repeat_interleave(drawn)[None, :length]


def attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_cases(length: int) -> dict[str, Case]:
    by_name: dict[str, Case] = {
        "dense": attend_densely,
        f"window {WINDOW}": make_block_sparse_case(Window(WINDOW - 1), length),
        f"window {WINDOW}, documents of {DOCUMENT}": make_block_sparse_case(Window(WINDOW - 1), length, DOCUMENT),
        f"full, documents of {DOCUMENT}": make_block_sparse_case(Full(causal=True), length, DOCUMENT),
        "chunked 1024": make_block_sparse_case(Chunked(1024, causal=True), length),
        "bigbird": make_block_sparse_case(BigBird(64, 3, 0, HEADS), length),
        f"longformer {WINDOW}": make_block_sparse_case(Longformer(WINDOW // 2, (0,)), length),
    }
    if length <= MASKED:
        mask = PatternMask(Window(WINDOW - 1), SequenceMetadata(torch.arange(length)[None])).mask()
        by_name[f"window {WINDOW}, dense mask"] = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask
        )
    return by_name


def draw_inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]


def make_layer(length: int, **changes: object) -> nn.Module:
    """Build the attention of an encoder, with random weights."""
    config = {
        "family": "encoder", "vocab_size": 7, "d_model": D_MODEL, "n_layers": 1, "attention.n_heads": HEADS,
        "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes,
    }  # fmt: skip
    attention: nn.Module = Block(ModelConfig.from_dotted(config), "encoder").attn
    with torch.no_grad():
        for weight in attention.parameters():
            weight.normal_(std=0.05)
    return attention


def make_linformer(length: int, dtype: torch.dtype) -> CaseWithInputs:
    """Return Linformer attention of heads, and inputs: heads and the projections along the sequence."""
    options = {"attention.name": "linformer", "attention.max_length": length, "attention.projected_length": RANK}
    attn: Any = make_layer(length, **options, **{"attention.share": "headwise"}).to(dtype)
    sketches = attn.of_keys.weight, attn.of_values.weight
    inputs = [*draw_inputs(length, dtype), *sketches]
    return lambda q, k, v, *projections: attn._attend_documents(projections, q, k, v, None), inputs


class _ByQueries(torch.autograd.Function):
    """Unfused attention of a block of queries at a time; its gradients are computed with its output."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        outputs, gradients = [], [torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)]
        for at in range(0, q.shape[2], ALL_AT_ONCE // 4):
            part = slice(at, at + ALL_AT_ONCE // 4)
            with torch.enable_grad():
                qc, kc, vc = (x.detach().requires_grad_() for x in (q[:, :, part], k, v))
                out = attention_reference(qc, kc, vc)
                gradients[0][:, :, part], *part_gradients = torch.autograd.grad(out, (qc, kc, vc), torch.ones_like(out))
            for total, part_gradient in zip(gradients[1:], part_gradients, strict=True):
                total += part_gradient
            outputs.append(out.detach())
        ctx.save_for_backward(*gradients)
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        """Return the gradients for a gradient of ones."""
        return ctx.saved_tensors


def attend_unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v) if q.shape[2] <= ALL_AT_ONCE else _ByQueries.apply(q, k, v)


def make_transformers_longformer(length: int, dtype: torch.dtype) -> CaseWithInputs:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=D_MODEL, num_attention_heads=HEADS, attention_window=[512], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = LongformerSelfAttention(config, 0).to(dtype)
    mask = torch.zeros(1, length, dtype=dtype)
    mask[0, 0] = 1
    at = {"is_index_masked": mask < 0, "is_index_global_attn": mask > 0, "is_global_attn": True}
    return lambda x, *_: attention(x, attention_mask=mask, **at)[0], draw_layer_inputs(attention, length, dtype)


def make_transformers_bigbird(length: int, dtype: torch.dtype) -> CaseWithInputs:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=D_MODEL, num_attention_heads=HEADS, max_position_embeddings=length, num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = BigBirdBlockSparseAttention(config, seed=0).to(dtype)
    blocked, band, of_queries, of_keys = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(1, length, dtype=dtype), config.block_size
    )
    return (
        lambda x, *_: attention(x, band, of_queries, of_keys, blocked, blocked)[0],
        draw_layer_inputs(attention, length, dtype),
    )


def make_layer_case(pattern: dict[str, object], length: int, dtype: torch.dtype, name: str = "gqa") -> CaseWithInputs:
    attention = make_layer(length, **{"attention.name": name, "attention.pattern": pattern}).to(dtype)
    sequence = SequenceMetadata(torch.arange(length)[None])
    return lambda x, *_: attention(x, sequence), draw_layer_inputs(attention, length, dtype)


def draw_layer_inputs(module: nn.Module, length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, length, D_MODEL, dtype=dtype).requires_grad_(), *module.parameters()]


LAYERS: dict[str, Callable[[int, torch.dtype], CaseWithInputs]] = {
    "transformers' longformer layer": make_transformers_longformer,
    "longformer layer": lambda length, dtype: make_layer_case(
        {"name": "longformer", "width": 512, "global_tokens": [0]}, length, dtype, "longformer"
    ),
    "transformers' bigbird layer": make_transformers_bigbird,
    "bigbird layer": lambda length, dtype: make_layer_case({"name": "bigbird"}, length, dtype),
}


def time_passes(case: Case, tensors: Sequence[Tensor]) -> float:
    """Return the CPU seconds of a forward and a backward pass; wall time would include other work."""
    start = time.thread_time()
    output = case(*tensors)
    torch.autograd.grad(output, tensors, torch.ones_like(output))
    return time.thread_time() - start


def time_rounds(cases: Mapping[str, CaseWithInputs], count: int) -> Times:
    """Return the seconds of each case by round, in turns, after a round to warm up."""
    calls = {name: functools.partial(time_passes, *case) for name, case in cases.items()}
    return common.take_turns(calls, count, common.shuffle_order, warmup=1)


def compute_ratio(times: Times, over: str, under: str) -> float:
    """Return the median over rounds of the ratio of two cases."""
    return common.compute_median_ratio(times[over], times[under])


def measure_speed(args: argparse.Namespace, dtype: str, length: int) -> dict[str, dict[str, float]]:
    """Return for each case how many times as fast as dense attention it is (median), and microseconds a token."""
    tensors = draw_inputs(length, DTYPES[dtype])
    chosen = {key: (case, tensors) for key, case in make_cases(length).items() if key == "dense" or args.wanted(key)}
    times = time_rounds(chosen, args.rounds)
    return {
        key: {
            "times_dense": compute_ratio(times, "dense", key),
            "us_per_token": statistics.median(seconds) / length * 1e6,
        }
        for key, seconds in times.items()
    }


def measure_flatness(args: argparse.Namespace, dtype: str, name: str) -> dict[str, dict[str, float]]:
    """Return microseconds a token by length, and their median ratio to the shortest length."""
    cases = {}
    for length in args.lengths:
        if name == LINFORMER:
            cases[str(length)] = make_linformer(length, DTYPES[dtype])
        else:
            cases[str(length)] = make_cases(length)[name], draw_inputs(length, DTYPES[dtype])
    times, shortest = time_rounds(cases, args.rounds), str(args.lengths[0])
    return {
        key: {
            "us_per_token": statistics.median(seconds) / int(key) * 1e6,
            "of_the_shortest": compute_ratio(times, key, shortest) * int(shortest) / int(key),
        }
        for key, seconds in times.items()
    }


def measure_packed(args: argparse.Namespace, dtype: str, length: int) -> dict[str, float]:
    """Return the speed of rows of documents as a multiple of one document's, for full attention and a window."""
    tensors, ratios = draw_inputs(length, DTYPES[dtype]), dict[str, float]()
    for key, pattern in (("full", Full(causal=True)), (f"window {WINDOW}", Window(WINDOW - 1))):
        if args.wanted(key):
            single = attend_densely if key == "full" else make_block_sparse_case(pattern, length)
            cases = {"one": single, **{str(n): make_block_sparse_case(pattern, length, n) for n in PACKED}}
            cases["{} to {}".format(*UNEQUAL)] = make_block_sparse_case(pattern, length, -1)
            times = time_rounds({n: (case, tensors) for n, case in cases.items()}, args.rounds)
            ratios |= {f"{key}, documents of {n}": compute_ratio(times, "one", n) for n in cases if n != "one"}
    return ratios


def measure_linformer(args: argparse.Namespace, dtype: str, length: int) -> dict[str, float]:
    """Return the seconds of full attention, fused or not, as a multiple of Linformer's."""
    tensors = draw_inputs(length, DTYPES[dtype])
    cases = {
        LINFORMER: make_linformer(length, DTYPES[dtype]),
        "unfused": (attend_unfused, tensors),
        "fused": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tensors),
    }
    times = time_rounds({name: case for name, case in cases.items() if args.wanted(name)}, args.rounds)
    return {f"{name} / {LINFORMER}": compute_ratio(times, name, LINFORMER) for name in times if name != LINFORMER}


def measure_peers(args: argparse.Namespace, dtype: str, length: int) -> dict[str, float]:
    """Return the seconds of transformers' layers, with projections, as a multiple of ours."""
    cases = {name: make(length, DTYPES[dtype]) for name, make in LAYERS.items() if args.wanted(name)}
    times = time_rounds(cases, args.rounds)
    pairs = {name: name.removeprefix("transformers' ") for name in times}
    return {f"{name} / {ours}": compute_ratio(times, name, ours) for name, ours in pairs.items() if name != ours}


def measure_peak_memory(name: str, length: int) -> int:
    """Return the peak memory of a case beside its inputs, in bytes (VmHWM, reset before)."""
    torch.set_num_threads(1)
    if name in make_cases(length):
        run_case = functools.partial(time_passes, make_cases(length)[name], draw_inputs(length, torch.float32))
    else:
        run_case = functools.partial(time_passes, *{LINFORMER: make_linformer, **LAYERS}[name](length, torch.float32))
    common.reset_peak_memory()
    before = common.read_memory("VmRSS")
    run_case()
    return common.read_memory("VmHWM") - before


def measure_memory(args: argparse.Namespace) -> Iterator[tuple[list[str], int]]:
    """Yield the peak memory of each case at each length."""
    for name in filter(args.wanted, (*make_cases(MASKED), LINFORMER, *LAYERS)):
        for length in args.lengths:
            if "mask" not in name or length <= MASKED:
                yield ["memory", name, str(length)], common.call_in_new_process(measure_peak_memory, name, length)


BY_LENGTH = {"speed": measure_speed, "packed": measure_packed, "linformer": measure_linformer, "peers": measure_peers}
FLAT = (f"window {WINDOW}", "bigbird", f"longformer {WINDOW}", LINFORMER)


def measure_parts(args: argparse.Namespace) -> Iterator[tuple[list[str], Any]]:
    for part in args.parts:
        if part == "memory":
            yield from measure_memory(args)
            continue
        for dtype in args.dtypes:
            if part == "flat":
                for name in filter(args.wanted, FLAT):
                    yield [part, dtype, name], measure_flatness(args, dtype, name)
            else:
                for length in args.lengths:
                    yield [part, dtype, str(length)], BY_LENGTH[part](args, dtype, length)


def add_to_results(path: Path, where: Sequence[str], figures: Any) -> None:
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    place = results
    for key in where[:-1]:
        place = place.setdefault(key, {})
    old = place.get(where[-1])
    place[where[-1]] = {**old, **figures} if isinstance(old, dict) else figures
    common.write_json(path, results)


PARTS = ["speed", "flat", "packed", "linformer", "peers", "memory"]


@common.argument("--out", type=common.make_output_folder)
@common.argument("--parts", nargs="+", default=PARTS, choices=PARTS)
@common.argument("--only", nargs="+", default=[""])
@common.argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
@common.argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
@common.argument("--rounds", type=int, default=10)
def main(args: argparse.Namespace) -> None:
    args.wanted = lambda name: any(name.startswith(only) for only in args.only)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    for where, figures in measure_parts(args):
        print(*where, json.dumps(figures), file=sys.stderr, flush=True)
        if path := common.make_dated_path(args.out, "attention.json"):
            add_to_results(path, ["machine"], f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}")
            add_to_results(path, ["rounds", where[0]], args.rounds)
            add_to_results(path, where, figures)


if __name__ == "__main__":
    common.run_script(__doc__, main)
