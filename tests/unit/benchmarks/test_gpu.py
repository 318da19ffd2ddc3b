"""The GPU benchmark's script, on a CPU with a tiny model."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.workers import Workers

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def run(folder: Path) -> None:
    script().main(["--tiny", "--steps", "2", "--out", str(folder)])


def test_it_writes_a_dated_result(workers: Workers, tmp_path: Path) -> None:
    workers.run(run, 1, tmp_path)
    (result,) = tmp_path.glob("*-gpu.md")
    row = result.read_text(encoding="utf-8").splitlines()[-1]
    assert row.startswith("| gpt2-124m | ")
    assert row.count("|") == 9
    _, _, _, length, rows, rate, memory, full, causal, _ = (cell.strip() for cell in row.split("|"))
    assert (length, rows, full, causal) == ("64", "2", "–", "–")
    assert float(rate.replace(",", "")) > 0
    assert float(memory) > 0


def test_cases_are_of_the_sizes_that_they_claim() -> None:
    module = script()
    counts = {}
    for preset, length, rows in module.CASES:
        config = module.config_of(preset, length, rows, tiny=False, compiled=True)
        counts[preset, length] = module.describe(config).parameters
        assert config.train.compile
        assert config.model.dropout == config.model.attention.dropout == 0
    assert counts["gpt2-124m", 1024] == 124_439_808
    assert counts["gpt3-xl", 2048] == 1_315_723_264
