"""Speed of models on this CPU: passes and generation against transformers', and what parts of a step cost.

    python benchmarks/model_speed.py passes --rounds 10 --threads 2 --out benchmarks/results/DATE-zoo-speed.md
    python benchmarks/model_speed.py generation --rounds 10 --out benchmarks/results/DATE-generation.md
    python benchmarks/model_speed.py initial [--threads 2] [--rounds 10]
    python benchmarks/model_speed.py layer-statistics --out benchmarks/results

Rounds are interleaved in one process, and sides alternate who goes first. A figure is the median over all rounds of
(transformers' seconds / megatfm's seconds): above 1, megatfm is faster; by the clock on the wall, and by the
processor's over all threads, which other work on the machine disturbs less. Absolute times mean nothing by themselves.

passes: GPT-2 124M and BERT-base against transformers' (its sdpa path). Both sides have the same dtype, threads, batch,
targets and compile state, and random weights.

generation: greedy, from batched prompts, against `transformers.generate`. A GPT-2 of transformers with random weights
is written to a folder, and megatfm opens that. Prompts of uneven lengths are padded at their left; both sides have a
key-value cache, take the likeliest token and never end early, so that they do the same number of steps. Both must make
the same tokens.

initial: drawing initial weights by several threads, against one.

layer-statistics: optimizer steps with the norms of each layer, against steps without. A decoder of 12 blocks on one
process, batches of 2,048 tokens in rows of 512; eager, since outputs of compiled blocks can't be observed.
`log.layer_stats_every = N` pays the extra once in N steps.
"""

import argparse
import functools
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

import common
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from megatfm.config import Config, load_config
from megatfm.convert.load import load_hf_model
from megatfm.inference.decoding import Prompts, generate
from megatfm.layers.initialisation import Normal, TruncatedNormal, draw, initialise
from megatfm.models import build
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine

# --------------------------------------------------------------------------------------------------- passes

