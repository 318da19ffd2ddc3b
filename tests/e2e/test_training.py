"""A run that is stopped, killed or moved to other ranks is the run that was never stopped."""

import gc
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import Config, load_config
from megatfm.errors import EXIT_OK, EXIT_REQUEUE, MegatfmError, UsageError
from megatfm.launchers.status import get_run_status
from megatfm.train.evaluation import Evaluator
from megatfm.train.run import train
from tests.support.files import flip_bit, read_lines
from tests.support.training_runs import (
    assert_bitwise_equal,
    assert_nearly_equal,
    final_state,
    have_same_tensors,
    run_training,
    train_until,
    training_curve,
)
from tests.support.workers import THREADS, WorkerFailure, Workers

PATIENCE = 300.0  # on a busy machine; it takes a tenth

HALF = ["train.micro_batch=2", "train.precision=fp16", "train.recompute=full", "log.layer_stats_every=4"]
SLOW, EXTENDED = pytest.mark.slow, pytest.mark.extended


def stop_and_resume(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path, options: list[str], name: signal.Signals
) -> None:
    """Train two ranks in `stopped`, of which one gets a signal, and go on."""
    config = make_config(*options, run="stopped")
    stopped = workers.run(train_until, 2, config, 5, name, timeout=PATIENCE)
    assert stopped == [EXIT_REQUEUE, EXIT_REQUEUE], "both stop on one rank's signal"
    assert len(training_curve(tmp_path / "stopped")) == 5
    newest = checkpoint.find_latest(tmp_path / "stopped/checkpoints", hashes=True)
    assert newest is not None
    assert newest.name == "step-00000005", "saved where it stopped"
    assert workers.run(run_training, 2, config, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert [line["step"] for line in training_curve(tmp_path / "stopped")] == list(range(1, 9))


@pytest.mark.parametrize(("layout", "name"), [
    (["parallel.dp_shard=2"], signal.SIGTERM),
    # tests/e2e/test_trouble.py has it with an adapter
    pytest.param(["parallel.tp=2"], signal.SIGUSR1, marks=EXTENDED),
    (["parallel.pp=2", "parallel.pp_schedule=zbv", "evaluate.every=0"], signal.SIGUSR1),
    (["parallel.dp_shard=2", "parallel.zero=1", *HALF], signal.SIGINT),
    pytest.param(["parallel.dp_shard=2", "parallel.zero=0"], signal.SIGUSR1, marks=SLOW),
], ids=["zero3 on 2", "tp2", "zbv on 2", "zero1 on 2, float16, recomputed", "zero0 on 2"])  # fmt: skip
def test_stopped_and_resumed_is_bitwise_the_run_never_stopped(workers, make_config, whole_run, tmp_path, layout, name):
    stop_and_resume(workers, make_config, tmp_path, layout, name)
    assert_bitwise_equal(whole_run(2, *layout), tmp_path / "stopped")


def count_collections(config: Config) -> tuple[int, int, bool]:
    """Train with automatic garbage collections on; returns the exit code, the collections, and whether they are on."""
    was_enabled, calls = gc.isenabled(), list[object]()
    gc.enable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc, "collect", lambda *generation: calls.append(generation))
            return train(config), len(calls), gc.isenabled()
    finally:
        if not was_enabled:
            gc.disable()


def test_a_run_collects_garbage_at_its_steps_alone(workers: Workers, make_config: Callable[..., Config]) -> None:
    """After steps 1, 3 and 6 of eight."""
    config = make_config("train.gc_every=3", "evaluate.every=0", "checkpoint.every=8")
    assert workers.run(count_collections, 2, config, timeout=PATIENCE) == [(EXIT_OK, 3, True)] * 2


def train_until_batch(config: Config, batch: int) -> int:
    """Train; before that batch of all evaluations, the last rank alone gets a signal."""
    genuine, seen = Evaluator.evaluate, 0

    def asked(evaluator: Evaluator, step: int, on_batch: Callable[[], None]) -> Any:
        def count() -> None:
            nonlocal seen
            seen += 1
            if seen == batch and dist.get_rank() == dist.get_world_size() - 1:
                signal.raise_signal(signal.SIGUSR1)
            on_batch()

        return genuine(evaluator, step, count)

    with patch.object(Evaluator, "evaluate", asked):
        return train(config)


