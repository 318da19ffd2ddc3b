"""Rules of the source: which package imports which (`.importlinter`, and more here), and one class to a name."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_tree import FOLDERS, ROOT, module_of

NO_RANKS = ("ops", "layers", "tokenizers", "corpus", "data", "models", "objectives", "data_prep")
"""Packages that do not use `torch.distributed`."""
SHARED_BY_TESTS = ("tests.support", "tests.plugins")
READ_BY_THE_LAYOUT_TABLE = (
    "tests.parity.test_pipelines",
    "tests.parity.test_image_layouts",
    "tests.parity.test_two_towers",
    "tests.parity.test_llava_layouts",
)
"""Test modules whose cases the table of layouts is made from."""
AXES = {"pp", "dp_replicate", "dp_shard", "tp"}
NAMES_AXES = (
    "megatfm/parallel/mesh.py",
    "megatfm/verify/axes.py",
    "megatfm/engines/registry.py",
    "megatfm/config/",
    "megatfm/presets/",
)
"""The mesh, what is expected of it, the axes that engines declare, and the keys of configs."""


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of each import in a file, and of each use of `torch.distributed`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            yield node.lineno, "torch.distributed"


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
    run = subprocess.run(
        [linter, "--config", ".importlinter", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_an_import_rule(rule) -> None:
    files = [path for folder in RULES[rule] for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 20
    broken = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for line, name in imported_names(path.read_text(encoding="utf-8"), module_of(path))
        if rule(module_of(path), name)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "module", "source", "is_broken"),
    [
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
        (
            reaches_another_test,
            "tests.support.layout_table",
            "from tests.parity import test_pipelines",
            False,
        ),
        (reaches_another_test, "tests.support.layout_table", "from tests.parity import test_experts", True),
    ],
)
def test_a_planted_import_is_found(rule, module: str, source: str, is_broken: bool) -> None:
    assert any(rule(module, name) for _, name in imported_names(source, module)) is is_broken


def literal_axes(source: str) -> list[int]:
    """Lines in which an axis of the mesh is written out, other than as a key of a dict ([parallel] of a config)."""
    tree = ast.parse(source)
    keys = {key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in AXES and node not in keys
    ]


def test_only_the_mesh_names_its_axes() -> None:
    """Sharding and reductions read axes from the layout table, so a new axis needs no search for literals."""
    files = [
        path
        for path in sorted((ROOT / "megatfm").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(NAMES_AXES)
    ]
    literals = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in literal_axes(path.read_text(encoding="utf-8"))
    ]
    assert not literals, literals


@pytest.mark.parametrize(
    ("source", "is_literal"),
    [
        ('mesh.sum(x, ("tp",))', True),
        ('mesh.size("dp_shard")', True),
        ('sizes["dp_shard"]', True),
        ('parallel.model_copy(update={"tp": 1, "dp_shard": 1})', False),
        ("mesh.sum(x, layout.sum_over)", False),
    ],
)
def test_a_planted_axis_is_found(source: str, is_literal: bool) -> None:
    assert bool(literal_axes(source)) is is_literal


PUBLIC_AND_BASE = {"Model"}
"""`megatfm.Model`, which `megatfm.load` returns, beside the base class of model families."""


def test_no_class_name_is_used_twice() -> None:
    files = defaultdict(list)
    for folder in ("megatfm", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(path.relative_to(ROOT)))
    assert len(files) > 500
    assert not {
        name: paths for name, paths in files.items() if len(paths) > 1 and name not in PUBLIC_AND_BASE
    }
