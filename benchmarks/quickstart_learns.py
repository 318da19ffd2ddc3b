"""Small models on the quickstart's corpus: experts, routers, presets of the zoo, and what a longer context is worth.

    megatfm prep quickstart-data tokenizer.vocab_size=512 out=corpora/quickstart-512
    python benchmarks/quickstart_learns.py moe --out benchmarks/results/DATE-moe-learns.md
    python benchmarks/quickstart_learns.py routers --out benchmarks/results/DATE-moe-routers.md
    megatfm prep quickstart-data
    python benchmarks/quickstart_learns.py zoo --out benchmarks/results/DATE-zoo-learns.md
    megatfm launch quickstart --nproc 2 parallel.zero=0
    python benchmarks/quickstart_learns.py context runs/quickstart --corpus corpora/quickstart/validation \
        --out benchmarks/results

moe: a small mixture of experts, against the dense model of equally many active parameters. All are the preset
`quickstart-moe`, see the same tokens in the same order, and differ in the feed-forward network alone. A token goes
through as many weights of experts as of the dense network; a learned router adds `n_experts` · `d_model` weights a
block. Busiest is the load of the busiest expert as a multiple of the mean, over the steps after warm-up and over
blocks: the mean, and the highest in one step and block. The loss is the next token's, without terms that balance.

routers: every router against a dense model on made-up documents, in float64: a table that any CPU makes again. The
model and its documents are those of `tests/golden/test_preset_curves.py`: 60 steps of 1,024 tokens, each of which
follows from the one before seven times in eight. A model that knows a document's topic alone reaches ln 16 = 2.77.
Loss: the next token's, without terms of balance, the mean of the last 10 steps. Busiest: the load of the busiest expert
of any block by the mean, over the last 24 steps: their mean, and the highest. Active weights are those of the dense
model, but for the router's; a capacity is a row's.

zoo: a small GPT, BERT, T5 and ELECTRA, each its preset, made small. The table holds each term of the loss on held-out
text, in nats, after STEPS steps. A cross-entropy over the vocabulary is to be seen beside the entropy of the held-out
tokens' frequencies, which a model reaches that has learnt nothing else. The corpus is the standard library of the
Python that made it, so figures differ between machines. The curves that must repeat are those of `tests/golden`, on
text that is the same everywhere.

context: the loss of the same held-out tokens by how many before them the model sees. For a context of c tokens it reads
rows of c, each beginning c/2 after the one before. The second half of their targets counts, which have c/2 + 1 to c
tokens before them: every token of a document counts once, and the same ones at each c (Khandelwal et al. 2018 cut
contexts likewise). Targets are told apart by how far back the same token occurred last: where that is far, far context
can pay; where it never did, copying can't. Nats a token.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import common
import torch
from torch import Tensor, nn

from megatfm import load
from megatfm.config import load_config
from megatfm.corpus.corpus import Corpus
from megatfm.describe import describe
from megatfm.parallel import distributed
from tests.support.golden_curves import MOE_PRESET, SMALL_MOE, train_curves

# ------------------------------------------------------------------------------------------------------ moe

D_FF = 128
"""Width of the dense network."""
QUIET = ("log.sinks=[]", "log.layer_stats_every=4", "evaluate.every=0", "checkpoint.every=100000")
WARM = 0.2
"""Share of the steps that counts as warm-up for the balance."""


def make_moe_section(
    d_ff: int, router: Mapping[str, object], *, experts: int = 8, top_k: int = 2, n_shared_experts: int = 0, **more: Any
) -> dict[str, object]:
    """Return a config of experts with as many active weights as a dense network of `d_ff`, shared ones included."""
    sizes = {"d_ff": d_ff // (top_k + n_shared_experts), "n_experts": experts, "top_k": top_k}
    return {"name": "moe", **sizes, "n_shared_experts": n_shared_experts, **more, "router": router}


def make_networks(d_ff: int) -> dict[str, dict[str, object]]:
    """Return feed-forward networks by name: a dense one, and experts with as many active weights."""
    make_moe = partial(make_moe_section, d_ff)
    even = {"name": "deepseek_v3", "bias_update_rate": 0.01}
    top_k, balanced = {"name": "top_k"}, {"name": "top_k", "aux_loss_coef": 0.1}
    return {
        "dense": {"d_ff": d_ff},
        "`top_k`, `aux_loss_coef` 0.05": make_moe({**top_k, "aux_loss_coef": 0.05}),
        "`deepseek_v3`, `bias_update_rate` 0.01": make_moe(even),
        "`top_k`, `aux_loss_coef` 0.1": make_moe(balanced),
        "`top_k`, `aux_loss_coef` 0.01": make_moe({**top_k, "aux_loss_coef": 0.01}),
        "`top_k`, no balance": make_moe(top_k),
        "`switch`, `aux_loss_coef` 0.1, `capacity_factor` 1.25": make_moe(
            {"name": "switch", "aux_loss_coef": 0.1}, top_k=1, capacity_factor=1.25
        ),
        "`hash`": make_moe({"name": "hash"}),
        "`deepseek_v3`, 16 experts of half the width, 4 chosen": make_moe(even, experts=16, top_k=4),
        "`deepseek_v3`, 32 experts of a quarter, 8 chosen": make_moe(even, experts=32, top_k=8),
        "`deepseek_v3`, one shared and one chosen": make_moe(even, top_k=1, n_shared_experts=1),
        "`top_k`, `seq_aux_loss_coef` 0.1": make_moe({**top_k, "seq_aux_loss_coef": 0.1}),
        "`top_k`, `aux_loss_coef` 0.1, `capacity_factor` 1.25": make_moe(balanced, capacity_factor=1.25),
        "`gshard`, `aux_loss_coef` 0.1": make_moe({"name": "gshard", "aux_loss_coef": 0.1}),
        "`noisy_top_k`, `importance_loss_coef`, `load_loss_coef` 0.1": make_moe(
            {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1}
        ),
    }


NETWORKS = make_networks(D_FF)


class Outcome(NamedTuple):
    active: int
    parameters: int
    loss: float
    loads: list[float]
    dropped: float


def make_network_overrides(ffn: dict[str, object], corpora: Path, steps: int, seed: int, run: Path) -> list[str]:
    return [
        *QUIET, f"model.ffn={common.format_toml(ffn)}", f"train.steps={steps}", f"train.seed={seed}",
        f"run_dir={run}", f"data.corpus={corpora}",
    ]  # fmt: skip


def train(ffn: dict[str, object], corpora: Path, steps: int, seed: int, run: Path) -> Outcome:
    """Train in a separate process unless that is done, and read metrics.jsonl."""
    words = make_network_overrides(ffn, corpora, steps, seed, run)
    record = run / "metrics.jsonl"
    if not record.exists() or '"evaluation"' not in record.read_text():
        common.run_megatfm("train", "quickstart-moe", *words)
    lines = common.read_rows(record)
    norms = [line.get("norms", {}).values() for line in lines if line["step"] > WARM * steps]
    layers = [layer for layer in itertools.chain.from_iterable(norms) if "load_max" in layer]
    counts, held_out = describe(load_config("quickstart-moe", words)), lines[-1]["evaluation"]["validation"]
    return Outcome(
        counts.active,
        counts.parameters,
        held_out.get("terms", {}).get("causal", held_out["loss"]),
        [layer["load_max"] for layer in layers],
        statistics.fmean(layer["dropped"] for layer in layers) if layers else 0.0,
    )


def format_row(name: str, seeds: list[Outcome], dense: list[Outcome]) -> str:
    losses = [outcome.loss for outcome in seeds]
    loads = [load for outcome in seeds for load in outcome.loads]
    better = [expected.loss - run.loss for run, expected in zip(seeds, dense, strict=True)]
    cells = (
        name,
        f"{seeds[0].parameters / 1e6:.2f}",
        f"{seeds[0].active / 1e6:.3f}",
        " ".join(f"{loss:.3f}" for loss in losses),
        " ".join(f"{gain:+.3f}" for gain in better),
        f"{statistics.fmean(loads):.2f}, {max(loads):.2f}" if loads else "",
        f"{100 * statistics.fmean(outcome.dropped for outcome in seeds):.1f}" if loads else "",
    )
    return f"| {' | '.join(cells)} |"


@common.argument("--corpus", type=Path, default=Path("corpora/quickstart-512"))
@common.argument("--steps", type=int, default=1200)
@common.argument("--seeds", type=int, nargs="+", default=[0])
@common.argument("--models", nargs="+", default=list(NETWORKS), help="names, or their beginnings")
@common.argument("--out", type=common.make_output_file)
@common.argument("--runs", type=Path, help="keep runs in this folder, and take those that are there")
def run_moe(args: argparse.Namespace) -> None:
    chosen = [name for name in NETWORKS if name.startswith(("dense", *args.models))]
    outcomes: dict[str, list[Outcome]] = {}
    page = common.Page(
        args.out,
        "Small mixtures of experts on the quickstart's corpus",
        f"`python benchmarks/quickstart_learns.py moe --steps {args.steps} --seeds {' '.join(map(str, args.seeds))}`, "
        f"torch {torch.__version__},",
        f"the standard library of Python {python_version()}. One figure a seed. Parameters in millions.",
        table=(
            "| Feed-forward network | Parameters | Active | Held-out loss, nats | Better than dense by | "
            "Busiest: mean, highest | Dropped, % |"
        ),
    )
    with TemporaryDirectory() as folder:
        runs_folder, every = args.runs or Path(folder), list(NETWORKS)
        for name in chosen:
            folders = [runs_folder / f"{every.index(name)}-{seed}" for seed in args.seeds]
            outcomes[name] = [
                train(NETWORKS[name], args.corpus.resolve(), args.steps, seed, run)
                for seed, run in zip(args.seeds, folders, strict=True)
            ]
            page.add(format_row(name, outcomes[name], outcomes["dense"]))


# -------------------------------------------------------------------------------------------------- routers

DENSE_WIDTH = 64
"""Width of the dense network."""
WARM_STEPS = 36
"""Steps that do not count for the balance."""


def measure_router(name: str, ffn: Mapping[str, object]) -> str:
    small = [f"{key}={value}" for key, value in SMALL_MOE.items() if not key.startswith("model.ffn")]
    config = load_config(MOE_PRESET, [f"model.ffn={common.format_toml(ffn)}", *small])
    metrics = train_curves(config.model_dump())
    loads = metrics.get("busiest", [])[WARM_STEPS:]
    cells = (
        name,
        f"{statistics.fmean(metrics.get('causal', metrics['loss'])[-10:]):.3f}",
        f"{statistics.fmean(loads):.2f}, {max(loads):.2f}" if loads else "",
    )
    return f"| {' | '.join(cells)} |"


@common.argument("--out", type=common.make_output_file)
def run_routers(args: argparse.Namespace) -> None:
    page = common.Page(
        args.out,
        "Routers on made-up documents",
        f"`python benchmarks/quickstart_learns.py routers`, torch {torch.__version__}, float64.",
        table="| Feed-forward network | Loss, nats a token | Busiest: mean, highest |",
    )
    with distributed.distributed_session(device="cpu"):
        for name, ffn in make_networks(DENSE_WIDTH).items():
            page.add(measure_router(name, ffn))


# ------------------------------------------------------------------------------------------------------ zoo

SMALL = (
    "model.vocab_size=4096", "model.d_model=64", "model.n_layers=2", "model.attention.n_heads=2", "model.ffn.d_ff=256",
    "model.dropout=0", "model.attention.dropout=0", "data.sequence_length=128", "optimizer.lr=3e-3",
    "lr_schedule.warmup_steps=50", "train.global_batch=16", "train.micro_batch=16", "train.precision=fp32",
    "log.sinks=[]",
)  # fmt: skip
PRESETS: dict[str, tuple[str, ...]] = {
    "gpt2-124m": (),
    "bert-base": (),
    "t5-base": ("data.target_length=64",),
    "electra-small": ("model.embedding.dim=32",
                      *("model.generator.d_model=32", "model.generator.d_ff=128", "model.generator.n_heads=1")),
}  # fmt: skip


def iter_documents(corpus: Path) -> Iterator[Tensor]:
    opened = Corpus.open(corpus)
    for block in range(opened.n_blocks):
        for _, tokens in opened.read_block(block):
            yield torch.tensor(tokens.astype("int64"))


def compute_entropy(corpus: Path) -> float:
    """Return the entropy of a corpus's token frequencies, in nats."""
    counts = torch.zeros(4096, dtype=torch.float64)
    for tokens in iter_documents(corpus):
        counts += torch.bincount(tokens, minlength=len(counts))
    return float(torch.special.entr(counts / counts.sum()).sum())


