"""Files of earlier versions open and resume: configs of every part, and a run with its corpus.

A red test here after a key was renamed wants a row in `megatfm/config/key_migrations.py`; after a default, a preset's
recipe or an order was changed, that users' runs of before are refused, which wants a good reason or a row there, too.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatfm
from megatfm.config import Config, load_config
from megatfm.config.key_migrations import REMOVED_KEYS, RENAMED_VALUES, migrate
from megatfm.errors import EXIT_OK
from megatfm.train import compatibility, resume
from megatfm.train.run import train
from tests.support.golden_curves import TOLERANCE
from tests.support.stored_formats import FOLDER, PRESETS, list_variants, stored_config
from tests.support.workers import Workers

CONFIGS = sorted(FOLDER.glob("*/configs/*.json"))
RUNS = sorted(FOLDER.glob("*/run"))


def leaves(value: Any) -> Iterator[str]:
    """Every value that a config sets, wherever it stands."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield json.dumps(value)


def facts(config: dict[str, Any]) -> dict[str, Any]:
    numbers = {"step": 1, "tokens": 1, "precision": "fp32", "data": {"position": 1}}
    return {**numbers, "config": config}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_stored_config_keeps_its_values(path: Path) -> None:
    """A stored config is that of the same recipe today."""
    stored = json.loads(path.read_text())
    opened = Config.model_validate(migrate(stored)).model_dump(mode="json")
    translated = {json.dumps(old) for _, old, _ in RENAMED_VALUES}
    stored_values = Counter(leaves(stored)) - Counter(json.dumps(value) for _, value in REMOVED_KEYS)
    assert not {value for value in stored_values - Counter(leaves(opened)) if value not in translated}
    preset, _, variant = path.stem.partition("+")
    today = stored_config(preset, list_variants()[variant] if variant else [])
    resume_point = resume.ResumePoint(path, facts(stored))
    assert compatibility.check_compatible(resume_point, facts(today), []) == []


def test_every_part_is_among_them() -> None:
    assert {path.stem for path in CONFIGS} >= {*PRESETS, *(f"quickstart+{name}" for name in list_variants())}


def go_on(folder: Path, corpus: Path) -> int:
    config = load_config(folder, [f"run_dir={folder}", f"data.corpus={corpus}"])
    return train(config)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.parent.name)
def test_a_stored_run_resumes_and_its_weights_open(workers: Workers, run: Path, tmp_path: Path) -> None:
    for name in ("run", "corpus"):  # the tree of the repository stays as it is
        shutil.copytree(run.parent / name, tmp_path / name)
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert workers.run(go_on, 1, tmp_path / "run", tmp_path / "corpus") == [EXIT_OK]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert "resumed" in [event["event"] for event in events]
    resumed = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr"):
        for was, now in zip(recorded, resumed, strict=True):
            assert math.isclose(was[key], now[key], rel_tol=TOLERANCE), (was["step"], key)
    assert sum(p.numel() for p in megatfm.load(run).module.parameters()) > 0
