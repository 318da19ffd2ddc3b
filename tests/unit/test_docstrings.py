"""Every public callable has a docstring that leads with no pronoun, unless one place tells it for all of its kind.

Such places are a documented method of a base class, a documented Protocol, the documented class of a registry's
entries, the documentation of torch, and `megatfm.cli.COMMANDS` for the two functions of a command.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property

import pytest

from megatfm.cli import COMMANDS
from tests.support.documentation import ROOT, get_module_name, iter_statements, parse_folders, parse_source

ROOMS = ("megatfm", "data_prep", "launchers")
OF_TORCH = {"Module": {"forward"}, "Function": {"forward", "backward", "setup_context"}, "Optimizer": {"step"}}
"""Class of torch → what it calls or asks for by name, and documents."""
VAGUE_WORDS = {
    *("It", "That", "They", "Those", "There", "Of", "What", "Who", "Whoever", "Whatever"),
    *("As", "If", "So", "Under", "When", "Where", "With", "Without"),
}
"""First words that name nothing: a docstring begins with its subject, or with a verb."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(body: Iterable[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def documented(node: ast.ClassDef) -> set[str]:
    return {part.name for part in public(node.body) if ast.get_docstring(part)}


def last_name(node: ast.expr) -> str:
    """`nn.Module` → Module; `Iterator[int]` → Iterator."""
    return ast.unparse(node).split("[")[0].split(".")[-1]


def name_arguments(call: ast.Call) -> set[str]:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {value.id for value in values if isinstance(value, ast.Name)}


def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in map(last_name, node.bases)


@cache
def list_own_members(node: ast.ClassDef) -> frozenset[str]:
    """Methods and fields of this class alone, and what its methods set on `self`."""
    names = set[str]()
    for part in node.body:
        if isinstance(part, Function):
            names |= {part.name, *_set_on_self(part)}
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _set_on_self(method: Function) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                yield name


