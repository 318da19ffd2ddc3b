"""Rules of the source: imports between packages, names, and generated pages."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests import support
from tests.support.documentation import (
    FOLDERS,
    ROOT,
    get_module_name,
    iter_statements,
    load_module,
    parse_folders,
    parse_source,
)
from tests.support.image_models import IMAGE_MODELS
from tests.support.layout_table import (
    IMAGE_ROWS,
    PAGE,
    list_cases,
    list_covered_layouts,
    list_deepspeed_cases,
    list_image_cases,
    list_pipeline_cases,
    make_table,
    renew_page,
    test_pipelines,
)
from tests.support.layouts import PIPELINE_SCHEDULES

NO_RANKS = ("ops", "layers", "tokenizers", "corpus", "data", "models", "objectives", "data_prep")
"""Packages that do not use `torch.distributed`."""
SHARED_BY_TESTS = ("tests.support", "tests.plugins")
READ_BY_THE_LAYOUT_TABLE = ("tests.parity.test_deepspeed", "tests.parity.test_pipelines")
"""Test modules whose cases the table of layouts is made from."""
AXES = {"pp", "dp_replicate", "dp_shard", "tp"}
NAMES_AXES = (
    "megatfm/parallel/mesh.py", "megatfm/verify/layouts.py", "megatfm/engines/registry.py", "megatfm/config/",
    "megatfm/presets/",
)  # fmt: skip
"""The mesh, what is expected of it, the axes that engines declare, and the keys of configs."""


@cache
def imported_names(source: str, module: str) -> list[tuple[int, str]]:
    """Line and full name of each import in a file, and of each use of `torch.distributed`."""
    names = []
    tree = parse_source(source)
    # Expressions hold no import, and most files are expressions.
    for node in ast.walk(tree) if "torch.distributed" in source else iter_statements(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node.value) == "torch":
            names.append((node.lineno, "torch.distributed"))
    return names


def is_folder_of_the_checkout(module: str, name: str) -> bool:
    """Whether a name reaches a folder beside `megatfm` by its bare name, which imports the file a second time."""
    return name.split(".")[0] in FOLDERS


def uses_ranks(module: str, name: str) -> bool:
    """Whether a package that knows no ranks uses `torch.distributed`."""
    return module.split(".")[:2][-1] in NO_RANKS and name.startswith("torch.distributed")


def is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def reaches_another_test(module: str, name: str) -> bool:
    """Whether a file imports a test module or a conftest: a change of that test would change this one."""
    if not name.startswith("tests.") or (
        module == "tests.support.layout_table" and is_inside(name, READ_BY_THE_LAYOUT_TABLE)
    ):
        return False
    is_test = any(part.startswith("test_") or part == "conftest" for part in name.split(".")[:-1])
    return is_test or not is_inside(name, SHARED_BY_TESTS)


RULES = {
    is_folder_of_the_checkout: ("megatfm", "data_prep", "launchers", "slurm", "tests", "benchmarks", "docs"),
    uses_ranks: ("megatfm", "data_prep"),
    reaches_another_test: ("tests", "benchmarks"),
}


def test_packages_import_as_the_contracts_say() -> None:
    """In a process of its own: import-linter configures logging, which silences every logger that exists already."""
    linter = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([linter, "--config", ".importlinter", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_an_import_rule(rule) -> None:
    files = [path for folder in RULES[rule] for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 20
    broken = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for line, name in imported_names(path.read_text(encoding="utf-8"), get_module_name(path))
        if rule(get_module_name(path), name)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "module", "source", "is_broken"), [
    (uses_ranks, "megatfm.data.loader", "import torch.distributed as dist", True),
    (uses_ranks, "megatfm.layers.block", "import torch\nrank = torch.distributed.get_rank()", True),
    (uses_ranks, "megatfm.layers.block", "from torch import distributed", True),
    (uses_ranks, "megatfm.parallel.mesh", "import torch.distributed as dist", False),
    (is_folder_of_the_checkout, "megatfm.commands.data", "from data_prep.cli import cli", True),
    (is_folder_of_the_checkout, "megatfm.commands.data", "from megatfm.data_prep.cli import cli", False),
    (reaches_another_test, "tests.unit.test_x", "from tests.support.parity import build_engine", False),
    (reaches_another_test, "tests.unit.test_x", "from tests.plugins import plugin", False),
    (reaches_another_test, "tests.unit.test_x", "from tests.parity import test_layouts", True),
    (reaches_another_test, "tests.unit.test_x", "from tests.parity.test_layouts import compare", True),
    (reaches_another_test, "tests.unit.test_x", "import tests.parity.test_pipelines", True),
    (reaches_another_test, "tests.unit.test_x", "from .conftest import write", True),
    (reaches_another_test, "tests.unit.test_x", "def f():\n    from tests.plugins.test_a import B", True),
    (reaches_another_test, "tests.support.layout_table", "from tests.parity import test_pipelines", False),
    (reaches_another_test, "tests.support.layout_table", "from tests.parity import test_experts", True),
])  # fmt: skip
def test_a_planted_import_is_found(rule, module: str, source: str, is_broken: bool) -> None:
    assert any(rule(module, name) for _, name in imported_names(source, module)) is is_broken


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Path of a file, from the top of the repository → its syntax tree."""
    return {str(path.relative_to(ROOT)): tree for path, tree in parse_folders("megatfm", *FOLDERS).items()}


