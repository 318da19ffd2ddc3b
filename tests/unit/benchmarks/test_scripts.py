"""Benchmark scripts keep up with what they measure: imports and config keys exist, and they run at tiny sizes."""

import ast
import importlib
import json
import mmap
import statistics
import subprocess
import sys
import tracemalloc
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm.config import ModelConfig, load_config
from megatfm.corpus.corpus import Corpus
from megatfm.data.packing_plan import build_packing_plan
from megatfm.models import build
from tests.support.documentation import BENCHMARKS, load_script
from tests.support.forked_commands import ForkedCommand
from tests.support.workers import Workers

ROOT = Path(__file__).parents[3]
OURS = ("megatfm", "tests")
SMALL = (
    "checkpoint.py speed FOLDER/disk --gigabytes 0.01 --rounds 1 --ranks 1 --out FOLDER/result.json",
    "compiled_kernels.py resources",
    "control_plane.py checkpoint --ranks 64 --replicas 1 --layers 2 --out FOLDER",
    "control_plane.py ranks --ranks 16 --out FOLDER",
    "model_speed.py generation --rounds 1 --width 64 --layers 1 --vocabulary 100 --out FOLDER/result.md",
    "model_speed.py initial --threads 1 --rounds 1",
    "model_speed.py layer-statistics --widths 64 --rounds 2 --out FOLDER",
    "model_speed.py passes --rounds 1 --rows 1 --length 32 --models bert-base --dtypes fp32 --states eager",
    "moe.py flips --precisions fp32 --ranks 2 --batches 1 --out FOLDER/result.md",
    "moe.py speed --rounds 1 --warmup 1 --width 128 --d-ff 64 --layers 1 --rows 1 --length 64 --dtypes fp32",
    "packing.py memory --documents 1000",
    "packing.py objectives --documents 640 --rows 64 --out FOLDER",
    "packing.py padding --tokens 20000 --longest 2048",
    "parallel.py traffic --rows 2048 --ranks 2 3 --draws 1",
    "prep.py recall --rounds 1 --out FOLDER",
    "prep.py speed --megabytes 3 --rounds 1 --vocabulary 1000 --out FOLDER",
    "texts.py letters FOLDER",
    "training_step.py gpt2 --rounds 1 --pairs 1 --rows 1 --length 16 --precisions fp32 --memory alike --states eager"
    " --set model.n_layers=1",
    "training_step.py images --rounds 1 --rows 1 --precisions fp32 --theirs transformers --memory alike",
    "vision_loader.py --images 32 --rounds 1 --out FOLDER",
)


def test_imports_of_scripts_exist() -> None:
    """Imports within functions are checked, too, which nothing else looks at before they run."""
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
    learns, small, engines = map(load_script, ("attention_learns", "quickstart_learns", "engines"))
    for positions in ("learned", "none"):
        for model in learns.make_models(256, 16, positions).values():
            ModelConfig.from_dotted({**learns.SMALL, "vocab_size": 7, **model})
    for section in small.NETWORKS.values():
        load_config("quickstart-moe", small.make_network_overrides(section, ROOT, 1200, 0, ROOT))
    for preset in small.PRESETS:
        load_config(preset, small.make_preset_overrides(preset, ROOT, 1500, ROOT))
    for words in engines.CASES.values():
        for engine in engines.ENGINES:
            engines.load_case(engine, words, 2)


