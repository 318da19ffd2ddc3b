"""Boxes of cut parameters, plans and mistakes in plans."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import UsageError
from megatfm.layers.initialisation import Constant
from megatfm.layers.linear import Linear
from megatfm.models import build
from megatfm.parallel.layout import Region, Shard, TensorLayout
from megatfm.parallel.mesh import EXPERT_DATA_AXES, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.parallel.styles import COLWISE, REPLICATED, ROWWISE, SEQUENCE_PARALLEL
from megatfm.parallel.tp_plans import UNPLANNED, match_styles
from megatfm.verify.module_shardings import find_module_shardings
from tests.support.documentation import ROOT
from tests.support.workers import Workers

# --------------------------------------------------------------------------------------------------- placements


def make_sharded_layout(
    shape: tuple[int, ...], dim: int, part: int, parts: int, *, uneven: bool = False
) -> TensorLayout:
    """A tensor that only tensor parallelism cuts."""
    return TensorLayout("w", shape, (Shard("tp", dim, part, parts, uneven),))


def slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*region, strict=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_make_up_the_tensor(dim: int) -> None:
    full = torch.arange(6 * 12).view(6, 12)
    assert TensorLayout("w", (6, 12)).region == ((0, 0), (6, 12))
    assert TensorLayout("b", ()).region == ((), ())
    for part in range(3):
        region = make_sharded_layout((6, 12), dim, part, 3).region
        assert region[1] == ((2, 12), (6, 4))[dim]
        assert torch.equal(full.chunk(3, dim)[part], full[slices(region)])


@pytest.mark.parametrize("zero_dim", [None, 0, 1])
def test_the_chunks_of_all_ranks_are_those_that_each_rank_computes(zero_dim: int | None) -> None:
    """Over shards of uneven rows, tensor-parallel columns and experts on ranks of two axes; copies are equal."""
    config = ParallelConfig(dp_replicate=2, dp_shard=4, tp=2, ep=2)
    layouts, all_chunks = [], []
    for rank in range(16):
        with fake_ranks(16, rank):
            mesh = build_mesh(config, 16, "cpu")
            cuts = (Shard("ep", 0, mesh.rank("ep"), 2), Shard("tp", 2, mesh.rank("tp"), 2))
            layout = TensorLayout("w", (6, 5, 4), cuts, data_axes=EXPERT_DATA_AXES)
            layouts.append(layout.compute_local_region(mesh, zero_dim))
            all_chunks.append(
                (
                    dist.get_process_group_ranks(mesh.flat_group(mesh.shard_axes)),
                    layout.compute_regions(mesh, zero_dim, mesh.positions(mesh.shard_axes)),
                )
            )
    for ranks, regions in all_chunks:
        assert regions == [layouts[rank] for rank in ranks]
        covered = torch.zeros(6, 5, 4)
        for region in set(regions):
            covered[slices(region)] += 1
        assert (covered == 1).all()
    assert layouts[:8] == layouts[8:]


def test_a_dim_that_does_not_divide() -> None:
    with pytest.raises(
        UsageError, match=r"^parallel\.tp = 4 does not divide dim 0 of w \[31, 16\]: the next size that fits is 32$"
    ):
        make_sharded_layout((31, 16), 0, 0, 4)
    with pytest.raises(UsageError, match=r"the next size that fits is 4$"):
        make_sharded_layout((1, 16), 0, 0, 4)


def test_parts_of_unlike_size() -> None:
    rows = [make_sharded_layout((10, 2), 0, part, 4, uneven=True).region for part in range(4)]
    assert [(offsets[0], sizes[0]) for offsets, sizes in rows] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    with pytest.raises(
        UsageError, match=r"^parallel\.tp = 4 leaves ranks without a shard of w \[9, 2\]: the nearest tp that fits is 3"
    ):
        make_sharded_layout((9, 2), 0, 3, 4, uneven=True)


# -------------------------------------------------------------------------------------------------------- plans


class Block(nn.Module):
    tp_plan = (("up", "colwise"), ("down", "rowwise"), ("norm", "sequence_parallel"), ("elsewhere.*", "replicated"))

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)))


class Around(nn.Module):
    """A module around others, whose class has the rows of its subclass here."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def test_a_plan_is_what_the_parts_say() -> None:
    assert match_styles(Block()) == {"up": COLWISE, "down": ROWWISE, "norm": SEQUENCE_PARALLEL}
    expected = [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down", "norm")]
    assert list(match_styles(Around(Block(), Block()))) == expected


def test_a_row_for_the_module_itself_is_for_it_alone() -> None:
    class Whole(Around):
        tp_plan = (("", "gather_input"), ("blocks.?", "gather_input_replicated"), ("*.*.*", "replicated"))

    assert {p: s.name for p, s in match_styles(Whole(nn.Sequential(nn.Linear(2, 2)))).items()} == {
        "": "gather_input",
        "blocks.0": "gather_input_replicated",
        "blocks.0.0": "replicated",
    }


@pytest.mark.parametrize(("pattern", "matched"), [
    ("", [""]),
    ("w*", ["w1", "w2"]),
    ("w*.norm", ["w1.norm"]),
    ("*", ["norm", "w1", "w2"]),
    ("*.norm", ["w1.norm"]),
    ("**.norm", ["norm", "w1.norm", "w2.0.norm"]),
    ("w?.**", ["w1", "w1.norm", "w2", "w2.0", "w2.0.norm"]),
    ("w[12].*", ["w1.norm", "w2.0"]),
    ("**", ["", "norm", "w1", "w1.norm", "w2", "w2.0", "w2.0.norm"]),
])  # fmt: skip
def test_a_pattern_matches_segment_by_segment(pattern: str, matched: list[str]) -> None:
    """A plugin's "w*" once took "w1.norm", too; expected traffic, which has its own plan, reads rows alike."""

    class Matched(nn.Module):
        tp_plan = ((pattern, "colwise"),)

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.w1, self.w2 = nn.LayerNorm(2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
            self.w1.norm, self.w2[0].norm = nn.LayerNorm(2), nn.LayerNorm(2)

    model = Matched()
    assert sorted(name for name, style in match_styles(model, complete=False).items() if style == COLWISE) == matched
    shardings = find_module_shardings(model, ParallelConfig(tp=2))
    assert sorted(name for name, sharding in shardings.items() if sharding.dim == 0) == matched


def test_a_parameter_without_a_plan_row_is_an_error_that_shows_the_row() -> None:
    class Mine(Around):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2))

    with pytest.raises(
        UsageError,
        match=r"^blocks\.1\.blocks\.0\.weight has no style, .* class Mine a row for it, "
        r'tp_plan = \(\("blocks\.0", STYLE\),\), with one of: colwise, expert_parallel, ',
    ):
        match_styles(Around(Block(), Mine()))
    styles = match_styles(Around(Block(), Mine()), complete=False)
    assert styles["blocks.1.blocks.0"] is UNPLANNED
    assert styles["blocks.0.up"] is COLWISE


