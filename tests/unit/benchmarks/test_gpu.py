"""The scripts of `make gpu`, on a CPU with tiny models."""

from importlib import metadata
from pathlib import Path

import pytest
import torch

from megatfm.models import build
from tests.support.benchmark_scripts import script
from tests.support.workers import Workers


def rows(result: Path) -> list[list[str]]:
    lines = result.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]


def decoders(folder: Path) -> None:
    assert script("gpu").main(["--tiny", "--case", "124m", "--steps", "1", "--out", str(folder)]) == 0


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
    module = script("gpu")
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


def test_facts_are_written_and_a_kernel_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert script("gpu_facts").main(["--tiny", "--out", str(tmp_path)]) == 0
    (result,) = tmp_path.glob("*-gpu-facts.md")
    kernels = {tuple(row[:2]): row[2:] for row in rows(result) if len(row) == 6}
    speed, _, finite, error = kernels["tiny, 1 documents a row", "flash"]
    assert finite == "yes"
    assert float(speed) >= 0
    assert float(error) < 1e-2
    assert kernels["tiny, 1 documents a row", "varlen"][0].startswith("NotImplementedError")


def test_a_kernel_that_gives_no_numbers_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script("gpu_facts")
    exact = module.KERNELS["flash"]
    monkeypatch.setitem(module.KERNELS, "flash", lambda *inputs: exact(*inputs) * float("nan"))
    assert module.main(["--tiny", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """The commands that a user types, one process after the other."""
    assert script("gpu_run").main(["--tiny", "--steps", "12", "--out", str(tmp_path)]) == 0
    (result,) = tmp_path.glob("*-gpu-run.md")
    outcomes = {row[0]: row[2] for row in rows(result)}
    assert outcomes["losses and norms, to the bit"] == "all 12 alike"
    assert outcomes["train: stopped"] == "exit 75"
    assert outcomes["generate"] == "exit 0"


def test_what_is_missing_is_found_with_what_that_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("gpu_packages")
    assert module.find_missing(["pytest>=8", "torch>=99", "nvidia-cublas"]) == []
    assert module.find_missing(["pytest>=99", "no-such-package>=1"]) == ["no-such-package>=1", "pytest>=99"]
    there = metadata.distribution

    def without_pluggy(name: str) -> metadata.Distribution:
        if name == "pluggy":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "distribution", without_pluggy)
    (needed,) = module.find_missing(["pytest"])
    assert needed.startswith("pluggy")
