"""The scripts keep up with what they measure: what they import is there, and they run at sizes that mean nothing."""

import ast
import importlib
from pathlib import Path

import pytest

from tests.forks import ForkedCommand

ROOT = Path(__file__).parents[3]
OURS = ("megatfm", "tests")
SMALL = {
    "checkpoint.py": "FOLDER/kept --gigabytes 0.01 --rounds 1 --ranks 1 --out FOLDER/made.json",
    "context_traffic.py": "--rows 2048 --ranks 2 3 --draws 1",
    "initial.py": "--threads 1 --rounds 1",
    "looking.py": "--widths 64 --rounds 2 --out FOLDER",
    "moe.py": "--rounds 1 --warmup 1 --width 128 --d-ff 64 --layers 1 --rows 1 --length 64 --dtypes fp32",
    "moe_flips.py": "--precisions fp32 --ranks 2 --batches 1 --out FOLDER/made.md",
    "objectives.py": "--documents 640 --rows 64 --out FOLDER",
    "padding.py": "--tokens 200000 --longest 2048",
    "prep.py": "--megabytes 3 --rounds 1 --vocabulary 1000 --out FOLDER",
    "zoo_speed.py": "--rounds 1 --rows 1 --length 32 --models bert-base --dtypes fp32 --states eager",
}


def test_what_they_import_is_there() -> None:
    """Also within functions, which nothing looks at before they run."""
    scripts, checked = sorted((ROOT / "benchmarks").glob("*.py")), 0
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                assert node.module
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    checked += 1
    assert checked > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_they_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = SMALL[name].replace("FOLDER", str(tmp_path)).split()
    script = ForkedCommand(words, tmp_path / "said", ROOT, program=f"benchmarks/{name}")
    assert script.wait(300) == 0, script.output
