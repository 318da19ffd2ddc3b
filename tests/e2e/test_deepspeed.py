"""Runs under DeepSpeed: they train as native does, resume to the bit, and go on under native, whose runs go on here.

What is promised of runs that meet trouble holds here, too; `test_leftovers.py` kills some of these at any moment. A run
goes on from a universal checkpoint that DeepSpeed wrote of a model of transformers.
"""

import argparse
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatfm import checkpoint
from megatfm.config import Config, load_config, load_section
from megatfm.convert.convert import convert
from megatfm.convert.deepspeed_universal import UniversalFolder, from_universal
from megatfm.convert.weight_mapping import to_hf
from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, UsageError
from megatfm.launchers.local import find_free_port
from megatfm.train.run import train
from megatfm.verify.rank_processes import RankPool
from megatfm.verify.shrink import draw_batch, shrink
from tests.support.forked_commands import keep_last_override, run_command
from tests.support.rank_processes import Fault, Start
from tests.support.training_runs import (
    delete_checkpoints_after,
    have_same_tensors,
    losses,
    run_events,
    run_training,
    stored_weights,
    train_until,
    train_with_bit_flip,
    train_with_faults,
    training_curve,
)
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)
MakeConfig = Callable[..., Config]
BASE = ["optimizer.name=adamw", "train.steps=4", "evaluate.every=2", "checkpoint.every=2"]
NATIVE = [*BASE, "parallel.zero=3"]


def deepspeed(*more: str) -> list[str]:
    return list(map(str, keep_last_override([*BASE, "parallel.engine=deepspeed", *more])))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / "checkpoints/step-00000004")


def forget_the_end(folder: Path) -> None:
    (folder / "checkpoints/step-00000004").rename(folder / f"later {len(list(folder.iterdir()))}")


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not name.startswith("rng.") and not torch.equal(first[name], second[name])]


