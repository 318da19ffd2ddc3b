"""The plan of the house: a room imports only what the table allows it, and so stays readable and testable alone."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.support.source_tree import FOLDERS, ROOT, module_of

EVERYBODYS = {
    "megatfm.errors": set[str](),
    "megatfm.rng": set[str](),
    "megatfm.version": set[str](),
    "megatfm.files": set[str](),
    "megatfm.registry": {"megatfm.errors"},
    "megatfm.cost": set[str](),
    "megatfm.terminal": set[str](),
    "megatfm.split_points": set[str](),
}
"""Loose modules of floor 0, open to all."""

# Room → the rooms of the project that it may import. A new room gets a row here; a room inside a room may have its own.
CORE = {
    "megatfm.config": set[str](),
    "megatfm.ops": set[str](),
    "megatfm.layers": {"megatfm.ops", "megatfm.config"},
    "megatfm.tokenizers": {"megatfm.config"},
    "megatfm.corpus": set[str](),
    "megatfm.data": {"megatfm.corpus"},
    "megatfm.models": {"megatfm.layers", "megatfm.ops", "megatfm.config"},
    "megatfm.objectives": {"megatfm.data", "megatfm.layers", "megatfm.ops", "megatfm.config"},
    "megatfm.object_collectives": set[str](),
    "megatfm.parallel": {"megatfm.object_collectives", "megatfm.ops", "megatfm.config"},
    "megatfm.checkpoint": {"megatfm.object_collectives", "megatfm.ops", "megatfm.config"},
    "megatfm.tasks": {
        "megatfm.object_collectives",
        "megatfm.objectives",
        "megatfm.corpus",
        "megatfm.tokenizers",
        "megatfm.config",
    },
    "megatfm.engines": {
        "megatfm.object_collectives",
        "megatfm.parallel",
        "megatfm.checkpoint",
        "megatfm.layers",
        "megatfm.ops",
        "megatfm.config",
    },
}
ENGINES = {
    "megatfm.engines.native": {*CORE["megatfm.engines"], "megatfm.engines"},
    "megatfm.engines.deepspeed": {*CORE["megatfm.engines"], "megatfm.engines"},
}
TRAIN = {
    "megatfm.optim": {
        "megatfm.engines",
        "megatfm.models",
        "megatfm.layers",
        "megatfm.ops",
        "megatfm.config",
    },
    "megatfm.tracking": {
        "megatfm.object_collectives",
        "megatfm.checkpoint",
        "megatfm.tokenizers",
        "megatfm.config",
    },
}
TRAIN["megatfm.train"] = {*CORE, *TRAIN}
# What is done with a finished or running model: builds it as training does, and knows none of the others here.
USES = {
    f"megatfm.{room}": {*CORE, *TRAIN} for room in ("inference", "convert", "report", "verify", "describe")
}
# Reads what `describe` counts, and runs a rank of a layout that does not exist.
USES["megatfm.estimate"] = {*CORE, *TRAIN, "megatfm.describe", "megatfm.report"}
USES["megatfm.imaginary"] = {*CORE, *TRAIN, "megatfm.verify"}
BESIDE = {
    "megatfm.data_prep": {"megatfm.corpus", "megatfm.tokenizers", "megatfm.config"},
    # Steps that have a model read the text, which data_prep imports by name when a config asks for one.
    "megatfm.data_prep.filters.models": {
        "megatfm.data_prep",
        "megatfm.corpus",
        "megatfm.tokenizers",
        "megatfm.config",
        "megatfm.inference",
    },
    "megatfm.launchers": {"megatfm.config"},
    "megatfm.slurm": set[str](),
}
API = {
    "megatfm.api": {
        *("megatfm.inference", "megatfm.convert", "megatfm.describe"),
        *(
            "megatfm.train",
            "megatfm.tracking",
            "megatfm.checkpoint",
            "megatfm.tokenizers",
            "megatfm.config",
        ),
    },
}
COMMANDS = {
    "megatfm.commands": {*CORE, *TRAIN, *USES, *BESIDE, "megatfm.cli"},
    "megatfm.cli": set[str](),
    "megatfm.__main__": {"megatfm.cli"},
}
ROOT_PACKAGE = {"megatfm": {*API, "megatfm.config"}}
"""The root offers what `megatfm.api` has, and configs. It imports no other room, and no room imports it."""
ROOMS = {
    **CORE,
    **ENGINES,
    **TRAIN,
    **USES,
    **BESIDE,
    **API,
    **COMMANDS,
    **EVERYBODYS,
    **ROOT_PACKAGE,
}

NO_TORCH = {"megatfm.config", "megatfm.launchers", "megatfm.slurm", "megatfm", "megatfm.cli", *EVERYBODYS}
ONLY_FROM = dict.fromkeys(ENGINES, "megatfm.engines.registry")
"""Room → the module that alone imports it from outside, by name, when it is chosen."""
DOORS = {"megatfm.engines": ("megatfm.engines.interface", "megatfm.engines.registry")}
"""Room → the only files of it that other rooms may import."""
BELOW_FLOOR_3 = ("ops", "layers", "tokenizers", "corpus", "data", "models", "objectives")
NO_DISTRIBUTED = {"megatfm.data_prep", *(f"megatfm.{room}" for room in BELOW_FLOOR_3)}


def room_of(module: str) -> str:
    """`megatfm.corpus.shard_index` → `megatfm.corpus`; `megatfm.engines.native.zero` → `megatfm.engines.native`."""
    parts = module.split(".")
    inner = (".".join(parts[:depth]) for depth in (4, 3))
    return next((room for room in inner if room in ROOMS), ".".join(parts[:2]))


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and name of everything imported anywhere in a file, and of each use of `torch.distributed`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) + is_package - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"):
            yield node.lineno, "torch.distributed"


def is_through(name: str, doors: tuple[str, ...]) -> bool:
    """Whether what is imported is one of these files, or is in one."""
    return any(name == door or name.startswith(f"{door}.") for door in doors)


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a file imports against the table, in words."""
    room = room_of(module)
    if room not in ROOMS:
        return [f"{module}: the room {room} has no row in the table: say what it may import"]
    actual = []
    for line, name in imports(source, module, is_package):
        other = room_of(name) if room_of(name) in ROOMS else name.split(".")[0]
        if name.split(".")[0] in FOLDERS:
            actual.append(f"{module}:{line} imports {name}: its name is megatfm.{name}")
        elif name.split(".")[0] == "megatfm" and other in ROOMS:
            if other in ONLY_FROM and module == ONLY_FROM[other]:
                continue
            if other != room and other not in {*ROOMS[room], *({} if room in EVERYBODYS else EVERYBODYS)}:
                actual.append(f"{module}:{line} imports {name}: {room} may import {sorted(ROOMS[room])}")
            elif not room.startswith(other) and not is_through(name, DOORS.get(other, (other,))):
                actual.append(f"{module}:{line} imports {name}: other rooms see {DOORS[other]} alone")
        elif room in NO_TORCH and name.split(".")[0] == "torch":
            actual.append(f"{module}:{line} imports {name}: {room} runs on a login node without torch")
        elif room in NO_DISTRIBUTED and name.startswith("torch.distributed"):
            actual.append(f"{module}:{line} uses {name}: {room} knows no ranks")
    return actual


