"""Scripts keep up with what they measure: imports and config keys exist, and they run at sizes that mean nothing."""

import ast
import importlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import ModelConfig, load_config
from megatfm.corpus.corpus import Corpus
from megatfm.data.packing_plan import build_packing_plan
from tests.support.benchmark_scripts import script
from tests.support.forked_commands import ForkedCommand

ROOT = Path(__file__).parents[3]
OURS = ("megatfm", "tests")
SMALL = {
    "checkpoint.py": "FOLDER/disk --gigabytes 0.01 --rounds 1 --ranks 1 --out FOLDER/result.json",
    "context_traffic.py": "--rows 2048 --ranks 2 3 --draws 1",
    "initial.py": "--threads 1 --rounds 1",
    "layer_statistics.py": "--widths 64 --rounds 2 --out FOLDER",
    "moe.py": "--rounds 1 --warmup 1 --width 128 --d-ff 64 --layers 1 --rows 1 --length 64 --dtypes fp32",
    "moe_flips.py": "--precisions fp32 --ranks 2 --batches 1 --out FOLDER/result.md",
    "newton_schulz.py": "--rounds 1",
    "objectives.py": "--documents 640 --rows 64 --out FOLDER",
    "padding.py": "--tokens 200000 --longest 2048",
    "prep.py": "--megabytes 3 --rounds 1 --vocabulary 1000 --out FOLDER",
    "vision_loader.py": "--images 32 --rounds 1 --out FOLDER",
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
        for model in learns.make_models(256, 16, positions).values():
            ModelConfig.from_dotted({**learns.SMALL, "vocab_size": 7, **model})
    for section in moe.MODELS.values():
        load_config("quickstart-moe", moe.make_overrides(section, ROOT, 1200, 0, ROOT))
    for preset in zoo.MODELS:
        load_config(preset, zoo.make_overrides(preset, ROOT, 1500, ROOT))
    for words in engines.CASES.values():
        for engine in engines.ENGINES:
            engines.load_case(engine, words, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_benchmarks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = SMALL[name].replace("FOLDER", str(tmp_path)).split()
    command = ForkedCommand(words, tmp_path / "said", ROOT, program=f"benchmarks/{name}")
    assert command.wait(300) == 0, command.output


def test_attention_calls_add_to_the_result_of_the_day(tmp_path: Path) -> None:
    for words in (
        ["--parts", "speed", "flat", "packed", "linformer", "--dtypes", "float32", "--lengths", "128", "256"],
        ["--parts", "speed", "memory", "--dtypes", "bfloat16", "--lengths", "128", "--only", "window"],
    ):
        words += ["--rounds", "1", "--out", tmp_path]
        script = ForkedCommand(words, tmp_path / "said", ROOT, program="benchmarks/attention.py")
        assert script.wait(120) == 0, script.output
    (path,) = tmp_path.glob("*-attention.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    of_windows = {"dense", "window 512", "window 512, documents of 1000", "window 512, dense mask"}
    assert set(result["speed"]["bfloat16"]["128"]) == of_windows
    assert set(result["speed"]["float32"]) == {"128", "256"}
    assert set(result["speed"]["float32"]["256"]) > of_windows
    assert result["flat"]["float32"]["bigbird"]["128"]["of_the_shortest"] == 1
    assert result["packed"]["float32"]["256"]["full, documents of 32"] > 0
    assert set(result["linformer"]["float32"]["128"]) == {"unfused / linformer 128", "fused / linformer 128"}
    assert set(result["memory"]) == of_windows - {"dense"}


def test_layout_costs_are_written_as_a_dated_result(tmp_path: Path) -> None:
    """In a process of its own: it needs a process group that isn't one."""
    small = ["--widths", "64", "--layers", "2", "--tokens", "8", "--rounds", "1", "--times", "1"]
    script = ForkedCommand(
        [*small, "--out", tmp_path], tmp_path / "said", ROOT, program="benchmarks/parallel.py"
    )
    assert script.wait(120) == 0, script.output
    (result,) = tmp_path.glob("*-parallel.md")
    rows = [
        line.split("|") for line in result.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    calls = {row[1].strip(): int(row[9]) for row in rows[1:]}
    # A block gathers and scatters twice each way; without sequence parallelism it sums twice each way.
    assert calls["tp2"] == 2 * 8
    assert calls["tp2 without sequence parallel"] == 2 * 4
    # Two gathers and a reduction; stage 2 gathers once; stage 1 reduces all at once.
    assert (calls["zero3"], calls["zero2"], calls["zero1"]) == (2 * 3, 2 * 2, 1)
    ratio, with_calls, moved, held, state = (
        {row[1].strip(): float(row[column].strip().strip("*")) for row in rows[1:]}
        for column in (5, 6, 7, 11, 12)
    )
    assert all(ratio[layout] <= with_calls[layout] for layout in ratio)
    # A quarter of the state are gradients: stage 1 reads and writes them once, the others weights, too.
    assert moved["zero1"] == pytest.approx(2 * state["zero2"] / 2, abs=0.1)
    assert moved["zero3"] > moved["zero2"] > moved["zero1"]
    assert held["zero2"] > held["zero3"] > 0, "stage 2 keeps gathered weights"
    assert held["tp2 without sequence parallel"] > held["tp2"]
    assert state["zero1"] > state["zero2"] == state["zero3"], "stage 1 has whole weights"


memory: Any = script("corpus_memory")


def test_memory_does_not_grow_with_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty shards of an index of 0.3 MB as they are in memory when they are read, 5.6 MB together."""
    for name, value in {
        "corpus.index_cache.INDEX_CACHE_BYTES": 2**17,
        "data.packing_plan.SAMPLES_AT_ONCE": 2**12,
    }.items():
        monkeypatch.setattr(f"megatfm.{name}", value)
    monkeypatch.setattr(memory, "SHARD_DOCUMENTS", 10_000)
    memory.write_corpus(tmp_path, 200_000)
    Corpus.open(tmp_path)  # what is imported and cached meanwhile doesn't count
    tracemalloc.start()
    corpus = Corpus.open(tmp_path)
    opened, at_opening = tracemalloc.get_traced_memory()
    peaks = []
    for max_tokens in (None, 2047):
        tracemalloc.reset_peak()
        planned = build_packing_plan(corpus, memory.ObjectiveStub(max_tokens), [2048], 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert corpus.n_samples == 200_000
    assert planned.sizes.sum() > 200_000 * 300 / 2048
    assert opened < 0.25e6
    assert max(at_opening, *peaks) < 1.5e6