@pytest.mark.slow
@pytest.mark.parametrize("call", SMALL, ids=lambda call: " ".join(call.split()[:2]))
def test_benchmarks_run(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    name, *words = call.replace("FOLDER", str(tmp_path)).split()
    command = ForkedCommand(words, tmp_path / "said", ROOT, program=f"benchmarks/{name}")
    assert command.wait(300) == 0, command.output


OF_WINDOWS = {"dense", "window 512", "window 512, documents of 1000", "window 512, dense mask"}


def measure_attention(folder: Path, *words: str) -> dict[str, Any]:
    """Return the results of the day, after one more call."""
    words = (*words, "--rounds", "1", "--out", str(folder))
    script = ForkedCommand(words, folder / "said", ROOT, program="benchmarks/attention.py")
    assert script.wait(120) == 0, script.output
    (path,) = folder.glob("*-attention.json")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def test_attention_calls_add_to_the_result_of_the_day(tmp_path: Path) -> None:
    parts = ("speed", "flat", "packed", "linformer")
    measure_attention(tmp_path, "--parts", *parts, "--dtypes", "float32", "--lengths", "128", "256")
    of_windows = ("--dtypes", "bfloat16", "--lengths", "128", "--only", "window")
    result = measure_attention(tmp_path, "--parts", "speed", *of_windows)
    assert set(result["speed"]["bfloat16"]["128"]) == OF_WINDOWS
    assert set(result["speed"]["float32"]) == {"128", "256"}
    assert set(result["speed"]["float32"]["256"]) > OF_WINDOWS
    assert result["flat"]["float32"]["bigbird"]["128"]["of_the_shortest"] == 1
    assert result["packed"]["float32"]["256"]["full, documents of 32"] > 0
    assert set(result["linformer"]["float32"]["128"]) == {"unfused / linformer 128", "fused / linformer 128"}


@pytest.mark.extended
def test_memory_of_attention_is_measured_for_each_case(tmp_path: Path) -> None:
    """A fresh process for each."""
    words = ("--dtypes", "bfloat16", "--lengths", "128", "--only", "window")
    assert set(measure_attention(tmp_path, "--parts", "memory", *words)["memory"]) == OF_WINDOWS - {"dense"}


def test_layout_costs_are_written_as_a_dated_result(tmp_path: Path) -> None:
    """In a process of its own: it needs a process group that isn't one."""
    small = ["blocks", "--widths", "64", "--layers", "2", "--tokens", "8", "--rounds", "1", "--times", "1"]
    script = ForkedCommand([*small, "--out", tmp_path], tmp_path / "said", ROOT, program="benchmarks/parallel.py")
    assert script.wait(120) == 0, script.output
    (result,) = tmp_path.glob("*-parallel.md")
    rows = [line.split("|") for line in result.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    calls = {row[1].strip(): int(row[9]) for row in rows[1:]}
    # A block gathers and scatters twice each way; without sequence parallelism it sums twice each way.
    assert calls["tp2"] == 2 * 8
    assert calls["tp2 without sequence parallel"] == 2 * 4
    # Two gathers and a reduction; stage 2 gathers once; stage 1 reduces all at once.
    assert (calls["zero3"], calls["zero2"], calls["zero1"]) == (2 * 3, 2 * 2, 1)
    ratio, with_calls, moved, kept_bytes, state = (
        {row[1].strip(): float(row[column].strip().strip("*")) for row in rows[1:]} for column in (5, 6, 7, 11, 12)
    )
    assert all(ratio[layout] <= with_calls[layout] for layout in ratio)
    # A quarter of the state are gradients: stage 1 reads and writes them once, the others weights, too.
    assert moved["zero1"] == pytest.approx(2 * state["zero2"] / 2, abs=0.1)
    assert moved["zero3"] > moved["zero2"] > moved["zero1"]
    assert kept_bytes["zero2"] > kept_bytes["zero3"] > 0, "stage 2 keeps gathered weights"
    assert kept_bytes["tp2 without sequence parallel"] > kept_bytes["tp2"]
    assert state["zero1"] > state["zero2"] == state["zero3"], "stage 1 has whole weights"


packing: Any = load_script("packing")


def test_memory_does_not_grow_with_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty shards of an index of 0.3 MB as they are in memory when they are read, 5.6 MB together."""
    for name, value in {
        "corpus.index_cache.INDEX_CACHE_BYTES": 2**17,
        "data.packing_plan.SAMPLES_AT_ONCE": 2**12,
    }.items():
        monkeypatch.setattr(f"megatfm.{name}", value)
    monkeypatch.setattr(packing, "SHARD_DOCUMENTS", 10_000)
    packing.write_corpus(tmp_path, 200_000)
    Corpus.open(tmp_path)  # what is imported and cached meanwhile doesn't count
    tracemalloc.start()
    corpus = Corpus.open(tmp_path)
    opened, at_opening = tracemalloc.get_traced_memory()
    peaks = []
    for max_tokens in (None, 2047):
        tracemalloc.reset_peak()
        planned = build_packing_plan(corpus, packing.ObjectiveStub(max_tokens), [2048], 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert corpus.n_samples == 200_000
    assert planned.sizes.sum() > 200_000 * 300 / 2048
    assert opened < 0.25e6
    assert max(at_opening, *peaks) < 1.5e6


# ----------------------------------------------------------------------------------------- what scripts share


@pytest.fixture(scope="module")
def common() -> Any:
    return load_script("common")


def test_sides_take_turns_and_theirs_is_divided_by_ours(common: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def step(side: str, seconds: float) -> None:
        order.append(side)
        now[0] += seconds

    monkeypatch.setattr(common, "CLOCKS", {"wall": lambda: now[0]})
    sides = [common.make_side(lambda: step("ours", 2.0)), common.make_side(lambda: step("theirs", 3.0))]
    ratios = common.compare(*sides, 3)
    assert order == [
        "ours", "ours", "theirs", "theirs", *("theirs", "ours"), *("ours", "theirs"), *("theirs", "ours"),
    ]  # fmt: skip
    assert ratios == {"wall": [1.5, 1.5, 1.5]}


def test_a_summary_is_the_median_with_both_ends_and_a_ratio_the_median_within_rounds(common: Any) -> None:
    summary = common.summarize({"wall": [1.0, 4.0, 2.0]})
    assert summary == {"wall": 2.0, "wall_lowest": 1.0, "wall_highest": 4.0}
    over, under = [1.0, 20.0, 30.0], [1.0, 2.0, 100.0]
    assert common.compute_median_ratio(over, under) == 1.0
    assert statistics.median(over) / statistics.median(under) == 10.0
    with pytest.raises(ValueError, match="shorter"):
        common.compute_median_ratio(over, under[:2])


def test_every_item_has_its_turn_in_every_round(common: Any) -> None:
    items = "abcde"
    assert "".join(common.alternate_order(items, 1)) == items == "".join(common.alternate_order(items, 2)[::-1])
    orders = {"".join(common.shuffle_order(items, number)) for number in range(20)}
    assert len(orders) > 10
    assert all(sorted(order) == list(items) for order in orders)
    assert common.shuffle_order(items, 3) == common.shuffle_order(items, 3)


def test_a_page_is_written_anew_with_each_row(common: Any, tmp_path: Path) -> None:
    path = common.make_dated_path(common.make_output_folder(str(tmp_path / "a/b")), "x.md")
    page = common.Page(path, "Title", "Of two lines,", "with a table.", table="| a | b |")
    assert not path.exists(), "nothing was measured"
    page.add("| one | 1 |")
    page.add("| two | 2 |", "| drei ÷ | 3 |")
    head = f"# Title, {common.today()}\n\nOf two lines,\nwith a table.\n\n| a | b |\n|---|---|\n"
    assert path.read_text(encoding="utf-8") == f"{head}| one | 1 |\n| two | 2 |\n| drei ÷ | 3 |\n"
    page.add(table="| c |")
    assert path.read_text(encoding="utf-8").endswith("| drei ÷ | 3 |\n\n| c |\n|---|\n")
    assert path.name == f"{common.today()}-x.md"
    common.write_json(common.make_output_file(str(tmp_path / "c/d.json")), {"a": [1]})
    assert json.loads((tmp_path / "c/d.json").read_text(encoding="utf-8")) == {"a": [1]}
    assert common.make_dated_path(None, "x.md") is None
    common.write_text(None, "is not written")


def test_peak_memory_can_be_reset(common: Any) -> None:
    size = 64 * 2**20
    with mmap.mmap(-1, size) as block:  # the allocator may have such a block at hand
        block.write(bytes(size))
    before = common.read_memory("VmHWM")
    common.reset_peak_memory()
    now = common.read_memory("VmRSS")
    assert common.read_memory("VmHWM") <= before
    with mmap.mmap(-1, size) as block:
        for start in range(0, size, 4096):
            block[start] = 1
        assert common.read_memory("VmHWM") - now > 0.9 * size
        assert 0 < common.read_memory("Pss", "smaps_rollup") <= common.read_memory("VmRSS") + 2**20


def test_common_needs_python_alone() -> None:
    """`make gpu` imports it where nothing is installed, and others time what they import."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import common; print(common.get_cpu_name())"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


# ----------------------------------------------------------------------------------------- make gpu, on a CPU


def rows(result: Path) -> list[list[str]]:
    lines = result.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]


def decoders(folder: Path) -> None:
    module = load_script("gpu_training")
    words = ["steps", "--tiny", "--case", "124m", "--steps", "1", "--out", str(folder)]
    assert module.common.run_part(module.__doc__, module.PARTS, words) == 0


def test_decoders_write_a_dated_result(workers: Workers, tmp_path: Path) -> None:
    workers.run(decoders, 1, tmp_path)
    (result,) = tmp_path.glob("*-gpu-124m.md")
    head, *cases = rows(result)
    assert [row[4] for row in cases] == ["", "packed"]
    for row in cases:
        cells = dict(zip(head, row, strict=True))
        assert (cells["Model"], cells["Tokens a row"], cells["Rows"]) == ("gpt2-124m", "64", "2")
        assert float(cells["Tokens a second"].replace(",", "")) > 0
        assert float(cells["Peak memory, GB"]) > 0
        assert row[-2:] == ["–", "–"]


def test_cases_are_of_the_sizes_that_they_claim() -> None:
    module = load_script("gpu_training")
    counts = {}
    for title, cases in module.CASES.items():
        for case in cases:
            config = module.load_case(case, tiny=False)
            with torch.device("meta"):
                model = build(config.model)
            counts.setdefault(title, set()).add(sum(p.numel() for p in model.parameters()))
            assert config.train.compile is not case.eager
            assert config.model.dropout == config.model.attention.dropout == 0
    assert counts["124m"] == {124_439_808}
    assert counts["350m"] == {354_823_168}
    assert counts["1.3b"] == {1_315_723_264}
    assert counts["6.7b"] == {6_658_404_352}


def test_facts_are_written_and_a_missing_kernel_is_named(tmp_path: Path) -> None:
    module = load_script("gpu_facts")
    assert module.common.run_script(None, module.main, ["--tiny", "--out", str(tmp_path)]) == 0
    (result,) = tmp_path.glob("*-gpu-facts.md")
    kernels = {tuple(row[:2]): row[2:] for row in rows(result) if len(row) == 6}
    speed, _, finite, error = kernels["tiny, 1 documents a row", "flash"]
    assert finite == "yes"
    assert float(speed) >= 0
    assert float(error) < 1e-2
    assert kernels["tiny, 1 documents a row", "varlen"][0].startswith("NotImplementedError")


def test_a_kernel_that_gives_no_numbers_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load_script("gpu_facts")
    exact = module.KERNELS["flash"]
    monkeypatch.setitem(module.KERNELS, "flash", lambda *inputs: exact(*inputs) * float("nan"))
    assert module.common.run_script(None, module.main, ["--tiny", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_stopped_and_resumed(tmp_path: Path) -> None:
    module = load_script("gpu_training")
    words = ["run", "--tiny", "--steps", "12", "--out", str(tmp_path)]
    assert module.common.run_part(module.__doc__, module.PARTS, words) == 0
    (result,) = tmp_path.glob("*-gpu-run.md")
    outcomes = {row[0]: row[2] for row in rows(result)}
    assert outcomes["losses and norms, to the bit"] == "all 12 alike"
    assert outcomes["train: stopped"] == "exit 75"
    assert outcomes["generate"] == "exit 0"


def test_missing_packages_are_found_with_their_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_script("gpu")
    assert module.find_missing(["pytest>=8", "torch>=99", "nvidia-cublas"]) == []
    assert module.find_missing(["pytest>=99", "no-such-package>=1"]) == ["no-such-package>=1", "pytest>=99"]
    real_distribution = metadata.distribution

    def without_pluggy(name: str) -> metadata.Distribution:
        if name == "pluggy":
            raise metadata.PackageNotFoundError(name)
        return real_distribution(name)

    monkeypatch.setattr(metadata, "distribution", without_pluggy)
    (needed,) = module.find_missing(["pytest"])
    assert needed.startswith("pluggy")
