"""The scripts keep up with what they measure: their imports and config keys exist, and they run at sizes that mean
nothing."""

import ast
import importlib
from pathlib import Path

import pytest

from megatfm.config import ModelConfig, load_config
from tests.support.benchmark_scripts import script
from tests.support.forked_commands import ForkedCommand

ROOT = Path(__file__).parents[3]
OURS = ("megatfm", "tests")
SMALL = {
    "checkpoint.py": "FOLDER/disk --gigabytes 0.01 --rounds 1 --ranks 1 --out FOLDER/result.json",
    "context_traffic.py": "--rows 2048 --ranks 2 3 --draws 1",
    "initial.py": "--threads 1 --rounds 1",
    "looking.py": "--widths 64 --rounds 2 --out FOLDER",
    "moe.py": "--rounds 1 --warmup 1 --width 128 --d-ff 64 --layers 1 --rows 1 --length 64 --dtypes fp32",
    "moe_flips.py": "--precisions fp32 --ranks 2 --batches 1 --out FOLDER/result.md",
    "newton_schulz.py": "--rounds 1",
    "objectives.py": "--documents 640 --rows 64 --out FOLDER",
    "padding.py": "--tokens 200000 --longest 2048",
    "prep.py": "--megabytes 3 --rounds 1 --vocabulary 1000 --out FOLDER",
    "zoo_speed.py": "--rounds 1 --rows 1 --length 32 --models bert-base --dtypes fp32 --states eager",
}


def test_what_they_import_is_there() -> None:
    """Also within functions, which nothing looks at before they run."""
    paths, checked = sorted((ROOT / "benchmarks").glob("*.py")), 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                assert node.module
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    checked += 1
    assert checked > 100


def test_their_configs_have_the_keys_of_today() -> None:
    """Those that no test trains, too."""
    learns, moe, zoo, engines = map(script, ("attention_learns", "moe_learns", "zoo_learns", "engines"))
    for positions in ("learned", "none"):
        for model in learns.patterns(256, 16, positions).values():
            ModelConfig.from_dotted({**learns.SMALL, "vocab_size": 7, **model})
    for section in moe.MODELS.values():
        load_config("quickstart-moe", moe.overrides(section, ROOT, 1200, 0, ROOT))
    for preset in zoo.MODELS:
        load_config(preset, zoo.overrides(preset, ROOT, 1500, ROOT))
    for words in engines.CASES.values():
        for engine in engines.ENGINES:
            engines.config_of(engine, words, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = SMALL[name].replace("FOLDER", str(tmp_path)).split()
    command = ForkedCommand(words, tmp_path / "said", ROOT, program=f"benchmarks/{name}")
    assert command.wait(300) == 0, command.output
