"""One name, one thing: a class name is not used twice in the package."""

import ast
from collections import defaultdict

from tests.support.source_tree import FOLDERS, ROOT

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