def test_a_buffer_needs_a_row_too() -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2))

    with pytest.raises(UsageError, match=r'^blocks\.0\.table has no style, .* class Slopes .* \(\("", STYLE\),\),'):
        match_styles(Around(Slopes()))


def test_a_parameter_of_the_model_itself() -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with pytest.raises(UsageError, match=r'^scale has no style, .* class Scaled .* \(\("", STYLE\),\),'):
        match_styles(Scaled())
    Scaled.tp_plan = (*Block.tp_plan, ("", "replicated"))
    assert match_styles(Scaled())[""] is REPLICATED


def test_two_styles_for_a_module_are_refused_and_the_same_one_twice_is_not() -> None:
    class Other(Around):
        tp_plan = (("blocks.0.up", "colwise"),)

    assert match_styles(Other(Block()))["blocks.0.up"] is COLWISE
    Other.tp_plan = (("blocks.*.u*", "rowwise"),)
    with pytest.raises(
        UsageError,
        match=r"^blocks\.0\.up has two styles in plans, 'rowwise' of Other and 'colwise' of Block: "
        r"keep one of these rows$",
    ):
        match_styles(Other(Block()))


def test_a_style_that_there_is_not() -> None:
    class Wrong(Around):
        tp_plan = (("blocks.0", "colwis"),)

    with pytest.raises(UsageError, match=r"unknown style of a plan 'colwis' \(did you mean 'colwise'\?\); there are: "):
        match_styles(Wrong(nn.Linear(2, 2)))


