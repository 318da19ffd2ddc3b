"""Expectations of traffic share nothing with what they are compared with, and their tables are of what there is."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import megatfm.layers
import megatfm.models
from megatfm.config import Config, load_config
from megatfm.parallel.context_parallel import compute_token_indices, make_zigzag_predicate
from megatfm.train.build import build_model, plan_pipeline_split
from megatfm.verify import expected
from megatfm.verify.context_shards import ContextShards
from megatfm.verify.expected_keys import assign_tokens
from megatfm.verify.expected_pipeline import divide_into_stages
from megatfm.verify.module_shardings import CLASS_STYLES, STYLE_SHARDINGS
from megatfm.verify.shrink import shrink

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
