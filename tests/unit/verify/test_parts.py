"""Parts of verify: shrinking, batches, the comparison, bytes; expectations share nothing with what they are held to."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatfm.layers
import megatfm.models
from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load_config
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.models import build
from megatfm.parallel.context_parallel import compute_token_indices, make_zigzag_predicate
from megatfm.train.build import build_model, plan_pipeline_split
from megatfm.verify import expected
from megatfm.verify.context_shards import ContextShards
from megatfm.verify.expected_keys import assign_tokens
from megatfm.verify.expected_pipeline import divide_into_stages
from megatfm.verify.layouts import Documents
from megatfm.verify.module_shardings import CLASS_STYLES, STYLE_SHARDINGS
from megatfm.verify.rank_processes import RankResult
from megatfm.verify.shrink import draw_batch, shrink
from megatfm.verify.traffic import CollectiveTraffic, TrafficCounter
from megatfm.verify.verify import compute_gradient_differences
from tests.support.workers import Workers


def config(model: ModelConfig, parallel: ParallelConfig, sequence_length: int = 8192) -> Config:
    return Config(
        name="x", model=model, data=DataConfig(train="t", tokenizer="m", sequence_length=sequence_length),
        parallel=parallel, optimizer=AdamWConfig(lr=1e-3),
        train=TrainConfig(steps=1, global_batch=1024, micro_batch=1),
    )  # fmt: skip


LLAMA = ModelConfig(
    vocab_size=128256, d_model=8192, n_layers=80, attention={"n_heads": 64, "n_kv_heads": 8}, ffn={"d_ff": 28672},
)  # fmt: skip
UNEVEN = ModelConfig(
    vocab_size=50257, d_model=1600, n_layers=48, attention={"n_heads": 24, "n_kv_heads": 6, "head_dim": 64},
    ffn={"d_ff": 6401},
)  # fmt: skip


@pytest.mark.parametrize(("tp", "dp_shard"), [(1, 2), (2, 1), (2, 3), (4, 2), (8, 2)])
def test_shrinking_keeps_ratios_and_remainders(tp: int, dp_shard: int) -> None:
    small, words = shrink(config(LLAMA, ParallelConfig(tp=tp, dp_shard=dp_shard)))
    model, shards = small.model, tp * dp_shard
    assert model.attention.n_heads == 8 * model.attention.kv_heads
    assert model.attention.kv_heads % tp == 0
    assert model.d_model == model.attention.n_heads * model.head_width
    assert model.vocab_size is not None
    assert (model.vocab_size - 128256) % shards == (model.ffn.d_ff - 28672) % shards == 0
    assert small.data.sequence_length % tp == 0
    assert model.embedding.tied == LLAMA.embedding.tied
    assert sum(np.prod(shape) for shape in [(model.vocab_size, model.d_model), (model.ffn.d_ff, model.d_model)]) < 1e6
    assert "model.n_layers 80 → 2" in words
    Config.model_validate(small.model_dump())  # still a valid config


def test_shrinking_keeps_what_does_not_divide() -> None:
    model = shrink(config(UNEVEN, ParallelConfig(dp_shard=4)))[0].model
    assert model.vocab_size is not None
    assert (model.vocab_size % 4, model.ffn.d_ff % 4) == (50257 % 4, 6401 % 4)
    assert model.attention.head_dim == 8
    assert model.attention.n_heads // model.attention.kv_heads == 4


def test_a_small_model_is_not_shrunk() -> None:
    tiny = ModelConfig(vocab_size=40, d_model=12, n_layers=1, attention={"n_heads": 2}, ffn={"d_ff": 20})
    small, words = shrink(config(tiny, ParallelConfig(), sequence_length=16))
    assert small.model == tiny
    assert "parallel.dp_shard -1 → 2" in words


def test_a_layout_for_a_cluster_is_refused() -> None:
    with pytest.raises(UsageError, match=r"512 processes.*parallel\.dp_shard=2"):
        shrink(config(LLAMA, ParallelConfig(tp=8, dp_shard=64)))


def test_batches_have_documents_and_padding() -> None:
    small, _ = shrink(config(LLAMA, ParallelConfig(dp_shard=4)))
    batch = draw_batch(small)
    assert batch["tokens"].shape == (16, 64)
    padded = (batch["documents"] == -1).sum(1)
    assert (padded > 0).any()
    assert (padded == 0).any()
    assert (batch["targets"][batch["documents"] == -1] == -100).all()
    assert all(np.array_equal(values, draw_batch(small)[field]) for field, values in batch.items())


def test_rows_are_filled_with_the_kind_of_documents_that_is_asked_for() -> None:
    small, _ = shrink(config(LLAMA, ParallelConfig(dp_shard=4)))
    documents = {kind: draw_batch(small, kind)["documents"] for kind in get_args(Documents)}
    assert (documents["short"].max(1) >= 5).all()
    assert (documents["one"] == 0).all()
    assert (documents["long"].max(1) == 1).all()
    assert ((documents["sparse"] == -1).sum(1) > 50).all()
    assert (documents["sparse"].max(1) == 0).all()
    mixed = documents["mixed"]
    assert {tuple(row) for row in mixed[1::4].tolist()} == {(0,) * 64}
    assert ((mixed[2::4] == -1).sum(1) > 50).all()


def answer(blocks: dict[str, tuple[tuple[int, ...], torch.Tensor]]) -> RankResult:
    boxes = {
        name: [((offsets, tuple(block.shape)), block.double().numpy())] for name, (offsets, block) in blocks.items()
    }
    return RankResult(loss=1.0, grad_norm=1.0, gradients=boxes, traffic=[])


def test_differences_of_cut_and_replicated_gradients() -> None:
    cut, full = torch.randn(5, 3).double(), torch.randn(4).double()
    zero = torch.zeros(2).double()
    right = answer({"cut": ((0, 0), cut[:2]), "whole": ((0,), full), "zero": ((0,), zero)})
    wrong = answer({"cut": ((2, 0), cut[2:] + 0.5), "whole": ((0,), full), "zero": ((0,), zero + 1e-9)})
    actual = compute_gradient_differences({"cut": cut, "whole": full, "zero": zero}, [right, wrong])
    assert [difference.name for difference in actual] == ["cut", "zero", "whole"]
    assert actual[0].error == pytest.approx(1.5 / float(cut.norm()))
    everything = float(torch.cat([cut.flatten(), full]).norm())
    assert actual[1].error == pytest.approx(2**0.5 * 1e-9 / (1e-6 * everything))
    assert actual[2].error == 0.0
    assert [difference.is_wrong for difference in actual] == [True, True, False]


def test_the_worst_replica_counts_and_so_do_nan_and_an_element_that_no_rank_holds() -> None:
    gradient = torch.ones(4).double()
    good, bad = answer({"w": ((0,), gradient)}), answer({"w": ((0,), gradient * 1.1)})
    for answers in ([good, bad], [bad, good]):
        assert compute_gradient_differences({"w": gradient}, answers)[0].error == pytest.approx(0.1)
    broken, partial = answer({"w": ((0,), gradient * float("nan"))}), answer({"w": ((0,), gradient[:3])})
    for answers in ([good, broken], [broken, good], [partial]):
        assert compute_gradient_differences({"w": gradient}, answers)[0].is_wrong


def count_collectives() -> list[CollectiveTraffic]:
    """Float32 between two ranks: all-reduces have 5 and 4 elements, other collectives 6 rows of 2."""
    world, ops, rows = dist.group.WORLD, torch.ops._c10d_functional, torch.ones(6, 2)
    with TrafficCounter({world.group_name: "everybody"}) as traffic:
        dist.all_reduce(torch.ones(5))
        ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", world.group_name))
        ops.wait_tensor(ops.all_gather_into_tensor(rows, 2, world.group_name))
        ops.wait_tensor(ops.reduce_scatter_tensor(rows, "sum", 2, world.group_name))
        splits = [[2, 4], [4, 2]][dist.get_rank()]
        dist.all_to_all_single(torch.empty_like(rows), rows, splits, splits)
        torch.ones(3) + 1
    return traffic.list_traffic()


def count_coalesced() -> list[CollectiveTraffic]:
    """Tensors of 12 and 8 elements go together."""
    world, ops = dist.group.WORLD, torch.ops._c10d_functional
    rows, more = torch.ones(6, 2), torch.ones(2, 4)
    with TrafficCounter({world.group_name: "everybody"}) as traffic:
        for result in (
            *ops.all_reduce_coalesced([rows, more], "sum", world.group_name),
            *ops.all_gather_into_tensor_coalesced([rows, more], 2, world.group_name),
            *ops.reduce_scatter_tensor_coalesced([rows, more], "sum", 2, world.group_name),
        ):
            ops.wait_tensor(result)
    return traffic.list_traffic()


@pytest.mark.parametrize(("count", "expected"), [
    (count_collectives,
     [("all_gather", 1, 48), ("all_reduce", 2, 20 + 16), ("all_to_all", 1, 32), ("reduce_scatter", 1, 24)]),
    (count_coalesced, [("all_gather", 1, 80), ("all_reduce", 1, 80), ("reduce_scatter", 1, 40)]),
], ids=["alone", "together"])  # fmt: skip
def test_bytes_are_those_of_a_ring(
    workers: Workers, count: Callable[[], list[CollectiveTraffic]], expected: list[tuple[str, int, int]]
) -> None:
    for flows in workers.run(count, 2):
        assert flows == [CollectiveTraffic("everybody", *flow) for flow in expected]


# ----------------------------------------------------------------------------------------- blocks that differ


def test_every_kind_is_kept_and_small() -> None:
    options = {
        "model.n_layers": 8, "model.layer_types": '["a", "a", "b"]', "model.layer_type.a": "{}",
        "model.layer_type.b.ffn.d_ff": 5000, "model.layer_type.b.attention.n_heads": 16,
        "model.layer_type.b.attention.n_kv_heads": 4, "parallel.tp": 2,
    }  # fmt: skip
    small, _ = shrink(load_config("quickstart", [f"{key}={value}" for key, value in options.items()]))
    assert small.model.n_layers == 3
    assert [small.model.get_layer_type(depth) for depth in range(3)] == ["a", "a", "b"]
    b = small.model.layer_config(2)
    assert (b.attention.n_heads, b.attention.kv_heads) == (16, 4)
    assert b.ffn.d_ff < 100
    assert max(parameter.numel() for parameter in build(small.model).parameters()) < 100_000


PATTERNS = {
    "mistral-7b-v0.1": "model.attention.pattern.width 4096 → 16",
    "gemma2-2b": "model.layer_type.local.attention.pattern.width 4096 → 16",
    "gemma3-1b": "model.layer_type.local.attention.pattern.width 512 → 16",
    "gpt-oss-20b": "model.layer_type.local.attention.pattern.width 128 → 16",
    "modernbert-base": "model.layer_type.local.attention.pattern.width 128 → 16",
    "gpt3-small": "model.layer_type.banded.attention.pattern.width 256 → 16",
    "bigbird-base": "model.attention.pattern.block_size 64 → 4",
    "longformer-base": "model.attention.pattern.width 512 → 16",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_shrink_with_the_row(name: str) -> None:
    small, changes = shrink(load_config(name))
    assert PATTERNS[name] in changes
    assert not any("{" in change for change in changes), "changes are said key by key"
    with torch.device("meta"):
        patterns = {
            module.pattern for module in build(small.model).modules() if isinstance(module, DotProductAttention)
        }
    assert small.data.sequence_length is not None
    assert any(pattern.simplify(small.data.sequence_length).builtin_mask is None for pattern in patterns)


LONG = "data.sequence_length=4096"
SIZES: dict[tuple[str, ...], dict[str, object]] = {
    ("quickstart", LONG, 'model.attention.pattern={name="window",width=128,dilation=3,initial_tokens=4}'):
        {"width": 8, "dilation": 2, "initial_tokens": 2},
    ("quickstart", LONG, 'model.attention.pattern={name="window",width=4096}'): {"width": 64},
    ("quickstart", LONG, 'model.attention.pattern={name="chunked",size=8192}'): {"size": 128},
    ("quickstart", "data.sequence_length=1024", 'model.attention.pattern={name="chunked",size=512}'): {"size": 21},
    ("quickstart", LONG, 'model.attention.pattern={name="bigbird",block_size=64,n_global_tokens=64}'):
        {"block_size": 4, "n_global_tokens": 8},
    ("quickstart", 'model.attention.pattern={name="strided",stride=128}'): {"stride": 8},
    ("quickstart", 'model.attention.pattern={name="fixed",stride=128,n_summary_tokens=8}'):
        {"stride": 8, "n_summary_tokens": 2},
    ("bert-base", 'model.attention.pattern={name="window",width=1024}'): {"width": 128},
    ("bigbird-base", "data.sequence_length=512"): {"block_size": 8},
    ("bert-base", 'model.attention.pattern={name="longformer",width=512,global_tokens=[0,7,500]}'):
        {"global_tokens": (0, 7, 32)},
}  # fmt: skip


@pytest.mark.parametrize("words", SIZES, ids=" ".join)
def test_sizes_of_patterns(words: tuple[str, ...]) -> None:
    small, _ = shrink(load_config(words[0], list(words[1:])))
    pattern = small.model.attention.pattern
    assert {key: getattr(pattern, key) for key in SIZES[words]} == SIZES[words]


def test_unnamed_sizes_become_small() -> None:
    latent = shrink(load_config("deepseek-v3"))[0].model.attention
    assert (latent.kv_lora_rank, latent.q_lora_rank, latent.qk_rope_head_dim, latent.v_head_dim) == (32, 32, 8, 8)
    linformer = load_config("bert-base", ['model.attention={name="linformer",n_heads=12,max_length=512}'])
    projected = shrink(linformer)[0].model.attention
    assert (projected.max_length, projected.projected_length) == (64, 8)
    electra = shrink(load_config("electra-large", ["parallel.tp=2"]))[0].model
    assert electra.generator is not None
    assert (electra.generator.d_model, electra.generator.n_heads, electra.generator.d_ff) == (32, 4, 64)
    albert = shrink(load_config("albert-base", ["model.distinct_layers=4"]))[0].model
    assert (albert.distinct_layers, albert.n_layers) == (2, 3)
    small, _ = shrink(load_config("t5-small", ["model.n_encoder_layers=24"]))
    assert small.model.n_encoder_layers == 2


FOLDER = Path(expected.__file__).parent
FILES = [
    *sorted(FOLDER.glob("expected*.py")),
    *(FOLDER / f"{name}.py" for name in ("context_shards", "layouts", "module_calls", "module_shardings", "traffic")),
]
CHECKED = ("megatfm.parallel", "megatfm.layers", "megatfm.engines.native")
"""Rooms that cause the traffic."""
THEIRS = {"key_ranges", "find_reachable_keys", "global_queries", "find_global_queries"}
THEIRS |= {"token_indices", "compute_token_indices", "simplify", "has_uneven_work", "plan_fetch", "fetch_plan"}
"""Names by which these rooms say themselves what is sent."""


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_comes_from_what_is_checked(path: Path) -> None:
    assert not {name for name in imports(path) if name.startswith(CHECKED)}
    requested = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not requested & THEIRS


def modules_of(package: ModuleType) -> list[ModuleType]:
    packages = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(info.name) for info in packages]


def test_the_table_has_all_classes_that_cut_or_send() -> None:
    classes = {
        name: kind.tp_plan
        for module in (*modules_of(megatfm.layers), *modules_of(megatfm.models))
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if "tp_plan" in vars(kind) and kind.__module__ == module.__name__
    }
    silent = {"local_token_dropout", "local_shard_dropout"}
    missing = {name for name, rows in classes.items() if {kind for _, kind in rows} - silent} - CLASS_STYLES.keys()
    assert not missing, f"megatfm/verify/module_shardings.py: CLASS_STYLES needs what {missing} send"
    assert not CLASS_STYLES.keys() - classes.keys()
    assert {kind for rows in CLASS_STYLES.values() for _, kind in rows} <= STYLE_SHARDINGS.keys()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_rows_are_dealt_as_the_ranks_deal_them(ranks: int) -> None:
    for length, folded, unit in itertools.product((31, 64), (False, True), (1, 3)):
        dealt = compute_token_indices(length, ranks, folded, unit)
        for value, expected_value in zip(assign_tokens(length, ranks, unit, is_zigzag=folded), dealt, strict=True):
            np.testing.assert_array_equal(value, expected_value)


def small(name: str, *overrides: str) -> Config:
    return shrink(load_config(name, list(overrides)))[0]


@pytest.mark.parametrize(
    "name", ["llama3-8b", "t5-small", "electra-small", "xlnet-base", "deepseek-v3", "spanbert-base"]
)
def test_stages_are_those_of_the_engine(name: str) -> None:
    for schedule, ranks in (("1f1b", 2), ("1f1b", 3), ("zbv", 2), ("interleaved", 2)):
        config = small(name, f"parallel.pp={ranks}", f"parallel.pp_schedule={schedule}", "parallel.dp_shard=1")
        with torch.device("meta"):
            model = build_model(config)
        actual, reference = divide_into_stages(config, model), plan_pipeline_split(config, model)
        for value, expected_value in zip(actual.stages, reference.stages, strict=True):
            assert len(value.split_points) == len(expected_value.split_points)
            assert value.rank == expected_value.rank
            assert (value.inputs, value.inputs_with_grad) == (expected_value.inputs, expected_value.inputs_with_grad)
        assert actual.holders == reference.parameter_ranks


def test_rows_are_folded_where_the_ranks_fold_them() -> None:
    """Decoders of full attention and of windows, encoders, and both sides of an encoder-decoder."""
    for name in ("llama3-8b", "mistral-7b-v0.1", "gemma2-2b", "bert-base", "t5-small", "xlnet-base", "t-dmca"):
        config = small(name, "parallel.cp=2", "parallel.dp_shard=1")
        model = build_model(config)
        tokens = np.zeros((4, 64), np.int64)
        batch = {"positions": tokens, "encoder_positions": tokens}
        rank_0 = ContextShards(config, model, batch).positions_by_rank[""][0]
        assert make_zigzag_predicate(model)(64) == (rank_0[-1] == 63)