class House:
    """Modules and their syntax trees. Classes are found by their names alone."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.trees = trees

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        by_name: dict[str, list[ast.ClassDef]] = {}
        for tree in self.trees.values():
            for node in iter_statements(tree):
                if isinstance(node, ast.ClassDef):
                    by_name.setdefault(node.name, []).append(node)
        return by_name

    @cached_property
    def documented_functions(self) -> set[str]:
        trees = self.trees.values()
        return {
            node.name for tree in trees for node in tree.body if isinstance(node, Function) and ast.get_docstring(node)
        }

    def lineage(self, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """The class, and those of the house that it inherits from, near or far."""
        yield node
        for base in node.bases:
            for parent in self.classes.get(last_name(base), []):
                if parent.name != node.name:
                    yield from self.lineage(parent)

    def members(self, node: ast.ClassDef) -> set[str]:
        """Public methods and fields, inherited ones too, and what methods set on `self`."""
        names = set[str]().union(*map(list_own_members, self.lineage(node)))
        return {name for name in names if not name.startswith("_")}

    @cached_property
    def protocols(self) -> list[set[str]]:
        """The members of each Protocol that has a docstring, and more than a call to itself."""
        classes = [node for same_name in self.classes.values() for node in same_name]
        documented = [node for node in classes if is_protocol(node) and ast.get_docstring(node)]
        return [members for members in map(self.members, documented) if members]

    def told_of_methods(self, node: ast.ClassDef) -> set[str]:
        """Methods that a base class, torch or a Protocol that the class fulfils tells about."""
        lineage, members = list(self.lineage(node)), self.members(node)
        torchs = [OF_TORCH.get(last_name(base), set()) for item in lineage for base in item.bases]
        fulfilled = [protocol for protocol in self.protocols if protocol <= members]
        return set[str]().union(*map(documented, lineage[1:]), *torchs, *fulfilled)

    def told_of_functions(self, module: str) -> set[str]:
        """Functions in `REGISTRY.register(name)(Entry(…, function, …))`, in `register_x(name, Entry(…))` or in
        `register_x(name, function, …)`, also of an entry that has a name, and those of a command."""
        names = [name for name, (place, _) in COMMANDS.items() if place == module]
        functions = {function for name in names for function in (f"add_{name}_arguments", f"{name}_command")}
        registrations = {name for name in self.documented_functions if name.startswith("register_")}
        body = self.trees[module].body
        expressions = [node.value for node in body if isinstance(node, ast.Expr | ast.Assign)]
        entries = {
            node.targets[0].id: node.value
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
        }
        for node in itertools.chain.from_iterable(map(ast.walk, expressions)):
            match node:
                case ast.Call(ast.Call(ast.Attribute(attr="register")), [ast.Call(kind) as entry]) if any(
                    ast.get_docstring(known) for known in self.classes.get(last_name(kind), [])
                ):
                    functions |= name_arguments(entry)
                case ast.Call(ast.Name(name)) if name in registrations:
                    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                    functions |= names.union(*(name_arguments(entries[name]) for name in names & entries.keys()))
        return functions

    def faults(self) -> Iterator[str]:
        """Callables documented nowhere, and those whose docstring leads with a pronoun."""
        for module, tree in self.trees.items():
            yield from self._faults(module, "", tree.body, self.told_of_functions(module))
            for node in public(tree.body):
                if isinstance(node, ast.ClassDef):
                    yield from self._faults(module, f"{node.name}.", node.body, self.told_of_methods(node))

    @staticmethod
    def _faults(module: str, prefix: str, body: list[ast.stmt], documented_elsewhere: set[str]) -> Iterator[str]:
        for node in public(body):
            text = ast.get_docstring(node)
            if not text and node.name not in documented_elsewhere:
                yield f"{module}:{node.lineno} {prefix}{node.name} has no docstring"
            if text and text.split()[0] in VAGUE_WORDS:
                yield f"{module}:{node.lineno} {prefix}{node.name} leads with {text.split()[0]!r}: name the thing"


def test_every_public_callable_says_what_its_name_does_not() -> None:
    trees = parse_folders(*ROOMS)
    assert len(trees) > 100
    actual = list(House({get_module_name(path): tree for path, tree in trees.items()}).faults())
    assert not actual, "\n".join(actual)


def vague_docstrings(source: str) -> list[str]:
    """Docstrings that lead with a pronoun, public or not."""
    tree = parse_source(source)
    nodes = [tree, *(node for node in iter_statements(tree) if isinstance(node, Function | ast.ClassDef))]
    texts = [ast.get_docstring(node) or "Nothing." for node in nodes]
    return [text.splitlines()[0] for text in texts if text.split()[0] in VAGUE_WORDS]


def test_docstrings_of_tests_name_the_thing() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    vague = {path.name: lines for path in files if (lines := vague_docstrings(path.read_text(encoding="utf-8")))}
    assert len(files) > 100
    assert not vague
    assert vague_docstrings('"""What runs."""\ndef _run():\n    """Of 5 ranks."""') == ["What runs.", "Of 5 ranks."]


BASE = 'class Base:\n    """A base."""\n    def run(self):\n        """Tell."""\n'
PROTOCOL = 'class Wanted(Protocol):\n    """Runs and stops."""\n    size: int\n    def run(self): ...\n'
ENTRY = 'class Entry:\n    """read: what it reads."""\ndef read(): ...\n'


@pytest.mark.parametrize(("source", "faulty"), [
    ("def run(): ...", ["run"]),
    ("async def run(): ...", ["run"]),
    ("class Kind: ...", ["Kind"]),
    ("def _run(): ...", []),
    ("class _Kind:\n    def run(self): ...", []),
    ("def run():\n    def inner(): ...", ["run"]),
    ('def run():\n    """Those that are meant."""', ["run"]),
    ('def run():\n    """What is meant."""', ["run"]),
    ('def run():\n    """Where files are read."""', ["run"]),
    ('def run():\n    """Seconds."""', []),
    ('class Kind:\n    """A kind."""\n    @property\n    def size(self): ...', ["Kind.size"]),
    (BASE + 'class Kind(Base):\n    """A kind."""\n    def run(self): ...', []),
    (BASE + 'class Kind(Base):\n    """A kind."""\n    def stop(self): ...', ["Kind.stop"]),
    (BASE + 'class Kind:\n    """A kind."""\n    def run(self): ...', ["Kind.run"]),
    (PROTOCOL + 'class Kind:\n    """A kind."""\n    size: int = 1\n    def run(self): ...', []),
    (PROTOCOL + 'class Kind:\n    """A kind."""\n    def run(self):\n        self.size = 1', []),
    (PROTOCOL + 'class Kind:\n    """A kind."""\n    def run(self): ...', ["Kind.run"]),
    ('class Kind(nn.Module):\n    """A kind."""\n    def forward(self): ...', []),
    ('class Kind:\n    """A kind."""\n    def forward(self): ...', ["Kind.forward"]),
    (ENTRY, ["read"]),
    (ENTRY + 'KINDS.register("one")(Entry(read))', []),
    (ENTRY + 'KINDS.register("one")(Entry(read=read))', []),
    (ENTRY + "Entry(read)", ["read"]),
    ('def register_one(read):\n    """Register."""\ndef read(): ...\nregister_one(read)', []),
    ("def read(): ...\nregister_one(read)", ["read"]),
    ('def register_one(read):\n    """Register."""\ndef read(): ...\nONE = Entry(read)\nregister_one(ONE)', []),
])  # fmt: skip
def test_a_planted_silence_is_found(source: str, faulty: list[str]) -> None:
    assert [fault.split()[1] for fault in House({"megatfm.attic": parse_source(source)}).faults()] == faulty


def test_a_command_s_two_functions_are_documented_by_the_command_line() -> None:
    tree = parse_source("def data_command(args): ...\ndef script(): ...")
    modules = ("megatfm.commands.data", "megatfm.data")
    faults = {module: list(House({module: tree}).faults()) for module in modules}
    assert [len(lines) for lines in faults.values()] == [1, 2]
