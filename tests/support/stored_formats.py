"""Record what this version stores: resolved configs, and a run of a few steps with its corpus. Run once for a format.

`python -m tests.support.stored_formats FOLDER` writes a new folder into `tests/golden/stored`; an old one is never
written anew, since its whole purpose is to be what an earlier version left (`test_stored.py` reads all of them).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from megatfm import data_prep
from megatfm.config import Config, load_config, load_section
from megatfm.config.prep import PrepConfig
from megatfm.train.run import train

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

[model]
d_model = 8
n_layers = 1

[model.attention]
n_heads = 2

[model.ffn]
name = "moe"
d_ff = 8
n_experts = 4
top_k = 2

[data]
train = "corpus/train"
tokenizer = "corpus"
sequence_length = 32

[optimizer]
name = "adamw"
lr = 1e-2
max_grad_norm = 0.5

[lr_schedule]
warmup_steps = 1

[train]
steps = 4
global_batch = 4
micro_batch = 2
precision = "fp64"
device = "cpu"

[checkpoint]
every = 2

[evaluate]
every = 0

[log]
every = 1
sinks = []
"""
PREP = """
out = "{folder}/corpus"

[read]
folder = "{folder}/texts"

[split]
validation = 0.3

[tokenizer]
kind = "byte-bpe"
vocab_size = 320
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