def literal_axes(tree: ast.Module) -> list[int]:
    """Lines in which an axis of the mesh is written out, other than as a key of a dict ([parallel] of a config)."""
    nodes = list(ast.walk(tree))
    keys = {key for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    return [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in AXES and node not in keys]


def test_only_the_mesh_names_its_axes(trees: Mapping[str, ast.Module]) -> None:
    """Sharding and reductions read axes from the layout table, so a new axis needs no search for literals."""
    files = [path for path in trees if path.startswith("megatfm/") and not path.startswith(NAMES_AXES)]
    assert len(files) > 100
    suspects = [path for path in files if re.search(rf'"({"|".join(AXES)})"', (ROOT / path).read_text("utf-8"))]
    literals = [f"{path}:{line}" for path in suspects for line in literal_axes(trees[path])]
    assert suspects
    assert not literals, literals


@pytest.mark.parametrize(("source", "is_literal"), [
    ('mesh.sum(x, ("tp",))', True),
    ('mesh.size("dp_shard")', True),
    ('sizes["dp_shard"]', True),
    ('parallel.model_copy(update={"tp": 1, "dp_shard": 1})', False),
    ("mesh.sum(x, layout.sum_over)", False),
])  # fmt: skip
def test_a_planted_axis_is_found(source: str, is_literal: bool) -> None:
    assert bool(literal_axes(parse_source(source))) is is_literal


USED_TWICE = {"Model", "load", "main", "run"}
"""`megatfm.Model`, which `megatfm.load` returns, beside the base class of model families; functions that are called by
their package, as `tokenizers.load`; entry points."""


def test_no_public_name_is_used_twice(trees: Mapping[str, ast.Module]) -> None:
    """Classes and functions of modules."""
    files = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                files[node.name].append(path)
    assert len(files) > 2000
    assert {name for name, paths in files.items() if len(paths) > 1} == USED_TWICE


NAMES_OF_LIBRARIES = {
    "EAI_NODATA", "__origin__", "_dump_nccl_trace_json", "_schema", "body", "isoformat", "posix_fadvise",
    "dir", "finish_timeout", "sched_getaffinity", "set_gradient_accumulation_boundary", "status", "variable",
}  # fmt: skip
"""Names that `getattr` and `hasattr` look for in objects of libraries."""


def test_names_in_getattr_are_defined(trees: Mapping[str, ast.Module]) -> None:
    """Else a renamed method is silently replaced by the default."""
    defined, looked_up = set(NAMES_OF_LIBRARIES), dict[str, str]()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.ClassDef(body=body) | ast.Module(body=body):  # not a function's locals
                    for statement in body:
                        if isinstance(statement, ast.Assign | ast.AnnAssign):
                            defined |= {name.id for name in ast.walk(statement) if isinstance(name, ast.Name)}
                case ast.Call(ast.Name("getattr" | "hasattr"), [_, ast.Constant(str(name)), *_]):
                    looked_up[name] = f"{path}:{node.lineno}"
    assert len(looked_up) > 80
    assert not {place: name for name, place in looked_up.items() if name not in defined}


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for folder in ("benchmarks", "data_prep", "launchers", "megatfm", "slurm", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 500
    assert not {path: lines for path, lines in lengths.items() if lines > 400}


def test_the_map_of_shared_helpers_names_each_file() -> None:
    files = [path.stem for path in (ROOT / "tests/support").glob("[a-z]*.py")]
    assert len(files) > 30
    assert not [name for name in files if not re.search(rf"\b{name}\b", str(support.__doc__))]


# -------------------------------------------------------------------------------------------- generated pages


def test_the_page_has_the_tables_of_the_parity_cases() -> None:
    """Else: `python -m tests.support.layout_table`."""
    text = PAGE.read_text(encoding="utf-8")
    assert make_table() in text
    assert renew_page(text) == text


def test_tested_layouts_are_those_that_parity_tests_compare() -> None:
    actual = list_covered_layouts()
    assert {"zero0", "zero1", "zero2", "zero3", "tp2", "tp4", "replicas × zero3", "pp4 zbv"} <= actual.keys()
    assert "xlnet" in actual["zero1"] & actual["tp2"] & actual["pp2 1f1b"]
    assert "albert" not in actual["pp4 zbv"], "there is no such case"


def test_every_model_with_images_has_a_row() -> None:
    compared = [*list_image_cases()]
    assert IMAGE_ROWS.keys() == IMAGE_MODELS.keys()
    assert {("two towers, softmax", "zero3"), ("vision-language, mlp", "pp2 1f1b × tp2")} <= {*compared}
    assert ("swin, simmim", "cp2") not in compared


def test_models_of_images_have_rows_under_deepspeed() -> None:
    stages = defaultdict(set)
    for config in list_deepspeed_cases():
        if config.parallel.dp_shard == 2 and config.parallel.tp == 1:
            stages[config.name].add(config.parallel.zero)
    assert stages["mvit v2"] == stages["swin v2"] == stages["llava"] == stages["vit"] == {0, 1, 2, 3}


def test_cases_follow_the_parametrization() -> None:
    schedules = [case["schedule"] for case in list_cases(test_pipelines.test_schedules_on_two_ranks_equal_one_device)]
    assert set(schedules) == set(PIPELINE_SCHEDULES)
    assert {parallel.pp_schedule for _, parallel in list_pipeline_cases() if parallel.pp == 4} == set(schedules)


def test_the_figure_of_results_is_up_to_date() -> None:
    script = load_module(ROOT / "docs" / "draw_results.py")
    assert script.FIGURE.read_text(encoding="utf-8") == script.draw(), "due: python docs/draw_results.py"
    page = (ROOT / "docs" / "guide" / "finetuning.md").read_text(encoding="utf-8")
    assert f"images/{script.FIGURE.name}" in page


def test_pictures_of_patterns_are_up_to_date() -> None:
    pictures = load_module(ROOT / "docs" / "draw_patterns.py").pictures()
    for name, text in pictures.items():
        path = ROOT / "docs" / "images" / name
        assert path.read_text(encoding="utf-8") == text, "due: python docs/draw_patterns.py"
    page = (ROOT / "docs" / "guide" / "attention.md").read_text(encoding="utf-8")
    assert all(f"images/{name}" in page for name in pictures)