def make_preset_overrides(preset: str, corpora: Path, steps: int, run: Path) -> list[str]:
    return [
        *SMALL, *PRESETS[preset], f"train.steps={steps}", f"run_dir={run}", f"data.train={corpora}/train",
        f"data.validation={{ held-out = '{corpora}/validation' }}", f"data.tokenizer={corpora}/tokenizer.model",
    ]  # fmt: skip


def train_and_evaluate(preset: str, corpora: Path, steps: int, run: Path) -> dict[str, float]:
    """Train in a separate process; return each loss term on held-out text after the last step."""
    words = make_preset_overrides(preset, corpora, steps, run)
    common.run_megatfm("train", preset, *words)
    result = common.read_rows(run / "metrics.jsonl")[-1]["evaluation"]["held-out"]
    return result.get("terms") or {"loss": result["loss"]}


@common.argument("--corpus", type=Path, default=Path("corpora/quickstart"))
@common.argument("--steps", type=int, default=1500)
@common.argument("--out", type=common.make_output_file)
def run_zoo(args: argparse.Namespace) -> None:
    corpora = args.corpus.resolve()
    page = common.Page(
        args.out,
        "Small models of the zoo on the quickstart's corpus",
        f"`python benchmarks/quickstart_learns.py zoo --steps {args.steps}`, torch {torch.__version__}; the text",
        f"is the standard library of Python {python_version()}. The held-out tokens' frequencies alone: "
        f"{compute_entropy(corpora / 'validation'):.3f} nats.",
        table="| Preset, made small | Term | Held-out loss, nats |",
    )
    with TemporaryDirectory() as folder:
        for preset in PRESETS:
            for term, loss in train_and_evaluate(preset, corpora, args.steps, Path(folder) / preset).items():
                page.add(f"| `{preset}` | {term} | {loss:.3f} |")