def lay_a_tie(second: str) -> str:
    with torch.device("meta"):
        model = Around(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model.first, model.second = model.blocks
        del model.blocks
        model.second.weight = model.first.weight
    mesh = build_mesh(ParallelConfig(tp=2), 2, "cpu")
    Around.tp_plan = (("first", "vocab_parallel_embedding"), ("second", second))
    try:
        layout = parallelize(model, mesh, sequence_parallel=True)
    except UsageError as error:
        return str(error)
    assert model.first.weight is model.second.weight
    assert list(layout) == ["first.weight"]
    assert model.first.weight.shape == (4, 4)
    return "one weight"


class Scaled(nn.Linear):
    """A matrix with a scalar of its own."""

    def __init__(self) -> None:
        super().__init__(4, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(()))


def lay_a_scalar(style: str) -> str:
    with torch.device("meta"):
        model = Around(Scaled())
    Around.tp_plan = (("blocks.0", style),)
    mesh = build_mesh(ParallelConfig(tp=2), 2, "cpu")
    try:
        layout = parallelize(model, mesh, sequence_parallel=True)
    except UsageError as error:
        return str(error)
    return f"{layout['blocks.0.scale'].partial_axes} {tuple(model.blocks[0].weight.shape)}"


def test_a_tensor_of_too_few_dims_needs_a_style_that_declares_its_gradient(workers: Workers) -> None:
    """Each rank's gradient of a scalar under "colwise" is that of its channels."""
    for style in ("colwise", "shard_last_dim"):
        (message,) = set(workers.run(lay_a_scalar, 2, style))
        assert message.startswith(f"blocks.0.scale has 0 dims, too few for the plan's style {style!r} to shard")
    assert set(workers.run(lay_a_scalar, 2, "replicated_partial_grad")) == {"('tp',) (8, 4)"}
    assert set(workers.run(lay_a_scalar, 2, "rowwise")) == {"('tp',) (8, 2)"}


@pytest.mark.parametrize("style", ["rowwise", "replicated_kv_heads"])
@pytest.mark.parametrize("linear", [lambda: nn.Linear(8, 4), lambda: Linear(8, 4, Constant(1.0), heads=1)])
def test_a_forward_that_a_style_replaces_has_a_multiply_beside_it(linear: Callable[[], nn.Module], style: str) -> None:
    """Its factor of 3 would be lost without a word."""
    base: Any = linear()

    class Tripled(type(base)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(3 * x)

    def lay(cls: type) -> None:
        with torch.device("meta"):
            model = Around(linear())
        model.blocks[0].__class__, model.blocks[0].heads = cls, 1
        with fake_ranks(2, 0):
            parallelize(model, build_mesh(ParallelConfig(tp=2), 2, "cpu"), sequence_parallel=True)

    Around.tp_plan = (("blocks.0", style),)
    lay(type(base))
    with pytest.raises(UsageError, match=r"^blocks\.0\.weight: .* forward of Tripled, which has no method `multiply"):
        lay(Tripled)
    Tripled.multiply = lambda module, x, weight, bias: F.linear(3 * x, weight, bias)
    lay(Tripled)


def test_tied_parameters_are_cut_once_or_refused(workers: Workers) -> None:
    assert set(workers.run(lay_a_tie, 2, "colwise")) == {"one weight"}
    (message,) = set(workers.run(lay_a_tie, 2, "rowwise"))
    assert message == (
        "second.weight is tied to first.weight, but their plan rows shard different dims: give both the same style, or "
        "untie them"
    )


def lay_decoder(
    vocabulary: int, sequence_parallel: bool
) -> tuple[dict[str, TensorLayout], dict[str, tuple[int, ...]], str]:
    with torch.device("meta"):
        model = build(
            ModelConfig(vocab_size=vocabulary, d_model=8, n_layers=1, attention={"n_heads": 4, "n_kv_heads": 2},
                        ffn={"d_ff": 12}),
        )  # fmt: skip
    mesh = build_mesh(ParallelConfig(tp=2), 2, "cpu")
    layout = parallelize(model, mesh, sequence_parallel=sequence_parallel)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    return dict(layout), shapes, layout.table


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_decoder_s_plan(workers: Workers, sequence_parallel: bool) -> None:
    ranks = workers.run(lay_decoder, 2, 10, sequence_parallel)
    for rank, (layout, shapes, table) in enumerate(ranks):
        assert shapes == {name: placement.region[1] for name, placement in layout.items()}
        cuts = {name: p.shards for name, p in layout.items() if p.shards}
        actual = {name: (cut.dim, cut.index) for name, (cut,) in cuts.items() if cut.axis == "tp"}
        assert actual == {
            "decoder.embedding.tokens.weight": (0, rank),
            **{f"decoder.layers.0.attn.{w}.weight": (0, rank) for w in ("wq", "wk", "wv")},
            "decoder.layers.0.attn.wo.weight": (1, rank),
            **{f"decoder.layers.0.ffn.{w}.weight": (0, rank) for w in ("w_gate", "w_up")},
            "decoder.layers.0.ffn.w_down.weight": (1, rank),
        }
        partial = {name for name, placement in layout.items() if placement.partial_axes == ("tp",)}
        norms = {"decoder.norm.weight", *(f"decoder.layers.0.{s}_residual.norm.weight" for s in ("attn", "ffn"))}
        assert partial == (norms if sequence_parallel else set())
        assert "mesh  dp_replicate 1 × dp_shard 1 × tp 2" in table
        assert "[10, 8] → [5, 8]" in table
        lines = [re.split(r"\s{2,}", line) for line in table.splitlines()[3:]]
        assert {line[0]: line[1] for line in lines} == {
            "decoder.embedding.tokens": "vocab_parallel_embedding",
            "decoder.layers.*.attn_residual.norm": "sequence_parallel", "decoder.layers.*.attn": "gather_input",
            "decoder.layers.*.attn.w[qkv]": "colwise", "decoder.layers.*.attn.wo": "rowwise",
            "decoder.layers.*.ffn_residual.norm": "sequence_parallel", "decoder.layers.*.ffn": "gather_input",
            "decoder.layers.*.ffn.w_gate": "colwise", "decoder.layers.*.ffn.w_up": "colwise",
            "decoder.layers.*.ffn.w_down": "rowwise", "decoder.norm": "sequence_parallel",
        }  # fmt: skip
        for line in lines:
            assert (line[-1] == "tp") == (sequence_parallel and "sequence_parallel" in line), line


def test_the_last_rank_holds_less_of_a_vocabulary_that_does_not_divide(workers: Workers) -> None:
    boxes = [layout["decoder.embedding.tokens.weight"].region for layout, *_ in workers.run(lay_decoder, 2, 31, True)]
    assert boxes == [((0, 0), (16, 8)), ((16, 0), (15, 8))]


def plan_rows() -> str:
    """The rows that the parts of megatfm bring, as docs/internals/parallelism.md shows them."""
    lines = []
    for package in (importlib.import_module("megatfm.layers"), importlib.import_module("megatfm.models")):
        for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, part in vars(importlib.import_module(module_info.name)).items():
                if getattr(part, "__module__", "") == module_info.name and "tp_plan" in vars(part):
                    lines += [(f"{name}.{pattern}".rstrip("."), style) for pattern, style in part.tp_plan]
    return "\n".join(f"{modules:<40}{style}" for modules, style in lines)


def test_the_page_on_parallelism_shows_the_plans_of_all_parts() -> None:
    page = ROOT / "docs" / "internals" / "parallelism.md"
    assert f"```text\n{plan_rows()}\n```" in page.read_text(encoding="utf-8")
