"""A whole training step of GPT-2 124M, with the defaults, against a GPT written in plain PyTorch, on this CPU.

    python benchmarks/whole_step.py --rounds 10 --threads 2 --out benchmarks/results/DATE-whole-step.md

Forward, backward, clipping and AdamW. Ours is the engine as `megatfm train` builds it from the preset, in a process
that keeps what it frees, as training does; theirs is the model below with scaled_dot_product_attention, autocast for
bfloat16, clip_grad_norm_ and fused AdamW, in a process of its own: "plain" as Python starts it, "alike" keeping what it
frees, too. Same sizes, tokens, threads; no dropout on either side. Steps are interleaved, one process waiting for the
other, and sides alternate who goes first. There are several pairs of processes, since two processes of the same code
differ. A figure is the median over all rounds of (their seconds / our seconds): above 1, megatfm is faster. Seconds are
wall seconds and CPU seconds over all threads. Absolute times mean nothing, except for the first step, which compiles.
"""

import argparse
import json
import sys

import common
import torch
import torch.nn.functional as F
from common import Step, get_cpu_name, make_side
from torch import Tensor, nn

from megatfm.config import load_config
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.profiling import keep_freed_memory

VOCABULARY, WIDTH, LAYERS, HEADS = 50257, 768, 12, 12
LR, CLIP, BETAS, DECAY = 6e-4, 1.0, (0.9, 0.95), 0.1


class PlainBlock(nn.Module):
    """A block as GPT-2's: normalised before attention and feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Learned positions, tied head, the loss by F.cross_entropy."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks, self.norm = nn.ModuleList(PlainBlock() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def make_plain_step(tokens: Tensor, precision: str, compiled: bool) -> Step:
    """Return a step as in a short training script."""
    model = PlainGPT(tokens.shape[1] - 1)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    run = torch.compile(model) if compiled else model
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_megatfm_step(tokens: Tensor, precision: str, compiled: bool, overrides: list[str]) -> Step:
    """Return a step of the engine that `megatfm train` builds, on rows like the loader's."""
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    config = load_config(
        "gpt2-124m",
        [
            "model.dropout=0",
            "model.attention.dropout=0",
            f"model.position.max_positions={length}",
            f"data.sequence_length={length}",
            f"train.micro_batch={rows}",
            f"train.global_batch={rows}",
            *([f"train.compile={str(compiled).lower()}"] if compiled else []),
            *overrides,
        ],
    )
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), precision)
    objective = Causal(SpecialTokens(bos=1, eos=2, pad=0))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    arrays = {name: values.numpy() for name, values in batch.items()}
    arrays |= {"keys": torch.arange(rows).numpy()}

    def step() -> float:
        stats = engine.forward_backward([arrays], objective)
        engine.step(LR, CLIP)
        return stats.loss

    return step


def serve_steps(job: argparse.Namespace) -> None:
    """Take a step for each line of stdin, and print its seconds."""
    torch.set_num_threads(job.threads)
    if job.theirs != "plain":
        keep_freed_memory(torch.device("cpu"))
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (job.rows, job.length + 1))
    compiled = job.state == "compiled"
    with distributed.distributed_session(600, "cpu", 600):
        if job.theirs:
            side = make_side(make_plain_step(tokens, job.precision, compiled))
        else:
            side = make_side(make_megatfm_step(tokens, job.precision, compiled, job.set))
        for _ in sys.stdin:
            print(json.dumps(side()), flush=True)


def measure_row(precision: str, state: str, expected: str, args: argparse.Namespace) -> str:
    """Measure a case; return its row of the table."""
    job = {**vars(args), "precision": precision, "state": state, "out": None}
    jobs = {**job, "theirs": None}, {**job, "theirs": expected}
    figures, first = common.compare_processes(__file__, *jobs, args.pairs, args.rounds)
    return (
        f"| {precision} | {state} | {expected} | **{figures['wall']:.2f}** | {figures['wall_lowest']:.2f} – "
        f"{figures['wall_highest']:.2f} | {figures['cpu']:.2f} | {first[0]:.0f} / {first[1]:.0f} |"
    )


def main() -> None:
    """Run what the arguments ask for; print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of each pair of processes")
    parser.add_argument("--pairs", type=int, default=3, help="of processes, one after the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--states", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--theirs", nargs="+", default=["plain", "alike"], choices=["plain", "alike"])
    parser.add_argument("--set", nargs="*", default=[], help="settings of ours that are not the defaults")
    parser.add_argument("--out", type=common.make_output_file)
    parser.add_argument("--job", help="what a process is to do, in JSON: for the script itself")
    args = parser.parse_args()
    if args.job:
        serve_steps(argparse.Namespace(**json.loads(args.job)))
        return
    page = common.Page(
        args.out,
        f"# A whole step, {common.today()}",
        "",
        f"torch {torch.__version__}, {get_cpu_name(instructions=True)}, {args.threads} threads, "
        f"{args.rows} rows of {args.length} tokens, {args.pairs} pairs of processes, "
        f"{args.rounds} rounds each{', ' + ' '.join(args.set) if args.set else ''}; "
        "`python benchmarks/whole_step.py`, "
        "whose head says how it is measured.",
        "",
        "| Precision | | Theirs | Theirs / ours, clock | lowest – highest | Theirs / ours, CPU | First step, s |",
        "|---|---|---|---|---|---|---|",
    )
    for precision in args.precisions:
        for state in args.states:
            for reference in args.theirs:
                page.add(measure_row(precision, state, reference, args))


if __name__ == "__main__":
    main()
