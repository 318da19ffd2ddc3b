"""Axes of a mesh and groups along them; a layout that doesn't fit is refused in one line, with one that does."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.config import ParallelConfig, load_config
from megatfm.config.world_size import check_global_batch, compute_axis_sizes
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.parallel.mesh import build_mesh, create_group_of
from megatfm.parallel.parallelize import _make_tensor_layout
from megatfm.parallel.tp_plans import match_styles
from megatfm.train.build import plan_pipeline_split
from tests.support.workers import Workers

GPT = (
    "gpt2-124m", "model.vocab_size=96", "model.d_model=32", "model.n_layers=2", "model.attention.n_heads=4",
    "model.ffn.d_ff=48", "data.sequence_length=24", "train.global_batch=8", "train.micro_batch=2",
    "parallel.dp_shard=1",
)  # fmt: skip
MOE = (*GPT, "model.ffn.name=moe", "model.ffn.n_experts=6", "model.ffn.top_k=2", "model.ffn.bias=false")
XLNET = (
    "xlnet-base", "model.vocab_size=96", "data.sequence_length=48", "model.attention.n_heads=12",
    "parallel.dp_shard=1",
)  # fmt: skip


def accept(base: Sequence[str], overrides: Sequence[str], processes: int | None) -> None:
    """All that is asked of a layout before ranks meet, and what laying the plan asks on each of them."""
    config = load_config(base[0], [*base[1:], *overrides])
    parallel = config.parallel
    ranks = parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.tp
    sizes = compute_axis_sizes(parallel, processes or ranks)
    check_global_batch(config.train.global_batch, config.train.micro_batch, sizes["dp_replicate"] * sizes["dp_shard"])
    with torch.device("meta"):
        model = build(config.model)
    for path, planned in match_styles(model, complete=parallel.tp > 1).items():
        module = model.get_submodule(path)
        style = planned.resolve(module, parallel.tp, parallel.expert_tp)
        for key, tensor in module.named_parameters(recurse=False):
            for part in range(parallel.tp) if parallel.tp > 1 else ():
                mesh: Any = SimpleNamespace(
                    size=lambda axis: getattr(parallel, axis, 1),
                    rank=lambda axis, part=part: part,
                    count_shards=lambda axes: 1,
                )
                _make_tensor_layout(f"{path}.{key}", tensor, style, mesh, True)
    if parallel.pp > 1:
        plan_pipeline_split(config, model)


REFUSED: list[tuple[tuple[str, ...], list[str], int | None, str, list[str]]] = [
    # tensor parallelism
    (GPT, ["parallel.tp=3"], None,
     r"parallel\.tp = 3 does not divide model\.attention\.n_heads = 4: the nearest .* is (2)$", ["parallel.tp={0}"]),
    (GPT, ["parallel.tp=4", "model.ffn.d_ff=50"], None,
     r"parallel\.tp = 4 does not divide model\.ffn\.d_ff = 50: the nearest .* is (2)$", ["parallel.tp={0}"]),
    (GPT, ["parallel.tp=4", 'model.layer_types=["a"]', "model.layer_type.a.ffn.d_ff=50"], None,
     r"parallel\.tp = 4 does not divide model\.layer_type\.a\.ffn\.d_ff = 50: the nearest .* is (2)$",
     ["parallel.tp={0}"]),
    (GPT, ["parallel.tp=4", "model.attention.n_heads=6", "model.d_model=48"], None,
     r"parallel\.tp = 4 does not divide model\.attention\.n_heads = 6: the nearest .* is (3)$", ["parallel.tp={0}"]),
    (GPT, ["parallel.tp=6", "model.attention.n_heads=12", "model.d_model=48", "model.attention.n_kv_heads=4"], None,
     r"parallel\.tp = 6 does not divide model\.attention\.n_kv_heads = 4: the nearest .* is (4)$",
     ["parallel.tp={0}"]),
    (GPT, ["parallel.tp=4", "model.vocab_size=5"], None,
     r"parallel\.tp = 4 leaves ranks without a shard of .*tokens\.weight \[5, 32\]: the nearest .* is (3)$",
     ["parallel.tp={0}", "model.attention.n_heads=3", "model.attention.head_dim=8"]),
    (GPT, ["parallel.tp=4", "data.sequence_length=22"], None,
     r"data\.sequence_length = 22 does not divide .* parallel\.tp = 4 .*: choose (20), or parallel\.(seq.*=false)$",
     ["data.sequence_length={0}"]),
    (GPT, ["parallel.tp=4", "data.sequence_length=22"], None, r"or parallel\.(sequence_parallel=false)$",
     ["parallel.{0}"]),
    (XLNET, ["parallel.tp=3"], None, r"parallel\.tp = 3: .* groups of 16, .*: choose tp = (1), or",
     ["parallel.tp={0}"]),
    (XLNET, ["parallel.tp=12"], None, r"parallel\.tp = 12: .* groups of 16, .*: choose tp = (4), or",
     ["parallel.tp={0}"]),
    # pipelines
    (GPT, ["parallel.pp=5"], None, r"5 pipeline stages .* into 4 at most: choose parallel\.(pp = 4)$",
     ["parallel.{0}"]),
    (GPT, ["parallel.pp=2", "parallel.pp_schedule=interleaved", "parallel.virtual_stages=3"], None,
     r"6 pipeline stages .* into 4 at most: choose parallel\.(virtual_stages = 2)$", ["parallel.{0}"]),
    (GPT, ["parallel.pp=3", "parallel.pp_schedule=zbv"], None,
     r"6 pipeline stages .* 2 on each rank\), .* 4 at most: choose parallel\.(pp = 2)$", ["parallel.{0}"]),
    (GPT, ["parallel.pp=3", "parallel.pp_schedule=dualpipev", "model.n_layers=1"], None,
     r"6 pipeline stages .* 3 at most: choose parallel\.(pp = 3) and parallel\.(pp_schedule = '1f1b')$",
     ["parallel.{0}", "parallel.{1}"]),
    (GPT, ["parallel.pp=2", "parallel.virtual_stages=2"], None,
     r"virtual_stages = 2: pp_schedule = '1f1b' has 1 on each rank: leave it out, or use "
     r"(pp_schedule = 'interleaved')$", ["parallel.{0}"]),
    (GPT, ["parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.virtual_stages=3"], None,
     r"virtual_stages = 3: pp_schedule = 'zbv' has 2 on each rank: .* (pp_schedule = 'interleaved')$",
     ["parallel.{0}", "model.n_layers=4"]),
    (GPT, ["parallel.pp=2", "parallel.pp_schedule=zbv", "train.compile=true"], None,
     r"'zbv' takes backward passes in two parts, .* train\.compile = True .*: use .*, or (train\.compile = False)$",
     ["{0}"]),
    (GPT, ["parallel.pp=2", "parallel.pp_schedule=dualpipev", "train.recompute=full"], None,
     r"train\.recompute = 'full' .*: use parallel\.(pp_schedule = 'interleaved') or", ["parallel.{0}"]),
    (GPT, ["parallel.pp=2", "parallel.grad_accumulation=sharded"], None,
     r"parallel\.grad_accumulation = 'sharded': under pipeline stages .*: leave it out$",
     ["parallel.grad_accumulation=unsharded"]),
    (GPT, ["parallel.pp=2", "parallel.pp_split_points=['decoder.layers.7']"], None,
     r"parallel\.pp_split_points: no split point is called 'decoder\.layers\.7' after .*; .*, (decoder\.layers\.1),",
     ["parallel.pp_split_points=['{0}']"]),
    (GPT, ["parallel.pp=2", "parallel.pp_split_points=['decoder.layers.1', 'head']"], None,
     r"parallel\.pp_split_points = .*: 2 stages need 1 different names", ["parallel.pp_split_points=['head']"]),
    (GPT, ["parallel.pp_split_points=['head']"], None,
     r"pp_split_points are for pipeline stages, and pp = 1: leave them out$", ["parallel.pp_split_points=[]"]),
    # data parallelism and the rest
    (GPT, ["parallel.zero=1", "parallel.grad_accumulation=sharded"], None,
     r"grad_accumulation = 'sharded': zero = 1 doesn't shard gradients: use (zero = 2)", ["parallel.{0}"]),
    (GPT, ["parallel.dp_shard=0"], None, r"dp_shard = 0: choose (-1) \(all ranks that are left\)",
     ["parallel.dp_shard=1"]),
    (GPT, ["parallel.dp_shard=3"], None,
     r"train\.global_batch = 8 is not a multiple of train\.micro_batch = 2 × 3 data ranks: the nearest .* is (\d+)$",
     ["train.global_batch={0}"]),
    (GPT, ["train.micro_batch=3"], None,
     r"train\.global_batch = 8 is not a multiple of .* the nearest that is one is (9)$", ["train.global_batch={0}"]),
    (GPT, ["train.compile=true", "train.recompute=2 GB"], None,
     r"recompute = '2 GB': .*: choose (recompute = 'full') or", ["train.{0}"]),
    (GPT, ["parallel.cp=2", "train.recompute=2 GB"], 2,
     r"cp = 2: train\.recompute = '2 GB' .*: choose (recompute = 'full') or", ["train.{0}"]),
    (GPT, ["parallel.cp=3", "parallel.cp_method=ulysses"], 3,
     r"cp_method = 'ulysses': \d+ query and \d+ key heads .* parallel\.cp = 3 ranks: choose (cp_method = 'ring')$",
     ["parallel.{0}"]),
    (GPT, ["parallel.cp=2", "data.sequence_length=3"], 2,
     r"data\.sequence_length = 3 is too short for parallel\.cp = 2, .*: choose at least (4)$",
     ["data.sequence_length={0}"]),
    # expert parallelism
    (GPT, ["parallel.ep=2", "parallel.dp_shard=2"], None,
     r"parallel\.ep = 2, but the model has no experts to divide: set (parallel\.ep = 1), or", ["{0}"]),
    (MOE, ["parallel.ep=4", "parallel.dp_shard=4"], None,
     r"parallel\.ep = 4 does not divide model\.ffn\.n_experts = 6: the nearest ep that does is (3)$",
     ["parallel.ep={0}", "parallel.dp_shard={0}", "train.global_batch=12"]),
    (MOE, ["parallel.ep=2", "parallel.dp_shard=2", "parallel.tp=2"], None,
     r"parallel\.ep = 2 and parallel\.tp = 2 do not divide model\.ffn\.n_experts = 6: the nearest .* is (1)$",
     ["parallel.ep={0}"]),
    (MOE, ["parallel.ep=3", "parallel.dp_shard=4"], None,
     r"ep = 3 does not divide dp_shard = 4, over which experts lie: the nearest that does is (2)$",
     ["parallel.ep={0}"]),
    (MOE, ["parallel.ep=3", "parallel.dp_shard=-1"], 4,
     r"parallel\.ep = 3 does not divide the 4 ranks of parallel\.dp_shard, .* the nearest that does is (2)$",
     ["parallel.ep={0}", "parallel.dp_shard=4"]),
    (MOE, ["parallel.ep=3", "parallel.dp_shard=2", "parallel.tp=2", "parallel.expert_tp=folded"], None,
     r"ep = 3 does not divide dp_shard × tp = 4, over which experts lie: the nearest that does is (2)$",
     ["parallel.ep={0}"]),
    (MOE, ["parallel.dp_shard=1", "parallel.tp=2", "parallel.expert_tp=folded"], None,
     r"expert_tp = 'folded' divides experts among ranks of ep, and ep = 1: set (ep = 2), or leave it out$",
     ["parallel.{0}"]),
    (MOE, ["parallel.ep=2", "parallel.tp=2", "parallel.expert_tp=folded", "parallel.sequence_parallel=false"], None,
     r"no tokens of their own to send: set sequence_parallel = true, or (expert_tp = 'by_channel')$",
     ["parallel.{0}", "parallel.ep=1"]),
    (MOE, ["parallel.expert_tp=by_channel"], None,
     r"expert_tp = 'by_channel' is for tensor-parallel ranks, and tp = 1: leave it out$",
     ["parallel.expert_tp=by_expert"]),
    (MOE, ["parallel.tp=4", "parallel.expert_tp=by_channel", "model.ffn.d_ff=50"], None,
     r"parallel\.tp = 4 does not divide model\.ffn\.d_ff = 50: the nearest tp that fits is (2)$",
     ["parallel.tp={0}"]),
    (MOE, ["train.compile=true", "train.recompute=50 %"], None,
     r"compiled around their experts, .*: set (train\.recompute = 'selective') or 'full'$", ["{0}"]),
    (MOE, ["parallel.ep=2", "parallel.dp_shard=2", "parallel.zero=1", "train.recompute=2 GB"], None,
     r"train\.recompute = '2 GB': .* set (train\.recompute = 'full') or 'selective'$", ["{0}"]),
    (MOE, ["model.ffn.top_k=7"], None, r"top_k = 7 is more than n_experts = 6: choose (6) or less$",
     ["model.ffn.top_k={0}"]),
    (MOE, ["model.ffn.capacity_factor=0"], None, r"model\.ffn\.capacity_factor = 0: .* greater than (0)",
     ["model.ffn.capacity_factor=1.25"]),
]  # fmt: skip


def refusal(base: Sequence[str], overrides: Sequence[str], processes: int | None) -> str:
    with pytest.raises(UsageError) as error:
        accept(base, overrides, processes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("base", "overrides", "processes", "line", "mended"), REFUSED, ids=[" ".join(r[1]) for r in REFUSED]
)
def test_layouts_that_do_not_fit_are_refused_with_ones_that_do(
    base: tuple[str, ...], overrides: list[str], processes: int | None, line: str, mended: list[str]
) -> None:
    match = re.search(line, refusal(base, overrides, processes))
    assert match, refusal(base, overrides, processes)
    words = [item.format(*match.groups()).replace(" = ", "=").replace("'", '"') for item in mended]
    removed = {word.partition("=")[0] for word in words}
    accept(
        base, [*(override for override in overrides if override.partition("=")[0] not in removed), *words], processes
    )


@pytest.mark.parametrize(("overrides", "processes"), [
    (["parallel.tp=2", "parallel.pp=2"], 6),
    (["parallel.tp=2", "parallel.dp_shard=-1"], 3),
    (["parallel.pp=2", "parallel.dp_replicate=2"], 2),
])  # fmt: skip
def test_processes_that_are_not_the_product_of_the_axes(overrides: list[str], processes: int) -> None:
    output = refusal(GPT, overrides, processes)
    match = re.search(
        rf"the layout .* does not fit {processes} processes?: start (\d+), or change parallel\.tp", output
    )
    assert match, output
    accept(GPT, overrides, int(match[1]))


@pytest.mark.parametrize(("config", "world", "sizes"), [
    (ParallelConfig(), 1, (1, 1, 1, 1, 1)),
    (ParallelConfig(), 6, (1, 1, 6, 1, 1)),
    (ParallelConfig(tp=2), 6, (1, 1, 3, 1, 2)),
    (ParallelConfig(dp_replicate=3, tp=2), 6, (1, 3, 1, 1, 2)),
    (ParallelConfig(dp_replicate=2, dp_shard=2, tp=2), 8, (1, 2, 2, 1, 2)),
    (ParallelConfig(pp=2, tp=2), 8, (2, 1, 2, 1, 2)),
    (ParallelConfig(dp_replicate=2, cp=2), 8, (1, 2, 2, 2, 1)),
])  # fmt: skip
def test_sizes_of_axes(config: ParallelConfig, world: int, sizes: tuple[int, ...]) -> None:
    assert tuple(compute_axis_sizes(config, world).values()) == sizes


@pytest.mark.parametrize(("config", "world", "message"), [
    (ParallelConfig(tp=2), 1, "dp_replicate 1 × tp 2 does not fit 1 process: start 2, or change parallel.tp"),
    (ParallelConfig(tp=2), 5, "dp_replicate 1 × tp 2 does not fit 5 processes: start 4, or change"),
    (ParallelConfig(dp_shard=2, tp=2), 8, "dp_replicate 1 × dp_shard 2 × tp 2 does not fit 8 processes: start 4,"),
    (ParallelConfig(dp_shard=4), 2, "dp_replicate 1 × dp_shard 4 × tp 1 does not fit 2 processes: start 4, or"),
    (ParallelConfig(pp=3), 8, "pp 3 × dp_replicate 1 × tp 1 does not fit 8 processes: start 9, or change"),
    (ParallelConfig(dp_replicate=4, tp=4), 8, "dp_replicate 4 × tp 4 does not fit 8 processes: start 16, or"),
])  # fmt: skip
def test_axes_that_do_not_fit(config: ParallelConfig, world: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compute_axis_sizes(config, world)
    assert str(caught.value).startswith(f"the layout {message}")


def coordinates() -> tuple[int, int, int, int, list[int], list[int]]:
    mesh = build_mesh(ParallelConfig(dp_replicate=2, tp=2), 4, "cpu")
    rank = dist.get_rank()
    neighbours = mesh.gather_objects(rank, ("dp_shard", "tp"))
    total = torch.tensor([rank])
    mesh.all_reduce_(total, ("dp_replicate",))
    return (
        mesh.rank("dp_replicate"), mesh.rank("tp"), mesh.data_rank, mesh.data_ranks, neighbours, total.tolist(),
    )  # fmt: skip


def test_neighbouring_ranks_share_the_tensor_parallel_axis(workers: Workers) -> None:
    assert workers.run(coordinates, 4) == [
        (0, 0, 0, 2, [0, 1], [2]),
        (0, 1, 0, 2, [0, 1], [4]),
        (1, 0, 1, 2, [2, 3], [2]),
        (1, 1, 1, 2, [2, 3], [4]),
    ]


@pytest.mark.parametrize("other_groups", [[], [[2, 3], [6, 7]]], ids=["all ranks", "some ranks"])
def test_on_gpus_groups_are_split_off_at_once(other_groups: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes all ranks of the run. Every rank must be in one group, as torch numbers them by a rank's own."""
    groups = [[0, 1], [4, 5]] if other_groups else [[0, 4], [1, 5], [2, 6], [3, 7]]
    calls: list[list[list[int]]] = []
    with fake_ranks(8, 5):
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cuda", 5))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(dist, "split_group", lambda *, split_ranks: calls.append(split_ranks))
        monkeypatch.setattr(dist, "new_subgroups_by_enumeration", None)
        create_group_of(groups, other_groups)
        monkeypatch.undo()
    (split,) = calls
    assert split[: len(groups)] == groups
    assert sorted(rank for group in split for rank in group) == list(range(8))
