"""Cost of layer statistics: optimizer steps with and without the norms of each layer, in turn.

    python benchmarks/layer_statistics.py --out benchmarks/results

A decoder of 12 blocks on one process, batches of 2,048 tokens in rows of 512; eager, since outputs of compiled blocks
can't be observed. Each round takes a step of either kind; medians of the ratios within a round.
`log.layer_stats_every = N` pays the extra once in N steps.
"""

import statistics
import time

import common
import torch
import torch.distributed as dist

from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.objectives import Causal, SpecialTokens
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine

LENGTH, ROWS = 512, 4


def load_model_config(width: int) -> Config:
    sizes = [
        f"model.d_model={width}",
        f"model.ffn.d_ff={4 * width}",
        f"model.attention.n_heads={width // 64}",
    ]
    other_settings = [
        "model.dropout=0",
        "model.attention.dropout=0",
        "model.vocab_size=8192",
        "parallel.dp_shard=1",
    ]
    batch = [f"data.sequence_length={LENGTH}", f"train.micro_batch={ROWS}", f"train.global_batch={ROWS}"]
    return load_config("gpt2-124m", [*sizes, *other_settings, *batch])


def time_step(engine: Engine, batch: dict[str, torch.Tensor], *, records_stats: bool) -> float:
    """Return the seconds of one optimizer step."""
    start = time.perf_counter()
    engine.forward_backward([batch], Causal(SpecialTokens(bos=1, eos=2, pad=0)), record_activations=records_stats)
    if records_stats:
        engine.layer_statistics()
    engine.step(1e-4, clip=1.0)
    return time.perf_counter() - start


def measure(width: int, rounds: int) -> list[float]:
    """Return the ratios of steps with norms to steps without, by round."""
    config = load_model_config(width)
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), "fp32")
    tokens = torch.randint(0, 8192, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    ratios = []
    for number in range(1 + rounds):
        order = common.alternate_order((False, True), number)
        seconds = {kind: time_step(engine, batch, records_stats=kind) for kind in order}
        if number:  # the first round allocates
            ratios.append(seconds[True] / seconds[False])
    return ratios


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-layer-statistics.md")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    page = common.Page(
        common.make_dated_path(args.out, "layer-statistics.md"),
        f"# What norms by layer cost, {common.today()}",
        "",
        f"`python benchmarks/layer_statistics.py`, {args.rounds} rounds, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s).",
        "",
        "| d | a step, times one without: median | quartiles | of a run with `log.layer_stats_every = 10` |",
        "|---|---|---|---|",
    )
    for width in args.widths:
        ratios = measure(width, args.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        page.add(f"| {width} | {middle:.3f} | {low:.3f} to {high:.3f} | {100 * (middle - 1) / 10:.2f} % more |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
