"""A small mixture of experts and the dense model of equally many active parameters, on the quickstart's corpus.

    megatfm prep quickstart-data tokenizer.vocab_size=512 out=corpora/quickstart-512
    python benchmarks/moe_learns.py --out benchmarks/results/DATE-moe-learns.md

All are the preset `quickstart-moe`, see the same tokens in the same order, and differ in the feed-forward network
alone. A token goes through as many weights of experts as of the dense network; a learned router adds `n_experts` ·
`d_model` weights a block. Busiest is the load of the busiest expert as a multiple of the mean, over the steps after
warm-up and over blocks: the mean, and the highest in one step and block. The loss is the next token's, without terms
that balance.
"""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import common
import torch

from megatfm.config import load_config
from megatfm.describe import describe

D_FF = 128
"""Width of the dense network."""
QUIET = ("log.sinks=[]", "log.layer_stats_every=4", "evaluate.every=0", "checkpoint.every=100000")
WARM = 0.2
"""Share of the steps that counts as warm-up for the balance."""


moe = partial(common.make_moe_section, D_FF)
"""A section of experts with as many active weights as the dense network."""

EVEN = {"name": "deepseek_v3", "bias_update_rate": 0.01}
MODELS: dict[str, dict[str, object] | None] = {
    "dense": None,
    "`top_k`, `balance` 0.05": moe({"name": "top_k", "aux_loss_coef": 0.05}),
    "`deepseek_v3`, `bias_update_rate` 0.01": moe(EVEN),
    "`top_k`, `balance` 0.1": moe({"name": "top_k", "aux_loss_coef": 0.1}),
    "`top_k`, no balance": moe({"name": "top_k"}),
    "`switch`, `balance` 0.1, `capacity` 1.25": moe(
        {"name": "switch", "aux_loss_coef": 0.1}, top_k=1, capacity_factor=1.25
    ),
    "`hash`": moe({"name": "hash"}),
    "`deepseek_v3`, 32 experts of a quarter, 8 chosen": moe(EVEN, experts=32, top_k=8),
    "`deepseek_v3`, one shared and one chosen": moe(EVEN, top_k=1, n_shared_experts=1),
    "`top_k`, `sequence_balance` 0.1": moe({"name": "top_k", "seq_aux_loss_coef": 0.1}),
    "`top_k`, `balance` 0.1, `capacity` 1.25": moe({"name": "top_k", "aux_loss_coef": 0.1}, capacity_factor=1.25),
    "`gshard`, `balance` 0.1": moe({"name": "gshard", "aux_loss_coef": 0.1}),
    "`noisy_top_k`, `importance`, `load` 0.1": moe(
        {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1}
    ),
}


class Outcome(NamedTuple):
    """The outcome of a run."""

    active: int
    parameters: int
    loss: float
    loads: list[float]
    dropped: float


def make_overrides(ffn: dict[str, object] | None, corpora: Path, steps: int, seed: int, run: Path) -> list[str]:
    """Return the overrides of a run."""
    section = {"d_ff": D_FF} if ffn is None else ffn
    return [
        *QUIET, f"model.ffn={common.format_toml(section)}", f"train.steps={steps}", f"train.seed={seed}",
        f"run_dir={run}", f"data.corpus={corpora}",
    ]  # fmt: skip


def train(ffn: dict[str, object] | None, corpora: Path, steps: int, seed: int, run: Path) -> Outcome:
    """Train in a separate process unless that is done, and read metrics.jsonl."""
    words = make_overrides(ffn, corpora, steps, seed, run)
    record = run / "metrics.jsonl"
    if not record.exists() or '"evaluation"' not in record.read_text():
        subprocess.run([sys.executable, "-m", "megatfm", "train", "quickstart-moe", *words], check=True)
    lines: list[dict[str, Any]] = [json.loads(line) for line in record.read_text().splitlines()]
    layers = [
        layer
        for line in lines
        if line["step"] > WARM * steps
        for layer in line.get("norms", {}).values()
        if "load_max" in layer
    ]
    counts, held_out = describe(load_config("quickstart-moe", words)), lines[-1]["evaluation"]["validation"]
    return Outcome(
        counts.active,
        counts.parameters,
        held_out.get("terms", {}).get("causal", held_out["loss"]),
        [layer["load_max"] for layer in layers],
        statistics.fmean(layer["dropped"] for layer in layers) if layers else 0.0,
    )


def format_row(name: str, seeds: list[Outcome], dense: list[Outcome]) -> str:
    """Format a row of the table."""
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


def main() -> None:
    """Train all, print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("corpora/quickstart-512"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names, or their beginnings")
    parser.add_argument("--out", type=common.make_output_file)
    parser.add_argument("--runs", type=Path, help="keep runs in this folder, and take those that are there")
    args = parser.parse_args()
    chosen = [
        name for name in MODELS if name == "dense" or any(name.startswith(beginning) for beginning in args.models)
    ]
    outcomes: dict[str, list[Outcome]] = {}
    page = common.Page(
        args.out,
        f"# Small mixtures of experts on the quickstart's corpus, {common.today()}",
        "",
        f"`python benchmarks/moe_learns.py --steps {args.steps} --seeds {' '.join(map(str, args.seeds))}`, torch "
        f"{torch.__version__},",
        f"the standard library of Python {python_version()}. One figure a seed. Parameters in millions.",
        "",
        "| Feed-forward network | Parameters | Active | Held-out loss, nats | Better than dense by | "
        "Busiest: mean, highest | Dropped, % |",
        "|---|---|---|---|---|---|---|",
    )
    with TemporaryDirectory() as folder:
        runs_folder, every = args.runs or Path(folder), list(MODELS)
        for name in chosen:
            folders = [runs_folder / f"{every.index(name)}-{seed}" for seed in args.seeds]
            outcomes[name] = [
                train(MODELS[name], args.corpus.resolve(), args.steps, seed, run)
                for seed, run in zip(args.seeds, folders, strict=True)
            ]
            page.add(format_row(name, outcomes[name], outcomes["dense"]))


if __name__ == "__main__":
    main()