# -------------------------------------------------------------------------------------------------- context

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
        if end > first:
            back.append(find_distances(text)[first:end])
            for context, parts in all_losses.items():
                parts.append(compute_losses(model, text, context, first, end))
    far = torch.cat(back)
    groups = {"all": far >= 0}
    groups |= {f"{low + 1} to {high} back": (far > low) & (far <= high) for low, high in itertools.pairwise(bounds)}
    groups[f"more than {bounds[-1]} back"] = far > bounds[-1]
    groups["never"] = far == 0
    losses = {context: torch.cat(parts) for context, parts in all_losses.items()}
    return {
        name: {"of": int(mask.sum()), "nats": {c: round(float(values[mask].mean()), 3) for c, values in losses.items()}}
        for name, mask in groups.items()
        if mask.any()
    }


@common.argument("runs", type=Path, nargs="+", metavar="RUN")
@common.argument("--corpus", type=Path, required=True, help="held-out documents, prepared")
@common.argument("--longest", type=int, default=256, help="the longest context, a power of two")
@common.argument("--out", type=common.make_output_folder, help="folder for the result of the day")
def run_context(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    machine = f"{common.get_cpu_name()}, 1 thread, torch {torch.__version__}"
    result: dict[str, Any] = {"date": common.today(), "machine": machine, "runs": {}}
    for run in args.runs:
        model = load(run).module
        parameters = sum(p.numel() for p in model.parameters())
        judgement = judge(model, iter_documents(args.corpus), args.longest)
        result["runs"][run.name] = {"parameters": parameters, **judgement}
        print(run.name, json.dumps(judgement, indent=1), flush=True)
        common.write_json(common.make_dated_path(args.out, "context-worth.json"), result)


PARTS = {"moe": run_moe, "routers": run_routers, "zoo": run_zoo, "context": run_context}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
