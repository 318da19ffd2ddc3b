"""Prompts that are continued while a run trains: what `megatfm generate` makes of the checkpoint, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config
from megatfm.errors import EXIT_OK, UsageError
from megatfm.inference.decoding import Sampling
from megatfm.inference.samples import PromptSampler
from megatfm.inference.text import generate_text, load
from megatfm.train.trainer import train
from tests.support.workers import WorkerFailure, Workers

PROMPTS = ["import ", "", "Größe 東京\n"]
SHORT = (
    "train.steps=2", "evaluate.every=1", "evaluate.max_rows=4", "checkpoint.every=1", "train.precision=fp64",
    f"evaluate.sample_prompts={json.dumps(PROMPTS)}", "evaluate.sample_tokens=9",
)  # fmt: skip
SEQ2SEQ = ("model.family=encoder_decoder", "objective.name=span_corruption", "data.target_length=64")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "zero3 of an encoder-decoder": (3, ("train.global_batch=6", *SEQ2SEQ)),
    "tp x dp": (4, ("parallel.tp=2", "parallel.sequence_parallel=false", "parallel.dp_shard=2", "parallel.zero=1")),
    "experts": (2, ("model.ffn={name='moe', n_experts=4, top_k=2, d_ff=32}", "parallel.ep=2", "parallel.dp_shard=2")),
    "averaged weights": (2, ("optimizer={name='schedule_free_adamw', lr=1e-2}", "lr_schedule.name=constant")),
}  # fmt: skip


def run_training(config: Config) -> int:
    return train(config, sampler=PromptSampler())


def samples(run: Path) -> dict[int, list[dict[str, str]]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["samples"] for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_what_generate_makes_of_the_checkpoint(
    workers: Workers, make_config: Any, tmp_path: Path, layout: str
) -> None:
    ranks, settings = LAYOUTS[layout]
    config = make_config(*SHORT, *settings, run="run")
    assert workers.run(run_training, ranks, config) == [EXIT_OK] * ranks
    actual = samples(tmp_path / "run")
    assert list(actual) == [1, 2]
    for step, texts in actual.items():
        loaded = load(tmp_path / f"run/checkpoints/step-{step:08d}", dtype="float64")
        sampling = Sampling(0.8, top_p=0.95, vocab_size=loaded.tokenizer.vocab_size)
        expected = [generate_text(loaded, prompt, sampling, 9, 1)[0] for prompt in PROMPTS]
        assert texts == [
            {"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, expected, strict=True)
        ]
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert f"step 2  sample: {repr(PROMPTS[0] + actual[2][0]['text'])[1:-1]}" in log


def test_sampling_does_not_touch_the_run(workers: Workers, make_config: Any, tmp_path: Path) -> None:
    dropout = (
        "model.dropout=0.1",
        "optimizer={name='schedule_free_adamw', lr=1e-2}",
        "lr_schedule.name=constant",
    )
    workers.run(run_training, 1, make_config(*SHORT, *dropout, run="with"))
    workers.run(run_training, 1, make_config(*SHORT, *dropout, "evaluate.sample_prompts=[]", run="without"))
    curves = []
    for name in ("with", "without"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        curves.append([(json.loads(line)["loss"], json.loads(line)["evaluation"]) for line in lines])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.position={name='learned', max_positions=64}",), r"sample_tokens = 64: the prompt 'import ' has"),
        (("model.family=encoder", "objective.name=masked"), r"model\.family = 'encoder' makes no text"),
    ],
)  # fmt: skip
def test_prompts_that_can_not_be_continued_are_refused_before_the_first_step(
    workers: Workers, make_config: Any, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    config = make_config(*SHORT, *settings, "evaluate.sample_tokens=64", run="run")
    with pytest.raises(WorkerFailure, match=message):
        workers.run(run_training, 2, config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        (("parallel.pp=2",), r"parallel\.pp = 2 .*set parallel\.pp = 1"),
        (("parallel.cp=2",), r"parallel\.cp = 2 .*set parallel\.cp = 1"),
        (("parallel.tp=2",), r"parallel\.tp = 2 .*set parallel\.sequence_parallel = false"),
        (("train.precision=fp8",), r"train\.precision = 'fp8' .*set train\.precision = 'bf16'"),
    ],
)
def test_layouts_that_can_not_generate_are_refused_by_name(
    make_config: Any, settings: tuple[str, ...], instead: str
) -> None:
    with pytest.raises(UsageError, match=rf"evaluate\.sample_prompts has 1, and with {instead}"):
        make_config("evaluate.sample_prompts=['x']", *settings, run="run")


def test_an_engine_that_can_not_generate_is_refused_by_name(workers: Workers, make_config: Any) -> None:
    config = make_config(
        "evaluate.sample_prompts=['x']",
        "parallel.engine=deepspeed",
        "parallel.zero=2",
        "optimizer.name=adamw",
        run="run",
    )
    with pytest.raises(
        WorkerFailure, match=r"evaluate\.sample_prompts: parallel\.engine = 'deepspeed' does not"
    ):
        workers.run(run_training, 2, config)
