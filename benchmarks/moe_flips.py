"""Share of tokens that are routed to other experts on another layout, because sums over ranks round in another order.

    PYTHONPATH=. python benchmarks/moe_flips.py --out benchmarks/results/DATE-moe-flips.md

The model is one of `tests/parity/test_experts.py`, without dropout: two of four blocks have 12 experts, of which 2 are
chosen, with initial weights, whose probabilities nearly tie: the worst case. Tokens are drawn anew for each batch. A
token of a block counts where its set of experts isn't that of data ranks alone, as many as the layout has ranks.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import common
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.sequence import SequenceMetadata
from tests.support.batches import family_batch
from tests.support.expert_models import (
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    EXPERT_TP_LAYOUTS,
    TP2,
)
from tests.support.expert_parity import moe_layers, objective_for
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

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


def main() -> None:
    """Print a table, and write it with --out."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--out", type=common.make_output_file)
    args = parser.parse_args()
    page = common.Page(
        args.out,
        f"# Routes that differ between layouts, {common.today()}",
        "",
        f"`python benchmarks/moe_flips.py`, whose head says what is counted; torch {torch.__version__}, gloo.",
        "",
        "| Numbers | Ranks | Layout | Tokens with other experts | % |",
        "|---|---|---|---|---|",
    )
    workers = Workers()
    for precision in args.precisions:
        for ranks in args.ranks:
            choices_of_ranks = workers.run(record_all_choices, ranks, ranks, precision, args.batches, timeout=500.0)
            page.add(*format_rows(choices_of_ranks, ranks, precision))


if __name__ == "__main__":
    importlib.import_module("benchmarks.moe_flips").main()  # where ranks, which import it, find its functions