def test_every_import_goes_down() -> None:
    files = [path for room in ("megatfm", *FOLDERS) for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 20
    actual = [
        fault
        for path in files
        for fault in faults(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py")
    ]
    assert not actual, "\n".join(actual)


def test_nobody_imports_a_folder_of_the_checkout() -> None:
    """Tests, benchmarks and documentation, too, where the bare name works as well, and makes a second module of it."""
    files = [path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    actual = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line, name in imports(path.read_text(encoding="utf-8"), module_of(path), False)
        if name.split(".")[0] in FOLDERS
    ]
    assert not actual, actual


SHARED_BY_TESTS = ("tests.support", "tests.plugins")
READ_BY_THE_LAYOUT_TABLE = "tests.parity.test_pipelines"
"""Test module whose cases the table of layouts is made from."""


def shares(module: str, name: str) -> bool:
    """Whether a file of tests or benchmarks may import this name."""
    if not name.startswith("tests."):
        return True
    if module == "tests.support.layout_table" and is_through(name, (READ_BY_THE_LAYOUT_TABLE,)):
        return True
    return is_through(name, SHARED_BY_TESTS) and not any(
        part.startswith("test_") or part == "conftest" for part in name.split(".")[:-1]
    )


def test_tests_share_support_alone() -> None:
    """Nobody imports a test module or a conftest: a test that changes would change others."""
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    actual = [
        f"{path.relative_to(ROOT)}:{line} imports {name}: what tests share lies in tests/support"
        for path in files
        for line, name in imports(path.read_text(encoding="utf-8"), module_of(path), False)
        if not shares(module_of(path), name)
    ]
    assert not actual, "\n".join(actual)


@pytest.mark.parametrize(
    ("module", "source", "fits"),
    [
        ("tests.unit.test_x", "from tests.support.parity import build_engine", True),
        ("tests.unit.test_x", "from tests.plugins import plugin", True),
        ("tests.unit.test_x", "from tests.parity import test_layouts", False),
        ("tests.unit.test_x", "from tests.parity.test_layouts import compare_gradients", False),
        ("tests.unit.test_x", "import tests.parity.test_pipelines", False),
        ("tests.unit.test_x", "from .conftest import write", False),
        ("tests.unit.test_x", "def f():\n    from tests.plugins.test_blocks import PAGES", False),
        ("tests.support.layout_table", "from tests.parity import test_pipelines", True),
        ("tests.support.layout_table", "from tests.parity import test_experts", False),
    ],
)
def test_sharing_is_told_from_importing_a_test(module: str, source: str, fits: bool) -> None:
    assert all(shares(module, name) for _, name in imports(source, module, False)) is fits


def test_the_table_has_floors() -> None:
    """No room reaches itself through others, and each row is a room's."""
    TopologicalSorter({room: allowed - {room} for room, allowed in ROOMS.items()}).prepare()
    rows = set(ROOMS).union(*ROOMS.values())
    dead = [
        row
        for row in rows
        if not (path := ROOT / row.replace(".", "/")).is_dir() and not path.with_suffix(".py").is_file()
    ]
    assert not dead


@pytest.mark.parametrize(
    ("module", "line", "is_fault"),
    [
        ("megatfm.layers.block", "from megatfm.models import decoder", True),
        ("megatfm.layers.block", "from megatfm.layers.rope import rotate", False),
        ("megatfm.layers.block", "from ..models import decoder", True),
        ("megatfm.layers.norm.rms", "from ..block import Block", False),
        ("megatfm.corpus.inspect", "from megatfm.data.bin_packing import describe_padding", True),
        ("megatfm.data.loader", "def f():\n    import megatfm.tokenizers", True),
        ("megatfm.data.loader", "from megatfm import rng, train", True),
        ("megatfm.data.loader", "from megatfm.errors import UsageError", False),
        ("megatfm.data.loader", "import torch.distributed as dist", True),
        ("megatfm.layers.feed_forward", "import torch\nrank = torch.distributed.get_rank()", True),
        ("megatfm.layers.feed_forward", "from torch import distributed", True),
        ("megatfm.parallel.mesh", "import torch.distributed as dist", False),
        ("megatfm.train.trainer", "from megatfm.engines import NativeEngine", True),
        ("megatfm.verify.rank_processes", "from megatfm.engines.native.engine import NativeEngine", True),
        ("megatfm.train.trainer", "from megatfm.engines.interface import Engine", False),
        ("megatfm.engines.registry", "from megatfm.engines.native.engine import NativeEngine", False),
        ("megatfm.config.root", "from torch import nn", True),
        ("megatfm.launchers.slurm", "import torch", True),
        ("megatfm.commands.data", "from data_prep.command import cli", True),
        ("megatfm.commands.data", "from megatfm.data_prep.cli import cli", False),
        ("megatfm.launchers.slurm", "from megatfm.train import trainer", True),
        ("megatfm.report.page", "from megatfm.inference import sample", True),
        ("megatfm.attic.old", "import os", True),
        ("megatfm.layers.block", "from megatfm import load", True),
        ("megatfm.train.trainer", "import megatfm", True),
        ("megatfm.convert.convert", "from megatfm.version import __version__", False),
        ("megatfm.tracking.run_directory", "from megatfm.train.trainer import train", True),
        ("megatfm.optim.parameters", "from megatfm.tracking.metrics import SINKS", True),
        ("megatfm.tracking.console", "from megatfm.engines.interface import Engine", True),
        ("megatfm.train.trainer", "from megatfm.tracking.console import RunLog", False),
        ("megatfm.engines.optimizers", "from megatfm.engines.native.engine import NativeEngine", True),
        ("megatfm.engines.native.engine", "from megatfm.engines.optimizers import TorchOptimizer", False),
        ("megatfm.verify.rank_processes", "from megatfm.engines.optimizers import TorchOptimizer", True),
        ("megatfm.inference.text", "from megatfm.commands import generate", True),
    ],
)
def test_a_planted_import_is_found(module: str, line: str, is_fault: bool) -> None:
    assert bool(faults(line, module)) == is_fault


AXES = {"pp", "dp_replicate", "dp_shard", "tp"}
NAMES_AXES = (
    "megatfm/parallel/mesh.py",
    "megatfm/verify/axes.py",
    "megatfm/engines/registry.py",
    "megatfm/config/",
    "megatfm/presets/",
)
"""The mesh, what is expected of it without it, what engines declare to carry out, and the keys of configs."""


def literal_axes(source: str) -> list[int]:
    """Lines in which an axis of the mesh is written out, other than as a key: those are of [parallel] in a config."""
    tree = ast.parse(source)
    keys = {key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in AXES and node not in keys
    ]


def test_only_the_mesh_names_its_axes() -> None:
    """What is cut over which axes, or summed, is read from the layout table: a new axis is no search for literals."""
    files = [
        path
        for path in sorted((ROOT / "megatfm").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(NAMES_AXES)
    ]
    actual = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in literal_axes(path.read_text(encoding="utf-8"))
    ]
    assert not actual, actual


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ('mesh.sum(x, ("tp",))', True),
        ('mesh.size("dp_shard")', True),
        ('sizes["dp_shard"]', True),
        ('parallel.model_copy(update={"tp": 1, "dp_shard": 1})', False),
        ("mesh.sum(x, placement.sum_over)", False),
    ],
)
def test_a_planted_axis_is_found(line: str, is_fault: bool) -> None:
    assert bool(literal_axes(line)) == is_fault