Loss = Callable[[], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_gpt2_losses(rows: int, length: int, dtype: torch.dtype, compiled: bool) -> tuple[Loss, Loss]:
    """Return both sides' next-token loss of all tokens; transformers shifts the targets itself."""
    config = transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    reference = prepare_model(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), dtype, compiled
    )
    model = prepare_model(build_without_dropout("gpt2-124m"), dtype, compiled)
    tokens = torch.randint(0, 50257, (rows, length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return (
        lambda: model(inputs, targets=targets).losses["causal"] / targets.numel(),
        lambda: reference(input_ids=inputs, labels=inputs).loss,
    )


def make_bert_losses(rows: int, length: int, dtype: torch.dtype, compiled: bool) -> tuple[Loss, Loss]:
    """Return both sides' loss of masked tokens (15 %) and next-sentence prediction."""
    config = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    reference = transformers.BertForPreTraining._from_config(config, attn_implementation="sdpa")
    reference = prepare_model(reference, dtype, compiled)
    model = prepare_model(build_without_dropout("bert-base"), dtype, compiled)
    tokens = torch.randint(0, 30522, (rows, length))
    targets = tokens.where(torch.rand(rows, length) < 0.15, -100)
    sentence = torch.full_like(tokens, -100)
    sentence[:, 0] = torch.arange(rows) % 2

    def step_of_ours() -> Tensor:
        losses = model(tokens, targets=targets, sentence_targets=sentence).losses
        return losses["masked"] / (targets >= 0).sum() + losses["sentence"] / rows

    return (
        step_of_ours,
        lambda: reference(input_ids=tokens, labels=targets, next_sentence_label=torch.arange(rows) % 2).loss,
    )


MODELS = {"gpt2-124m": make_gpt2_losses, "bert-base": make_bert_losses}


def build_without_dropout(preset: str) -> nn.Module:
    overrides = [f"model.{rate}=0" for rate in ("dropout", "attention.dropout", "ffn.dropout")]
    model = build(load_config(preset, overrides).model)
    initialise(model, 0)
    return model


def prepare_model(model: nn.Module, dtype: torch.dtype, compiled: bool) -> nn.Module:
    model = model.to(dtype).train()
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


@common.argument("--rounds", type=int, default=10)
@common.argument("--threads", type=int, default=2)
@common.argument("--rows", type=int, default=2)
@common.argument("--length", type=int, default=512)
@common.argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
@common.argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
@common.argument("--states", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
@common.argument("--out", type=common.make_output_file)
def run_passes(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    page = common.Page(
        args.out,
        "Forward and backward passes against transformers",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {python_version()}, "
        f"{common.get_cpu_name(instructions=True)}, {args.threads} threads, {args.rows} rows of {args.length} tokens, "
        f"{args.rounds} interleaved rounds. Ratio: transformers' seconds / megatfm's, median (lowest to highest).",
        table="| Model | Numbers | State | Processor's seconds | Seconds on the wall |",
    )
    for name, dtype, state in itertools.product(args.models, args.dtypes, args.states):
        torch.manual_seed(0)
        torch._dynamo.reset()
        losses = MODELS[name](args.rows, args.length, DTYPES[dtype], state == "compiled")
        side, peer_side = (common.make_side(functools.partial(run_both_passes, loss)) for loss in losses)
        page.add(f"| {name} | {dtype} | {state} | {format_ratios(common.compare(side, peer_side, args.rounds))} |")


def run_both_passes(compute_loss: Callable[[], Tensor]) -> None:
    compute_loss().backward()


def format_ratios(ratios: Mapping[str, Sequence[float]]) -> str:
    """Format the cells of both clocks: the median, the lowest and the highest ratio."""
    medians = {clock: statistics.median(ratios[clock]) for clock in ("cpu", "wall")}
    return " | ".join(f"{m:.2f} ({min(ratios[clock]):.2f} to {max(ratios[clock]):.2f})" for clock, m in medians.items())


# ----------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True)
class Case:
    """A batch: how many prompts, their lengths from and to, and how many tokens follow."""

    rows: int
    shortest: int
    longest: int
    new_tokens: int

    def draw_prompts(self, vocabulary: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        lengths = torch.linspace(self.shortest, self.longest, self.rows).round().int().tolist()
        return [torch.randint(1, vocabulary, (length,), generator=random) for length in lengths]


CASES = (Case(8, 16, 64, 32), Case(32, 16, 64, 24), Case(8, 200, 256, 16), Case(1, 32, 32, 32))


def make_generators(folder: Path, case: Case) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions of megatfm and of transformers that return the new tokens [rows, new_tokens]."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    model, prompts = load_hf_model(folder), case.draw_prompts(reference.config.vocab_size)
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros(case.rows, longest, dtype=torch.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1

    def generate_theirs() -> Tensor:
        tokens = reference.generate(
            ids, attention_mask=mask, max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens,
            do_sample=False, num_beams=1, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return tokens[:, longest:]

    def generate_ours() -> Tensor:
        return generate(model, Prompts(prompts), max_tokens=case.new_tokens)[:, longest:]

    return generate_ours, generate_theirs


@common.argument("--rounds", type=int, default=10)
@common.argument("--width", type=int, default=256)
@common.argument("--layers", type=int, default=4)
@common.argument("--vocabulary", type=int, default=8192)
@common.argument("--out", type=common.make_output_file)
def run_generation(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=args.vocabulary, n_positions=512, n_embd=args.width, n_layer=args.layers, n_head=args.width // 64,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    page = common.Page(
        args.out,
        "Greedy generation against transformers",
        f"{common.get_cpu_name()}, {torch.get_num_threads()} threads, other work on the machine: load "
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. torch {torch.__version__}, "
        f"transformers {transformers.__version__}.",
        f"GPT-2 of {args.layers} layers, width {args.width}, {args.vocabulary:,} tokens, float32. {args.rounds} "
        "interleaved rounds.",
        "Ratio: transformers' seconds / megatfm's, median (lowest to highest) over rounds.",
        table="| Prompts | Tokens of a prompt | New tokens | Processor's seconds | Seconds on the wall |",
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        for case in CASES:
            generate, generate_by_peer = make_generators(Path(folder), case)
            assert torch.equal(generate(), generate_by_peer()), "the sides generate different tokens"
            ratios = common.compare(common.make_side(generate), common.make_side(generate_by_peer), args.rounds)
            sizes = f"{case.rows} | {case.shortest} to {case.longest} | {case.new_tokens}"
            page.add(f"| {sizes} | {format_ratios(ratios)} |")


# -------------------------------------------------------------------------------------------------- initial

FEED_FORWARD_SHAPE = (16384, 4096)
"""One matrix of a 6.7B feed-forward network."""


def time_drawing(kind: Normal | TruncatedNormal, threads: int) -> float:
    return common.time_call(lambda: draw(kind, 0, "weight", FEED_FORWARD_SHAPE, (0, 0), FEED_FORWARD_SHAPE, threads))


@common.argument("--threads", type=int, default=2)
@common.argument("--rounds", type=int, default=10)
def run_initial(args: argparse.Namespace) -> None:
    for kind in (Normal(0.02), TruncatedNormal(0.02)):
        rounds = [(time_drawing(kind, 1), time_drawing(kind, args.threads)) for _ in range(args.rounds)]
        single, several = zip(*rounds, strict=True)
        ratio = common.compute_median_ratio(single, several)
        rate = FEED_FORWARD_SHAPE[0] * FEED_FORWARD_SHAPE[1] / statistics.median(single)
        print(f"{type(kind).__name__}: {args.threads} threads / 1: {ratio:.2f} (1: {rate / 1e6:.0f} M/s)")


# ----------------------------------------------------------------------------------------- layer-statistics

LENGTH, ROWS = 512, 4


def load_model_config(width: int) -> Config:
    sizes = [f"model.d_model={width}", f"model.ffn.d_ff={4 * width}", f"model.attention.n_heads={width // 64}"]
    plain = ["model.dropout=0", "model.attention.dropout=0", "model.vocab_size=8192", "parallel.dp_shard=1"]
    batch = [f"data.sequence_length={LENGTH}", f"train.micro_batch={ROWS}", f"train.global_batch={ROWS}"]
    return load_config("gpt2-124m", [*sizes, *plain, *batch])


def measure_layer_statistics(width: int, rounds: int) -> list[float]:
    """Return the ratios of steps with norms to steps without, by round."""
    config = load_model_config(width)
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), "fp32")
    tokens = torch.randint(0, 8192, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch, objective = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, Causal(SpecialTokens(bos=1, eos=2, pad=0))

    def step(records_stats: bool) -> None:
        engine.forward_backward([batch], objective, record_activations=records_stats)
        if records_stats:
            engine.layer_statistics()
        engine.step(1e-4, clip=1.0)

    calls = {kind: functools.partial(common.time_call, functools.partial(step, kind)) for kind in (False, True)}
    seconds = common.take_turns(calls, rounds, warmup=1)  # the first round allocates
    return [recorded / plain for recorded, plain in zip(seconds[True], seconds[False], strict=True)]


@common.argument("--widths", type=int, nargs="+", default=[256, 768])
@common.argument("--rounds", type=int, default=20)
@common.argument("--out", type=common.make_output_folder, help="folder for DATE-layer-statistics.md")
def run_layer_statistics(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    page = common.Page(
        common.make_dated_path(args.out, "layer-statistics.md"),
        "What norms by layer cost",
        f"`python benchmarks/model_speed.py layer-statistics`, {args.rounds} rounds, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s).",
        table="| d | a step, times one without: median | quartiles | of a run with `log.layer_stats_every = 10` |",
    )
    for width in args.widths:
        ratios = measure_layer_statistics(width, args.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        page.add(f"| {width} | {middle:.3f} | {low:.3f} to {high:.3f} | {100 * (middle - 1) / 10:.2f} % more |")
    dist.destroy_process_group()


PARTS = {
    "passes": run_passes,
    "generation": run_generation,
    "initial": run_initial,
    "layer-statistics": run_layer_statistics,
}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
