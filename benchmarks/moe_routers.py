"""Every router of a mixture of experts on made-up documents, in float64: a table that any CPU makes again.

    PYTHONPATH=. python benchmarks/moe_routers.py --out benchmarks/results/DATE-moe-routers.md

The model and its documents are those of `tests/golden/test_preset_curves.py`: 60 steps of 1,024 tokens, each of which
follows from the one before seven times in eight. A model that knows a document's topic alone reaches ln 16 = 2.77.
Loss: the next token's, without terms of balance, the mean of the last 10 steps. Busiest: the load of the busiest expert
of any block by the mean, over the last 24 steps: their mean, and the highest. Active weights are those of the dense
model, but for the router's; a capacity is a row's.
"""

import statistics
from collections.abc import Mapping
from functools import partial

import common
import torch

from megatfm.config import load_config
from megatfm.parallel import distributed
from tests.support.golden_curves import MOE_PRESET, SMALL_MOE, train_curves

D_FF = 64
"""Width of the dense network."""
WARM = 36
"""Steps that do not count for the balance."""


make_moe = partial(common.make_moe_section, D_FF)
"""A section of experts with as many active weights as the dense network."""

EVEN = {"name": "deepseek_v3", "bias_update_rate": 0.01}
TOP_K = {"name": "top_k", "aux_loss_coef": 0.1}
MODELS: dict[str, dict[str, object]] = {
    "dense": {"d_ff": D_FF},
    "`deepseek_v3`, `bias_update_rate` 0.01": make_moe(EVEN),
    "`top_k`, `balance` 0.1": make_moe(TOP_K),
    "`top_k`, `balance` 0.01": make_moe({"name": "top_k", "aux_loss_coef": 0.01}),
    "`top_k`, `sequence_balance` 0.1": make_moe({"name": "top_k", "seq_aux_loss_coef": 0.1}),
    "`top_k`, nothing that balances": make_moe({"name": "top_k"}),
    "`top_k`, `balance` 0.1, `capacity` 1.25": make_moe(TOP_K, capacity_factor=1.25),
    "`switch`, `balance` 0.1, `capacity` 1.25": make_moe(
        {"name": "switch", "aux_loss_coef": 0.1}, top_k=1, capacity_factor=1.25
    ),
    "`gshard`, `balance` 0.1": make_moe({"name": "gshard", "aux_loss_coef": 0.1}),
    "`noisy_top_k`, `importance`, `load` 0.1": make_moe(
        {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1}
    ),
    "`hash`": make_moe({"name": "hash"}),
    "`deepseek_v3`, 16 experts of half the width, 4 chosen": make_moe(EVEN, experts=16, top_k=4),
    "`deepseek_v3`, one shared, one of 8 chosen": make_moe(EVEN, top_k=1, n_shared_experts=1),
}


def measure_row(name: str, ffn: Mapping[str, object]) -> str:
    """Train, and make a row of the table."""
    small = [f"{key}={value}" for key, value in SMALL_MOE.items() if not key.startswith("model.ffn")]
    config = load_config(MOE_PRESET, [f"model.ffn={common.format_toml(ffn)}", *small])
    metrics = train_curves(config.model_dump())
    loads = metrics.get("busiest", [])[WARM:]
    cells = (
        name,
        f"{statistics.fmean(metrics.get('causal', metrics['loss'])[-10:]):.3f}",
        f"{statistics.fmean(loads):.2f}, {max(loads):.2f}" if loads else "",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Train all, print a table and write it."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--out", type=common.make_output_file)
    args = parser.parse_args()
    page = common.Page(
        args.out,
        f"# Routers on made-up documents, {common.today()}",
        "",
        f"`python benchmarks/moe_routers.py`, torch {torch.__version__}, float64.",
        "",
        "| Feed-forward network | Loss, nats a token | Busiest: mean, highest |",
        "|---|---|---|",
    )
    with distributed.distributed_session(device="cpu"):
        for name, ffn in MODELS.items():
            page.add(measure_row(name, ffn))


if __name__ == "__main__":
    main()
