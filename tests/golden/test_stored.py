"""Files of earlier versions open and resume: configs of every part, and a run with its corpus.

A red test here after a key was renamed wants a row in `megatfm/config/key_migrations.py`; after a default, a preset's
recipe or an order was changed, that users' runs of before are refused, which wants a good reason or a row there, too.
"""

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatfm
from megatfm import data_prep
from megatfm.config import Config, load_config, load_section
from megatfm.config.key_migrations import REMOVED_KEYS, RENAMED_VALUES, migrate
from megatfm.config.prep import PrepConfig
from megatfm.errors import EXIT_OK
from megatfm.train import compatibility, resume
from megatfm.train.run import train
from tests.support.files import read_lines
from tests.support.golden_curves import TOLERANCE
from tests.support.workers import Workers

FOLDER = Path(__file__).parents[1] / "golden" / "stored"
PRESETS = (
    "albert-base", "bert-base", "bigbird-base", "deberta-v3-base", "deepseek-v3", "electra-small", "gemma2-2b",
    "gemma3-1b", "gpt-oss-20b", "gpt2-124m", "longformer-base", "mla-1b", "modernbert-base", "olmoe-1b-7b",
    "prefix-lm-base", "qwen3-30b-a3b", "spanbert-base", "switch-base-8", "t-dmca-moe", "t5-v1.1-base",
    "transformer-base", "xlnet-base",
)  # fmt: skip
"""Presets that together have every kind of part."""

RUN = """
name = "stored"
data = { train = "corpus/train", tokenizer = "corpus", sequence_length = 32 }
optimizer = { name = "adamw", lr = 1e-2, max_grad_norm = 0.5 }
lr_schedule = { warmup_steps = 1 }
train = { steps = 4, global_batch = 4, micro_batch = 2, precision = "fp64", device = "cpu" }
checkpoint = { every = 2 }
evaluate = { every = 0 }
log = { every = 1, sinks = [] }
[model]
d_model = 8
n_layers = 1
attention = { n_heads = 2 }
ffn = { name = "moe", d_ff = 8, n_experts = 4, top_k = 2 }
"""
PREP = """
out = "{folder}/corpus"
read = {{ folder = "{folder}/texts" }}
split = {{ validation = 0.3 }}
tokenizer = {{ kind = "byte-bpe", vocab_size = 320 }}
"""


def list_variants() -> dict[str, list[str]]:
    """Overrides of quickstart: every optimizer and schedule, and keys that presets leave out."""
    common = ["optimizer.max_grad_norm=0.7", "train.seed=3"]
    return {
        "adafactor-linear": ["optimizer={name='adafactor',lr=0.01}", "lr_schedule.name=linear", *common],
        "adamw-bf16-moments": [
            "optimizer={name='adamw',lr=0.01,moments_dtype='bf16'}", "lr_schedule.name=wsd", *common,
        ],
        "lamb-inverse-sqrt": ["optimizer={name='lamb',lr=0.01}", "lr_schedule.name=inverse_sqrt", *common],
        "lion": ["optimizer={name='lion',lr=0.01}", "lr_schedule.name=constant", *common],
        "schedule-free": ["optimizer={name='schedule_free_adamw',lr=0.01}", "lr_schedule.name=constant", *common],
        "soap": ["optimizer={name='soap',lr=0.01,precondition_frequency=7,max_precond_dim=512}", *common],
        "layout": [
            "parallel={pp=2,tp=2,dp_shard=2,pp_schedule='interleaved',virtual_stages=2,cp_method='ulysses',"
            "grad_accumulation='unsharded'}",
            "checkpoint={every=5,keep=2,verify_after_write=false}", "log={layer_stats_every=5,sinks=[]}",
            "data.read_streams=8", "data.rampup=[{steps=3,global_batch=32}]", "resume.allow=['seed']", *common,
        ],
        "mixture": [
            "data.train=", "data.mixture={code={path='/corpora/code',weight=2},prose={path='/corpora/prose',weight=1}}",
            "data.mixture_schedule=[{tokens=100000,weights={code=1,prose=3}}]", "data.mixture_block_rows=64", *common,
        ],
    }  # fmt: skip


def stored_config(preset: str, overrides: list[str]) -> dict[str, Any]:
    """A config as a checkpoint holds it, with paths that are the same on every machine."""
    corpus = "data.corpus=/corpora/mine"
    config = load_config(preset, [corpus, "model.vocab_size=32128", *overrides])
    stored: dict[str, Any] = json.loads(json.dumps(config.model_dump(mode="json")))
    return stored


def write_texts(folder: Path) -> None:
    """Documents that are the same everywhere."""
    folder.mkdir(parents=True)
    for number in range(40):
        words = (f"line {k} of text {number}: {k * number % 7} apples, {k + number} pears.\n" for k in range(12))
        (folder / f"{number}.txt").write_text("".join(words))


def write_stored_formats(target: Path) -> None:
    """Write configs/*.json, corpus/ and run/ with its first checkpoint; paths in them are of no machine."""
    folder = Path("/tmp/recorded")
    (folder / "configs").mkdir(parents=True)
    named = {name: stored_config(name, []) for name in PRESETS}
    named |= {f"quickstart+{name}": stored_config("quickstart", words) for name, words in list_variants().items()}
    for name, config in named.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps(config) + "\n")
    write_texts(folder / "texts")
    for name, text in (("prep.toml", PREP.format(folder=folder)), ("run.toml", RUN)):
        (folder / name).write_text(text)
    data_prep.run(load_section(PrepConfig, folder / "prep.toml"))
    corpus = f"data.corpus={folder / 'corpus'}"
    train(load_section(Config, folder / "run.toml", [f"run_dir={folder / 'run'}", corpus]))
    for name in (
        "texts",
        "run/checkpoints/step-00000004",
        "run/logs",
        "corpus/train/.plans",
        "corpus/validation/.plans",
    ):
        shutil.rmtree(folder / name)
    for name in ("run/lock", "run/environment.json", "corpus/report.html", "prep.toml", "run.toml"):
        (folder / name).unlink()
    shutil.move(folder, target)


if __name__ == "__main__":
    write_stored_formats(FOLDER / sys.argv[1])


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
    recorded = read_lines(run / "metrics.jsonl")
    assert workers.run(go_on, 1, tmp_path / "run", tmp_path / "corpus") == [EXIT_OK]
    events = read_lines(tmp_path / "run/events.jsonl")
    assert "resumed" in [event["event"] for event in events]
    resumed = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr"):
        for was, now in zip(recorded, resumed, strict=True):
            assert math.isclose(was[key], now[key], rel_tol=TOLERANCE), (was["step"], key)
    assert sum(p.numel() for p in megatfm.load(run).module.parameters()) > 0