@pytest.mark.parametrize(("layout", "batches"), [
    (["parallel.dp_shard=2", "train.patience=9"], {2: 4, 1: 4, 6: 8}),
    (["parallel.pp=2", "optimizer.name=schedule_free_adamw", "lr_schedule.name=constant"], {4: 4}),
], ids=["zero3 on 2", "pp2"])  # fmt: skip
def test_a_stop_interrupts_an_evaluation_which_the_next_start_repeats(
    workers: Workers, make_config: Callable[..., Config], whole_run: Callable[..., Path], tmp_path: Path,
    layout: list[str], batches: dict[int, int],
) -> None:  # fmt: skip
    """At the step of a checkpoint, again as soon as it is repeated, and at the last step: batch → step."""
    config, run = make_config(*layout, run="stopped"), tmp_path / "stopped"
    for batch, step in batches.items():
        codes = workers.run(train_until_batch, 2, config, batch, timeout=PATIENCE)
        assert codes == [EXIT_REQUEUE, EXIT_REQUEUE]
        newest = run / f"checkpoints/step-{step:08d}"
        assert checkpoint.find_latest(run / "checkpoints", hashes=True) == newest
        assert checkpoint.read_state(newest)["unevaluated"]["step"] == step
        assert [line["step"] for line in training_curve(run)] == list(range(1, step))
        assert f"step {step}  SIGUSR1 interrupts the evaluation" in (run / "logs/rank-1.log").read_text()
    assert workers.run(run_training, 2, config, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    state = ["momentum_buffer"] if layout[1].startswith("train") else ["z"]
    assert_bitwise_equal(whole_run(2, *layout), run, state)
    for step in {*batches.values(), 8}:
        names = f"checkpoints/step-{step:08d}", ("best", "data", "tokens", "step", "trouble", "unevaluated")
        states = [checkpoint.read_state(folder / names[0]) for folder in (run, whole_run(2, *layout))]
        assert [states[0].get(name) for name in names[1]] == [states[1].get(name) for name in names[1]]


def test_a_branch_of_an_interrupted_evaluation_repeats_it(
    workers: Workers, make_config: Callable[..., Config], whole_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The branch knows the best loss, and leaves the other run's checkpoint as it is."""
    trunk, branch = tmp_path / "trunk", tmp_path / "branch"
    assert workers.run(train_until_batch, 1, make_config("train.patience=9", run="trunk"), 1) == [EXIT_REQUEUE]
    stored = (metadata := trunk / "checkpoints/step-00000004/metadata.json").read_bytes()
    config = make_config("train.patience=9", f"train.branch_from={trunk}@4", run="branch")
    assert workers.run(run_training, 1, config) == [EXIT_OK]
    assert metadata.read_bytes() == stored
    uninterrupted = whole_run(1, "train.patience=9")
    assert training_curve(branch) == training_curve(uninterrupted)[3:]
    ends = [checkpoint.read_state(run / "checkpoints/step-00000008") for run in (branch, uninterrupted)]
    assert ends[0]["best"] == ends[1]["best"]
    assert "unevaluated" not in ends[0]


@pytest.mark.parametrize(("options", "state"), [
    ('name="schedule_free_adamw"', ["z", "trained"]),
    pytest.param('name="adamw", ema_decay=0.8', ["ema", "trained"], marks=EXTENDED),
    ('name="muon", ema_decay=0.8', ["ema", "trained"]),
    pytest.param('name="soap"', ["left_basis", "right_basis"], marks=SLOW),
])  # fmt: skip
def test_optimizers_with_more_to_remember_resume_bitwise(workers, make_config, whole_run, tmp_path, options, state):
    """Evaluations and saves lie in between, at which schedule-free weights are exchanged for their average."""
    optimizer = [f"optimizer={{{options}, lr=3e-3}}", 'lr_schedule={name="constant", warmup_steps=2}']
    stop_and_resume(workers, make_config, tmp_path, optimizer, signal.SIGTERM)
    uninterrupted = whole_run(2, *optimizer)
    assert_bitwise_equal(uninterrupted, tmp_path / "stopped", state)
    losses = [line["loss"] for line in training_curve(uninterrupted)]
    assert losses[-1] < losses[0]


def test_killed_between_checkpoints_resumes_bitwise(workers, make_config, whole_run, tmp_path):
    """A SIGKILL leaves metrics ahead of the last checkpoint, and a half-written save."""
    uninterrupted = whole_run(2, "parallel.dp_shard=2")
    shutil.copytree(uninterrupted, tmp_path / "killed")
    for path in sorted((tmp_path / "killed/checkpoints").iterdir())[1:]:
        path.rename(path.with_name(f".{path.name}.partial-0000"))
    (left,) = (path for path in (tmp_path / "killed/checkpoints").iterdir() if path.name.startswith("step-"))
    assert left.name == "step-00000004"
    config = make_config("parallel.dp_shard=2", run="killed")
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(uninterrupted, tmp_path / "killed")


# A mixture goes on on more ranks in tests/e2e/test_data.py.
@pytest.mark.parametrize(("first", "second"), [(2, 1), pytest.param(1, 2, marks=EXTENDED)])
def test_resumes_on_another_number_of_ranks(workers, make_config, whole_run, tmp_path, first, second):
    """Dropout is drawn by sample and position, not by rank."""
    dropout = ["model.dropout=0.1", "model.attention.dropout=0.1"]
    config = make_config(*dropout, run="moved")
    assert workers.run(train_until, first, config, 5) == [EXIT_REQUEUE] * first
    assert workers.run(run_training, second, config) == [EXIT_OK] * second
    assert_nearly_equal(whole_run(1, *dropout), tmp_path / "moved")


def test_pipeline_ranks_train_like_one_process_and_resume_without_stages(workers, make_config, whole_run, tmp_path):
    config = make_config("parallel.pp=2", "parallel.pp_schedule=interleaved", run="moved")
    assert workers.run(train_until, 2, config, 5, timeout=PATIENCE) == [EXIT_REQUEUE, EXIT_REQUEUE]
    plan = (tmp_path / "moved/plan.txt").read_text(encoding="utf-8")
    assert "mesh  pp 2 × dp_replicate 1 × dp_shard 1 × tp 1" in plan
    assert "pipeline  interleaved, 4 stages on 2 ranks" in plan
    assert "decoder.embedding.tokens.weight" in plan, "the tie, which both ranks hold"
    assert workers.run(run_training, 2, make_config(run="moved"), timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert_nearly_equal(whole_run(1), tmp_path / "moved")


def run_with_another_thread(config: Config) -> int:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return train(config)


def resumes(folder: Path) -> list[str]:
    events = read_lines(folder / "events.jsonl")
    return [event["detail"] for event in events if event["event"] == "resumed"]


def test_a_resume_on_another_kind_of_machine_is_logged(workers, make_config, tmp_path):
    config = make_config("train.steps=3", "evaluate.every=0", run="moved")
    assert workers.run(train_until, 1, config, 1) == [EXIT_REQUEUE]
    assert workers.run(train_until, 1, config, 1) == [EXIT_REQUEUE]
    assert workers.run(run_with_another_thread, 1, config) == [EXIT_OK]
    local, elsewhere = resumes(tmp_path / "moved")
    assert local == "from step-00000001", "the same machine is nothing to talk about"
    assert elsewhere == (
        f"from step-00000002; other hardware or libraries (threads: {THREADS} → {THREADS + 1}): results will "
        "not be bit-identical"
    )
    (kind,) = checkpoint.read_state(tmp_path / "moved/checkpoints/step-00000003")["machines"]["kinds"]
    noted = json.loads((tmp_path / "moved/environment.json").read_text())
    assert kind["threads"] == str(THREADS + 1)
    assert kind.items() <= noted.items()


def test_a_finished_run_does_nothing_more(workers, make_config, whole_run, tmp_path):
    shutil.copytree(whole_run(1), tmp_path / "done")
    assert workers.run(run_training, 1, make_config(run="done")) == [EXIT_OK]
    assert training_curve(tmp_path / "done") == training_curve(whole_run(1))


def error_of(config: Config) -> tuple[str, str]:
    try:
        train(config)
    except MegatfmError as error:
        return type(error).__name__, str(error)
    raise AssertionError("no error")


def errors_of(configs: list[Config]) -> list[tuple[str, str]]:
    return [error_of(config) for config in configs]


def test_a_changed_run_is_refused_with_a_diff_unless_allowed(workers, make_config, whole_run, corpus, tmp_path):
    shutil.copytree(whole_run(1), tmp_path / "run")
    changes = {
        "optimizer": ("optimizer.lr=1e-3", "optimizer.lr: 0.003 → 0.001"),
        "schedule": ("train.steps=9", "train.steps: 8 → 9"),
        "seed": ("train.seed=1", "train.seed: 0 → 1"),
        "model": ("model.norm.eps=1e-4", "model.norm.eps: 1e-05 → 0.0001"),
        "batch": ("train.global_batch=4", "train.global_batch: 8 → 4"),
        "data": (f"data.train={corpus}/validation", "data.fingerprint: "),
    }
    configs = [make_config(override) for override, _ in changes.values()]
    (errors,) = workers.run(errors_of, 1, configs)
    for (group, (_, words)), (kind, message) in zip(changes.items(), errors, strict=True):
        assert kind == UsageError.__name__
        assert words in message
        assert re.search(rf"resume\.allow=([a-z]+,)*{group}(,|$)", message, re.MULTILINE), message
    ((_, message),) = workers.run(error_of, 1, make_config("model.ffn.d_ff=96"))
    assert "model.ffn.d_ff: 64 → 96. Its weights don't fit" in message
    assert "resume.allow=" not in message
    overrides = ["train.steps=9", "optimizer.lr=1e-3"]
    kind, message = workers.run(error_of, 1, make_config(*overrides))[0]
    assert "resume.allow=optimizer,schedule" in message
    allowed = make_config(*overrides, 'resume.allow=["optimizer", "schedule"]')
    assert workers.run(run_training, 1, allowed) == [EXIT_OK]


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(workers, make_config, whole_run, tmp_path):
    shutil.copytree(whole_run(1), tmp_path / "hurt")
    file = next((tmp_path / "hurt/checkpoints/step-00000008").glob("*.safetensors"))
    flip_bit(file, -100)
    assert workers.run(run_training, 1, make_config(run="hurt")) == [EXIT_OK]
    assert "step-00000008 is not used" in (tmp_path / "hurt/logs/rank-0.log").read_text()
    assert have_same_tensors(final_state(whole_run(1)), final_state(tmp_path / "hurt"))


def test_weights_of_another_run_start_a_fresh_one(workers, make_config, tmp_path):
    workers.run(run_training, 2, make_config("parallel.tp=2", "train.steps=4", run="first"))
    still = ["optimizer.lr=1e-12", "optimizer.matrix_lr=1e-12", "train.steps=1", "lr_schedule.warmup_steps=0"]
    config = make_config(f"train.init_from={tmp_path / 'first'}", *still, run="second")
    workers.run(run_training, 1, config)
    old = checkpoint.read_tensors(tmp_path / "first/checkpoints/step-00000004", "model.")
    new = checkpoint.read_tensors(tmp_path / "second/checkpoints/step-00000001", "model.")
    for name, tensor in old.items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1e-9)
    assert training_curve(tmp_path / "second")[0]["step"] == 1


def test_a_run_directory_holds_metrics_config_and_profile(workers, make_config, tmp_path):
    config = make_config("log.profile=2:4", 'log.sinks=["tensorboard"]', "train.steps=6", run="left")
    workers.run(run_training, 1, config)
    run = tmp_path / "left"
    lines = training_curve(run)
    assert set(lines[0]) == {"step", "tokens", "loss", "lr", "grad_norm"}
    assert [line["step"] for line in lines if "evaluation" in line] == [4, 6]
    evaluation = lines[-1]["evaluation"]
    assert set(evaluation) == {"held-out", "again"}
    assert evaluation["held-out"] == evaluation["again"]
    assert Config.model_validate_json(config.model_dump_json()) == config
    trace = json.loads((run / "profile/rank-0-steps-2-4.json").read_text())
    assert any("_ChunkedCrossEntropy" in str(event.get("name")) for event in trace["traceEvents"])
    assert list((run / "tensorboard").iterdir())
    assert "decoder.layers.*.attn.w[qkv]" in (run / "plan.txt").read_text()
    assert "colwise" in (run / "plan.txt").read_text()
    assert (run / "tokenizer.model").read_bytes() == Path(config.data.tokenizer).read_bytes()
    assert "torch" in json.loads((run / "environment.json").read_text())


@pytest.mark.parametrize(("overrides", "ranks", "words"), [
    (["parallel.tp=2"], 1, ["tp 2", "1 process", "start 2"]),
    (["parallel.dp_shard=3"], 2, ["dp_shard 3", "2 processes", "start 3"]),
    (["train.micro_batch=8"], 2, ["train.global_batch = 8", "train.micro_batch = 8 × 2", "16"]),
    (['data.rampup=[{steps=2, global_batch=4}]', "train.global_batch=8", "train.micro_batch=4"], 2,
     ["data.rampup[0].global_batch = 4", "nearest that is one is 8"]),
    (['data.rampup=[{steps=2, global_batch=7}]', "train.global_batch=8", "train.micro_batch=4"], 1,
     ["data.rampup[0].global_batch = 7", "nearest that is one is 8"]),
    (["model.vocab_size=500"], 1, ["vocab_size = 500", "512"]),
    (["data.train=nowhere"], 1, ["nowhere", "megatfm prep"]),
    (["data.tokenizer=nowhere.model"], 1, ["nowhere.model"]),
    (["data.sequence_length=10000000"], 1, ["10000000"]),
    (["plugins=[json]", "model.ffn.activation=swigul"], 2, ["model.ffn.activation = 'swigul': unknown", "'swiglu'"]),
    (['plugins=["no_such_package"]'], 1, ["no_such_package", "PYTHONPATH"]),
], ids=lambda value: value[0] if isinstance(value, list) else "")  # fmt: skip
def test_a_config_that_does_not_fit_is_one_clear_usage_error(workers, make_config, tmp_path, overrides, ranks, words):
    for kind, message in workers.run(error_of, ranks, make_config(*overrides, run="bad")):
        assert kind == UsageError.__name__, message
        assert "\n" not in message
        for word in words:
            assert word in message
    assert not (tmp_path / "bad").exists()


def test_a_damaged_shard_is_named(workers, make_config, corpus, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(corpus / "train", copy)
    shard = next(copy.glob("*.tar.zst"))
    flip_bit(shard, shard.stat().st_size // 2)
    ((kind, message),) = workers.run(error_of, 1, make_config(f"data.train={copy}", run="bad"))
    assert kind == MegatfmError.__name__
    assert shard.name in message
    shard.unlink()
    ((kind, message),) = workers.run(error_of, 1, make_config(f"data.train={copy}", run="bad"))
    assert shard.name in message
    assert "\n" not in message


def error_on_a_full_disk(config: Config, files: int) -> tuple[str, str]:
    """Train where no file may grow beyond so many bytes: the kernel then refuses writes, as a full disk does."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (files, before[1]))
    try:
        return error_of(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_old_checkpoint(workers, make_config, tmp_path):
    config = make_config(run="full")
    assert workers.run(train_until, 1, config, 5) == [EXIT_REQUEUE]
    old = sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir())
    kind, message = workers.run(error_on_a_full_disk, 1, config, 60_000)[0]
    assert kind == MegatfmError.__name__
    assert "\n" not in message
    assert sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir()) == old
    assert workers.run(run_training, 1, config) == [EXIT_OK]


def test_a_layout_fitted_to_fewer_processes_is_not_kept(workers, make_config, tmp_path):
    """The config that a run keeps has the layout that was asked for."""
    config = make_config("resilience.elastic=true", "parallel.dp_replicate=2", "train.steps=2", run="fitted")
    assert workers.run(run_training, 1, config) == [EXIT_OK]
    assert load_config(tmp_path / "fitted").parallel == config.parallel
    events = read_lines(tmp_path / "fitted/events.jsonl")
    assert "parallel.dp_replicate 2 → 1" in events[0]["detail"]


def test_a_sink_that_there_is_not_leaves_nothing(workers, make_config, tmp_path):
    config = make_config("plugins=[json]", "log.sinks=[foo]", run="sink")
    with pytest.raises(WorkerFailure, match=r"log\.sinks = 'foo': unknown"):
        workers.run(run_training, 1, config)
    assert not (tmp_path / "sink").exists()


def test_a_refused_resume_is_one_line_in_the_log(workers, make_config, whole_run, tmp_path):
    shutil.copytree(whole_run(1), tmp_path / "run")
    with pytest.raises(WorkerFailure, match=r"resume\.allow=seed"):
        workers.run(run_training, 1, make_config("train.seed=5"))
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert "resume.allow=seed" in log
    assert "Traceback" not in log
    events = [json.loads(line)["event"] for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert events == ["started", "finished", "refused"]
    assert get_run_status(tmp_path / "run").state.name == "DONE"
