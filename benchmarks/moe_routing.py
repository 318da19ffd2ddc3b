"""Routers of a mixture of experts: how a layout changes their choices, and how each learns and balances.

    PYTHONPATH=. python benchmarks/moe_routing.py flips --out benchmarks/results/DATE-moe-flips.md
    PYTHONPATH=. python benchmarks/moe_routing.py routers --out benchmarks/results/DATE-moe-routers.md

flips: share of tokens that are routed to other experts on another layout, because sums over ranks round in another
order. The model is one of `tests/parity/test_experts.py`, without dropout: two of four blocks have 12 experts, of which
2 are chosen, with initial weights, whose probabilities nearly tie: the worst case. Tokens are drawn anew for each
batch. A token of a block counts where its set of experts isn't that of data ranks alone, as many as the layout has
ranks.

routers: every router against a dense model on made-up documents, in float64: a table that any CPU makes again. The
model and its documents are those of `tests/golden/test_preset_curves.py`: 60 steps of 1,024 tokens, each of which
follows from the one before seven times in eight. A model that knows a document's topic alone reaches ln 16 = 2.77.
Loss: the next token's, without terms of balance, the mean of the last 10 steps. Busiest: the load of the busiest expert
of any block by the mean, over the last 24 steps: their mean, and the highest. Active weights are those of the dense
model, but for the router's; a capacity is a row's.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig, load_config
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel import distributed
from tests.support.batches import family_batch
from tests.support.expert_models import EXPERT_CONTEXT_LAYOUTS, EXPERT_LAYOUTS, EXPERT_MODELS, EXPERT_TP_LAYOUTS, TP2
from tests.support.expert_parity import moe_layers, objective_for
from tests.support.golden_curves import MOE_PRESET, SMALL_MOE, train_curves
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

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
    """Choices by layout."""
    return {name: record_choices(parallel, precision, batches) for name, parallel in LAYOUTS[ranks].items()}


def format_rows(choices_of_ranks: list[Mapping[str, Choices]], ranks: int, precision: str) -> list[str]:
    """Format the lines of the table."""
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


def add_flips(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--out", type=common.make_output_file)
    return run_flips


def run_flips(args: argparse.Namespace) -> None:
    """Print a table, and write it with --out."""
    page = common.Page(
        args.out,
        f"# Routes that differ between layouts, {common.today()}",
        "",
        f"`python benchmarks/moe_routing.py flips`, whose head says what is counted; torch {torch.__version__}, gloo.",
        "",
        "| Numbers | Ranks | Layout | Tokens with other experts | % |",
        "|---|---|---|---|---|",
    )
    workers = Workers()
    for precision in args.precisions:
        for ranks in args.ranks:
            choices_of_ranks = workers.run(record_all_choices, ranks, ranks, precision, args.batches, timeout=500.0)
            page.add(*format_rows(choices_of_ranks, ranks, precision))


# -------------------------------------------------------------------------------------------------- routers

D_FF = 64
"""Width of the dense network."""
WARM = 36
"""Steps that do not count for the balance."""


make_moe = partial(common.make_moe_section, D_FF)
"""A section of experts with as many active weights as the dense network."""

EVEN = {"name": "deepseek_v3", "bias_update_rate": 0.01}
TOP_K = {"name": "top_k", "aux_loss_coef": 0.1}
NETWORKS: dict[str, dict[str, object]] = {
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


def add_routers(parser: argparse.ArgumentParser) -> common.Run:
    parser.add_argument("--out", type=common.make_output_file)
    return run_routers


def run_routers(args: argparse.Namespace) -> None:
    """Train all, print a table and write it."""
    page = common.Page(
        args.out,
        f"# Routers on made-up documents, {common.today()}",
        "",
        f"`python benchmarks/moe_routing.py routers`, torch {torch.__version__}, float64.",
        "",
        "| Feed-forward network | Loss, nats a token | Busiest: mean, highest |",
        "|---|---|---|",
    )
    with distributed.distributed_session(device="cpu"):
        for name, ffn in NETWORKS.items():
            page.add(measure_row(name, ffn))


PARTS = {"flips": add_flips, "routers": add_routers}

if __name__ == "__main__":
    common.run_part(__doc__, PARTS)
