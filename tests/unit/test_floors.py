"""The plan of the house: a room imports only what the table allows it, and so stays readable and testable alone."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYBODYS = {
    "megatfm.errors": set[str](),
    "megatfm.keyed": set[str](),
    "megatfm.version": set[str](),
    "megatfm.atomic": set[str](),
    "megatfm.registry": {"megatfm.errors"},
    "megatfm.cost": set[str](),
}
"""Loose modules of floor 0, open to all."""

# Room → the rooms of the project that it may import. A new room gets a row here; a room inside a room may have its own.
CORE = {
    "megatfm.config": set[str](),
    "megatfm.ops": set[str](),
    "megatfm.layers": {"megatfm.ops", "megatfm.config"},
    "megatfm.tokenizers": {"megatfm.config"},
    "megatfm.data": {"megatfm.config"},
    "megatfm.models": {"megatfm.layers", "megatfm.ops", "megatfm.config"},
    "megatfm.objectives": {"megatfm.data", "megatfm.layers", "megatfm.ops", "megatfm.config"},
    "megatfm.ranks": set[str](),
    "megatfm.parallel": {"megatfm.ranks", "megatfm.ops", "megatfm.config"},
    "megatfm.checkpoint": {"megatfm.ranks", "megatfm.ops", "megatfm.config"},
    "megatfm.engines": {
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
RECORD = {
    "megatfm.train.record": {
        "megatfm.ranks",
        "megatfm.parallel",
        "megatfm.checkpoint",
        "megatfm.tokenizers",
        "megatfm.config",
    },
}
BESIDE_A_STEP = {
    "megatfm.train.generators": set[str](),
    "megatfm.train.watching": {*RECORD, "megatfm.ranks", "megatfm.parallel"},
    "megatfm.train.guards": {
        *RECORD,
        "megatfm.train.generators",
        "megatfm.engines",
        "megatfm.ranks",
        "megatfm.parallel",
        "megatfm.checkpoint",
        "megatfm.config",
    },
}
TRAIN = {**RECORD, **BESIDE_A_STEP, "megatfm.train": {*CORE, *RECORD, *BESIDE_A_STEP}}
# What is done with a finished or running model: builds it as training does, and knows none of the others here.
USES = {
    f"megatfm.{room}": {*CORE, *TRAIN}
    for room in ("generate", "convert", "report", "verify", "evaluate", "describe")
}
BESIDE = {
    "megatfm.data_prep": {"megatfm.data", "megatfm.tokenizers", "megatfm.config"},
    # Steps that have a model read the text, which data_prep imports by name when a config asks for one.
    "megatfm.data_prep.models": {
        "megatfm.data_prep",
        "megatfm.data",
        "megatfm.tokenizers",
        "megatfm.config",
        "megatfm.generate",
    },
    "megatfm.launchers": {"megatfm.config"},
    "megatfm.slurm": set[str](),
}
API = {
    "megatfm.api": {
        *("megatfm.generate", "megatfm.convert", "megatfm.evaluate", "megatfm.describe"),
        *(
            "megatfm.train",
            "megatfm.train.record",
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

FOLDERS = {"data_prep", "launchers", "slurm"}
"""Rooms whose folders lie at the top of the repository. All import them as `megatfm.data_prep`, …: by the bare name a
user's own `megatfm.data_prep.py` would be imported instead, or ours a second time."""
NO_TORCH = {"megatfm.config", "megatfm.launchers", "megatfm.slurm", "megatfm", "megatfm.cli", *EVERYBODYS}
ONLY_FROM = dict.fromkeys(ENGINES, "megatfm.engines.registry")
"""Room → the module that alone imports it from outside, by name, when it is chosen."""
DOORS = {"megatfm.engines": ("megatfm.engines.interface", "megatfm.engines.registry")}
"""Room → the only files of it that other rooms may import."""
BELOW_FLOOR_3 = ("ops", "layers", "tokenizers", "data", "models", "objectives")
NO_DISTRIBUTED = {"megatfm.data_prep", *(f"megatfm.{room}" for room in BELOW_FLOOR_3)}