def test_deepspeed_trains_as_native_and_engines_can_change(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    def run(name: str, ranks: int, overrides: list[Any]) -> None:
        assert workers.run(train, ranks, make_config(*overrides, run=name), timeout=200) == [EXIT_OK] * ranks

    native, actual = tmp_path / "native", tmp_path / "deepspeed"
    run("native", 2, NATIVE)
    expected, full = losses(native), state(native)
    run("deepspeed", 2, deepspeed("parallel.zero=3"))
    assert losses(actual) == pytest.approx(expected, rel=1e-5)
    end = state(actual)
    assert end.keys() == full.keys()
    forget_the_end(actual)
    run("deepspeed", 2, deepspeed("parallel.zero=3"))
    assert differing(end, state(actual)) == [], "a resume on the same layout is the same run to the bit"
    forget_the_end(actual)
    run("deepspeed", 1, NATIVE)
    assert losses(actual) == pytest.approx(expected, rel=1e-5)
    forget_the_end(native)
    run("native", 2, deepspeed("parallel.zero=2"))
    assert losses(native) == pytest.approx(expected, rel=1e-5)


def test_stages_stopped_by_a_signal_are_the_run_never_stopped(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    words = deepspeed("parallel.pp=2", "parallel.zero=1", "train.recompute=selective", "checkpoint.every=4")
    assert workers.run(run_training, 2, make_config(*words, run="whole"), timeout=200) == [EXIT_OK] * 2
    config = make_config(*words, run="stopped")
    assert workers.run(train_until, 2, config, 2, signal.SIGUSR1, timeout=200) == [EXIT_REQUEUE] * 2
    assert workers.run(run_training, 2, config, timeout=200) == [EXIT_OK] * 2
    assert training_curve(tmp_path / "stopped") == training_curve(tmp_path / "whole")
    assert have_same_tensors(state(tmp_path / "stopped"), state(tmp_path / "whole")), "random states and all"


TROUBLE = [
    *("train.steps=12", "evaluate.every=0", "checkpoint.every=4", "checkpoint.keep=9", "parallel.zero=2",
      "parallel.dp_shard=2"),
    *("resilience.spike=rollback", "resilience.spike_window=16"),
]  # fmt: skip


def test_skipped_steps_and_rollbacks_under_deepspeed(workers: Workers, make_config: MakeConfig, tmp_path: Path) -> None:
    """Steps that are not finite are skipped, spikes are rolled back, and a resume repeats both."""
    words = deepspeed(*TROUBLE)
    keys = [read for _, read in workers.run(train_with_faults, 2, make_config(*words, "train.steps=14", run="whole"))]
    faults = {rank[5]: "inf" for rank in keys} | {rank[9]: "spike" for rank in keys}
    config, run = make_config(*words), tmp_path / "run"
    for (code, read), rank in zip(workers.run(train_with_faults, 2, config, faults), keys, strict=True):
        assert code == EXIT_OK
        assert read == rank[:10] + rank[10:14], "back to step 8, and on after the data of the spike"
    assert [line["step"] for line in training_curve(run) if line.get("skipped")] == [6]
    assert [step for step, _ in run_events(run, "rolled back")] == [10]
    before, last = training_curve(run), stored_weights(run, 12)
    delete_checkpoints_after(run, 4)
    for (code, read), rank in zip(workers.run(train_with_faults, 2, config), keys, strict=True):
        assert (code, read) == (EXIT_OK, rank[4:8] + rank[10:14])
    assert training_curve(run) == before
    assert have_same_tensors(stored_weights(run, 12), last)


def test_a_step_computed_twice_that_differs_in_one_bit_is_found(workers: Workers, make_config: MakeConfig) -> None:
    config = make_config(
        *deepspeed("train.steps=4", "resilience.replay_every=3", "parallel.dp_shard=2", "evaluate.every=0")
    )
    errors = workers.run(train_with_bit_flip, 2, config, "gradient", 1, 3)
    assert len(set(errors)) == 1
    assert re.match(r"step 3, computed twice, differs: rank 1 on \S+: \S*\.wo\.weight\. A", errors[0]), errors[0]


@pytest.mark.parametrize(("how", "reason", "patience"), [
    ("is_killed", "ended without an error message", 600),
    pytest.param("sleeps", r"has made no progress for \d+ s", 20, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_dies_or_hangs_is_named(start: Start, how: str, reason: str, patience: int) -> None:
    """Hangs are detected without the engine: see tests/e2e/test_resilience.py."""
    words = deepspeed("parallel.zero=3", f"train.hang_seconds={patience}")
    run = start(*words, fault=Fault(1, "step", how))
    codes = run.wait(120)
    assert codes[0] == EXIT_FAILED, (how, codes, run.said(0))
    assert re.search(rf"error: rank 1 on \S+ at step \d, step: {reason}", run.said(0)), run.said(0)
    (failed,) = [event for event in run.events() if event["event"] == "failed"]
    assert failed["ranks"] == [1]


@pytest.mark.slow  # that it goes in and out of checkpoints to the bit is in tests/parity
def test_a_killed_run_with_state_in_files_resumes(
    start: Start, workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The run goes on to the bit, and under the native engine."""
    (disk := tmp_path / "disk").mkdir()
    words = deepspeed(
        *("parallel.zero=3", "deepspeed.offload_optimizer=nvme", "deepspeed.offload_parameters=nvme"),
        *(f"deepspeed.nvme_path={disk}", "model.d_model=512", "model.ffn.d_ff=2048", "model.n_layers=1"),
    )
    assert start(*words, run="whole").wait(200) == [EXIT_OK] * 2
    killed = start(*words, fault=Fault(-1, "second save", "is_killed"))
    assert killed.wait(200) == [-signal.SIGKILL] * 2
    left = set(disk.glob(".megatfm-offload-*/*-*/"))
    assert left, "they had no time to tidy up"
    assert (tmp_path / "run/checkpoints/step-00000002").exists()
    assert start(*words).wait(200) == [EXIT_OK] * 2
    assert left.isdisjoint(disk.glob(".megatfm-offload-*/*-*/")), "what the killed left"
    assert have_same_tensors(state(tmp_path / "run"), state(tmp_path / "whole"))
    forget_the_end(tmp_path / "run")
    native = [word for word in words if not word.startswith(("parallel.engine", "deepspeed."))]
    assert workers.run(train, 2, make_config(*native, run="run"), timeout=200) == [EXIT_OK] * 2
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow  # what it compares is in tests/parity
def test_verify_compares_a_step_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer.name=adamw", "parallel.zero=2", "parallel.dp_shard=2", "--engine", "deepspeed"]
    assert run_command("verify", "quickstart", *words) == EXIT_OK
    assert "ZeRO 2, deepspeed in fp32" in capsys.readouterr().out


@pytest.mark.extended  # tests/unit/verify/test_verify.py has the size of the buckets
def test_a_verified_step_fills_no_bucket_of_gigabytes() -> None:
    words = ["optimizer.name=adamw", "parallel.zero=2", "parallel.dp_shard=1", "parallel.engine=deepspeed"]
    config, _ = shrink(load_config("quickstart", words))
    with RankPool() as pool:
        pool.step(config, draw_batch(config))
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pool.pids[0]}/status").read_text(), re.MULTILINE)
    assert int(peak) < 1.5 * 2**20, "with libraries, half a gigabyte"


@pytest.mark.extended  # it sets the variables that torchrun sets, which tests/unit/parallel/test_distributed.py has
@pytest.mark.timeout(900)  # three processes import torch; on a busy machine
def test_training_runs_under_deepspeed_s_own_launcher(config_file: Path, tmp_path: Path) -> None:
    launcher = [Path(sys.executable).with_name("deepspeed"), "--no_local_rank", "--num_gpus=1"]
    words = deepspeed("parallel.zero=2", "train.steps=2", "evaluate.every=0", f"run_dir={tmp_path / 'run'}")
    completed = subprocess.run(
        [*launcher, f"--master_port={find_free_port()}", "--module", "megatfm", "train", config_file, *words],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-2000:]
    assert len(losses(tmp_path / "run")) == 2


TINY = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
UNIVERSAL_STEPS = 3


def train_by_deepspeed(folder: Path, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Three steps under DeepSpeed alone; the universal checkpoint is in folder/universal. Its own word for what it
    holds: key → name → tensor."""
    from megatfm.engines.deepspeed.internals import ignore_warnings
    from megatfm.engines.deepspeed.library import import_deepspeed as deepspeed

    model = LlamaForCausalLM(TINY)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "hf")
    package = deepspeed(torch.device("cpu"))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    with ignore_warnings():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = package.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(UNIVERSAL_STEPS):
            tokens = torch.randint(512, (1, 24))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(str(folder / "theirs"), tag="global_step3")
        utils = importlib.import_module("deepspeed.utils")
        state = utils.safe_get_full_optimizer_state
        actual = {
            "fp32": {n: utils.safe_get_full_fp32_param(p) for n, p in model.named_parameters()},
            **{key: {n: state(p, key) for n, p in model.named_parameters()} for key in ("exp_avg", "exp_avg_sq")},
        }  # fmt: skip
        if dist.get_rank() == 0:
            tool = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
            tool.main(
                argparse.Namespace(input_folder=str(folder / "theirs/global_step3"),
                                   output_folder=str(folder / "universal"), num_extract_workers=1,
                                   num_merge_workers=1, keep_temp_folder=False, strict=True,
                                   inject_missing_state=True),
            )  # fmt: skip
        engine.destroy()
    return actual


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_weights_and_adam_s_state_go_over_to_the_bit(
    workers: Workers, corpus: Path, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on with them."""
    expected, *_ = workers.run(train_by_deepspeed, 2, tmp_path, stage, timeout=250)
    source, like, actual = tmp_path / "universal", tmp_path / "hf", tmp_path / "ours"
    assert run_command("convert", str(source), str(actual), "--to", "megatfm", "--hf-config", str(like)) == 0
    assert "with Adam's state of step 3" in capsys.readouterr().out
    stored = checkpoint.read_tensors(actual / f"checkpoints/step-{UNIVERSAL_STEPS:08d}")
    mappings = UniversalFolder(source, like).mappings
    for key, tensor in expected.items():
        prefix, suffix = ("model.", "") if key == "fp32" else ("optimizer.", f".{key}")
        weights = {n: stored[f"{prefix}{n}{suffix}"] for mapping in mappings for n in mapping.megatfm}
        back = to_hf(mappings, weights)
        assert back.keys() == tensor.keys()
        assert [name for name in tensor if not torch.equal(back[name], tensor[name])] == []
    assert {t.item() for name, t in stored.items() if name.endswith(".step")} == {float(UNIVERSAL_STEPS)}
    convert(actual, tmp_path / "again", "hf")
    converted = LlamaForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert [n for n, t in expected["fp32"].items() if not torch.equal(converted[n], t)] == []

    config = load_section(
        Config,
        actual / "config.toml",
        [
            f"run_dir={tmp_path / 'run'}",
            f"data.train={corpus / 'train'}",
            f"data.tokenizer={corpus / 'tokenizer.model'}",
            *("data.sequence_length=32", "train.steps=4", "train.global_batch=4", "train.precision=fp32"),
            *("lr_schedule.warmup_steps=1", "log.sinks=[]", "parallel.engine=deepspeed", f"parallel.zero={stage}"),
        ],
    )
    assert workers.run(train, 2, config, timeout=200) == [EXIT_OK] * 2
    after = checkpoint.read_tensors(tmp_path / f"run/checkpoints/step-{UNIVERSAL_STEPS + 1:08d}")
    assert {t.item() for name, t in after.items() if name.endswith(".step")} == {float(UNIVERSAL_STEPS + 1)}


def test_a_folder_that_is_no_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ds_to_universal --input_folder \S+/global_stepN"):
        from_universal(tmp_path, tmp_path / "new", tmp_path)