def room_of(module: str) -> str:
    """`megatfm.data.index` → `megatfm.data`; `megatfm.train.guards.lock` → `megatfm.train.guards`."""
    parts = module.split(".")
    inner = ".".join(parts[:3])
    return inner if inner in ROOMS else ".".join(parts[:2])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["megatfm"] * (parts[0] in FOLDERS) + [*parts]).removesuffix(".__init__")


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
    found = []
    for line, name in imports(source, module, is_package):
        other = room_of(name) if room_of(name) in ROOMS else name.split(".")[0]
        if name.split(".")[0] in FOLDERS:
            found.append(f"{module}:{line} imports {name}: its name is megatfm.{name}")
        elif name.split(".")[0] == "megatfm" and other in ROOMS:
            if other in ONLY_FROM and module == ONLY_FROM[other]:
                continue
            if other != room and other not in {*ROOMS[room], *({} if room in EVERYBODYS else EVERYBODYS)}:
                found.append(f"{module}:{line} imports {name}: {room} may import {sorted(ROOMS[room])}")
            elif not room.startswith(other) and not is_through(name, DOORS.get(other, (other,))):
                found.append(f"{module}:{line} imports {name}: other rooms see {DOORS[other]} alone")
        elif room in NO_TORCH and name.split(".")[0] == "torch":
            found.append(f"{module}:{line} imports {name}: {room} runs on a login node without torch")
        elif room in NO_DISTRIBUTED and name.startswith("torch.distributed"):
            found.append(f"{module}:{line} uses {name}: {room} knows no ranks")
    return found


def test_every_import_goes_down() -> None:
    files = [path for room in ("megatfm", *FOLDERS) for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 20
    found = [
        fault
        for path in files
        for fault in faults(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_nobody_imports_a_folder_of_the_checkout() -> None:
    """Tests, benchmarks and documentation, too, where the bare name works as well, and makes a second module of it."""
    files = [path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line, name in imports(path.read_text(encoding="utf-8"), module_of(path), False)
        if name.split(".")[0] in FOLDERS
    ]
    assert not found, found


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
        ("megatfm.layers.block", "from megatfm.ops.rotary import rotate", False),
        ("megatfm.layers.block", "from ..models import decoder", True),
        ("megatfm.layers.norm.rms", "from ..block import Block", False),
        ("megatfm.data.loader", "def f():\n    import megatfm.tokenizers", True),
        ("megatfm.data.loader", "from megatfm import keyed, train", True),
        ("megatfm.data.loader", "from megatfm.errors import UsageError", False),
        ("megatfm.data.loader", "import torch.distributed as dist", True),
        ("megatfm.layers.ffn", "import torch\nrank = torch.distributed.get_rank()", True),
        ("megatfm.layers.ffn", "from torch import distributed", True),
        ("megatfm.parallel.mesh", "import torch.distributed as dist", False),
        ("megatfm.train.loop", "from megatfm.engines import NativeEngine", True),
        ("megatfm.verify.rank", "from megatfm.engines.native.engine import NativeEngine", True),
        ("megatfm.train.loop", "from megatfm.engines.interface import Engine", False),
        ("megatfm.engines.registry", "from megatfm.engines.native.engine import NativeEngine", False),
        ("megatfm.config.root", "from torch import nn", True),
        ("megatfm.launchers.slurm", "import torch", True),
        ("megatfm.commands.prep", "from data_prep.command import cli", True),
        ("megatfm.commands.prep", "from megatfm.data_prep.command import cli", False),
        ("megatfm.launchers.slurm", "from megatfm.train import loop", True),
        ("megatfm.report.page", "from megatfm.generate import sample", True),
        ("megatfm.attic.old", "import os", True),
        ("megatfm.layers.block", "from megatfm import load", True),
        ("megatfm.train.loop", "import megatfm", True),
        ("megatfm.convert.convert", "from megatfm.version import __version__", False),
        ("megatfm.train.guards.lock", "from megatfm.train.loop import train", True),
        ("megatfm.train.watching.hub", "from megatfm.train.guards.elastic import fit_layout", True),
        ("megatfm.train.loop", "from megatfm.train.guards.elastic import fit_layout", False),
        ("megatfm.engines.optimizers", "from megatfm.engines.native.engine import NativeEngine", True),
        ("megatfm.engines.native.engine", "from megatfm.engines.optimizers import TorchOptimizer", False),
        ("megatfm.verify.rank", "from megatfm.engines.optimizers import TorchOptimizer", True),
        ("megatfm.generate.load", "from megatfm.commands import generate", True),
    ],
)
def test_a_planted_import_is_found(module: str, line: str, is_fault: bool) -> None:
    assert bool(faults(line, module)) == is_fault


AXES = {"pp", "dp_replicate", "dp_shard", "tp"}
NAMES_AXES = ("megatfm/parallel/mesh.py", "megatfm/verify/axes.py", "megatfm/config/", "megatfm/presets/")
"""The mesh, what is expected of it without it, and the keys of configs."""


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
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in literal_axes(path.read_text(encoding="utf-8"))
    ]
    assert not found, found


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
