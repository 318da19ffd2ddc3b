"""Numbers that go wrong in a whole run, and runs that end early, at the same step whether interrupted or not."""

import json
import math
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.checkpoint import file_format, saver
from megatfm.checkpoint.locate import find_best_checkpoint
from megatfm.checkpoint.metadata import check_json_round_trip
from megatfm.config import Config, load_section
from megatfm.engines.native.engine import NativeEngine
from megatfm.errors import EXIT_OK, EXIT_REQUEUE, LockedError, MegatfmError, UsageError
from megatfm.launchers.record import is_finished
from megatfm.tracking import run_lock
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.run import train
from megatfm.train.run_state import BestCheckpoint
from tests.support.small_runs import SMALL_CONFIG
from tests.support.training_runs import (
    assert_bitwise_equal,
    delete_checkpoints_after,
    have_same_tensors,
    run_events,
    run_training,
    stored_weights,
    train_until,
    train_with_bit_flip,
    train_with_faults,
    training_curve,
)
from tests.support.workers import WorkerFailure, Workers

HOST = socket.gethostname()
MakeConfig = Callable[..., Config]


# A run of nothing but NaN is below.
@pytest.mark.parametrize(("fault", "ranks"), [pytest.param("nan", 1, marks=pytest.mark.extended), ("inf", 2)])
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(
    workers: Workers, make_config: MakeConfig, tmp_path: Path, fault: str, ranks: int
) -> None:
    """A resume skips the step again."""
    plain = ["train.steps=8", "checkpoint.every=1", "checkpoint.keep=9", "evaluate.max_rows=2"]
    keys = [read for _, read in workers.run(train_with_faults, ranks, make_config(*plain, run="whole"))]
    bad = {rank_keys[5]: fault for rank_keys in keys}
    config = make_config(*plain)
    assert [code for code, _ in workers.run(train_with_faults, ranks, config, bad)] == [EXIT_OK] * ranks
    run = tmp_path / "run"
    assert [line["step"] for line in training_curve(run)] == list(range(1, 9))
    assert [line["step"] for line in training_curve(run) if line.get("skipped")] == [6]
    ((step, output),) = run_events(run, "skipped")
    assert step == 6
    assert "not finite, so the weights stay unchanged (1 in a row)" in output
    assert f"step 6  skipped: {output}" in (run / "logs" / "rank-0.log").read_text()
    assert have_same_tensors(stored_weights(run, 5), stored_weights(run, 6)), "weights, optimizer state and all"
    assert not have_same_tensors(stored_weights(run, 6), stored_weights(run, 7))
    assert have_same_tensors(stored_weights(tmp_path / "whole", 5), stored_weights(run, 5))
    assert not have_same_tensors(stored_weights(tmp_path / "whole", 8), stored_weights(run, 8))
    # A resume repeats the decision, also where this time the numbers are sound.
    before, last = training_curve(run), stored_weights(run, 8)
    delete_checkpoints_after(run, 4)
    assert [code for code, _ in workers.run(train_with_faults, ranks, config)] == [EXIT_OK] * ranks
    assert have_same_tensors(stored_weights(run, 8), last)
    if fault == "inf":
        assert training_curve(run) == before
    assert run_events(run, "skipped")[1] == (6, "as before: not finite, so the weights stay unchanged (1 in a row)")


ROLLBACK = ["train.steps=16", "checkpoint.keep=9", "resilience.spike=rollback", "resilience.spike_window=16"]


@pytest.fixture(scope="module")
def batch_keys(workers: Workers, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Keys of the 20 batches that a run of one process reads first."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "small.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
    words = [f"run_dir={folder / 'run'}", "train.steps=20", "evaluate.every=0", "checkpoint.every=20"]
    config = load_section(Config, folder / "small.toml", words)
    ((_, keys),) = workers.run(train_with_faults, 1, config)
    assert len(set(keys)) == 20
    return keys


def test_a_run_that_only_makes_nan_ends_with_a_clear_error(
    workers: Workers, make_config: MakeConfig, batch_keys: list[str]
) -> None:
    config = make_config("train.steps=6", "resilience.max_skipped=2")
    ((output, _),) = workers.run(train_with_faults, 1, config, dict.fromkeys(batch_keys, "nan"))
    assert "step 3: loss nan" in str(output)
    assert "3 steps in a row" in str(output)
    assert "optimizer.lr" in str(output)


def test_a_spike_is_rolled_back_and_its_data_skipped(
    workers: Workers, make_config: MakeConfig, batch_keys: list[str], tmp_path: Path
) -> None:
    """Every resume repeats the rollback."""
    keys, config, run = batch_keys, make_config(*ROLLBACK), tmp_path / "run"
    ((code, read),) = workers.run(train_with_faults, 1, config, {keys[9]: "spike"})  # the tenth step's
    assert code == EXIT_OK
    assert read == keys[:10] + keys[10:18], "back to step 8, and on after the data of the spike"
    assert [line["step"] for line in training_curve(run)] == list(range(1, 17)), "each step once"
    assert max(line["loss"] for line in training_curve(run)) < 100
    ((step, output),) = run_events(run, "rolled back")
    assert step == 10
    assert "from step-00000008 on" in output
    assert [line["tokens"] for line in training_curve(run)] == [8 * 64 * step for step in range(1, 17)]
    # Every resume takes the same data and ends with the same bits, even where nothing spikes this time.
    before, last = training_curve(run), stored_weights(run, 16)
    for n_snapshots, expected in ((12, keys[14:18]), (8, keys[10:18]), (4, keys[4:8] + keys[10:18])):
        delete_checkpoints_after(run, n_snapshots)
        ((code, read),) = workers.run(train_with_faults, 1, config)
        assert (code, read) == (EXIT_OK, expected), n_snapshots
        assert training_curve(run) == before
        assert have_same_tensors(stored_weights(run, 16), last)


def test_rollbacks_are_bounded(
    workers: Workers, make_config: MakeConfig, batch_keys: list[str], tmp_path: Path
) -> None:
    """A spike without a checkpoint is only reported."""
    early = make_config(*ROLLBACK, "checkpoint.every=16", run="early")
    ((code, _),) = workers.run(train_with_faults, 1, early, {batch_keys[9]: "spike"})
    assert code == EXIT_OK
    ((step, output),) = run_events(tmp_path / "early", "spike")
    assert step == 10
    assert "deviations above the median" in output
    config = make_config(*ROLLBACK, "resilience.max_rollbacks=2")
    ((output, _),) = workers.run(train_with_faults, 1, config, dict.fromkeys(batch_keys[9:], "spike"))
    assert "the loss spikes again after 2 rollbacks to step 8" in str(output)


def fail_during_a_slow_save(config: Config) -> None:
    """Fail in step 3 while files of step 2 are being written; look at the lock before they are, and then let it go."""
    go_on, write = threading.Event(), file_format.write_safetensors
    slow_write = patch.object(file_format, "write_safetensors", lambda *words: go_on.wait(60) and write(*words))
    steps = iter(range(2))
    compute = NativeEngine.forward_backward
    failing = patch.object(
        NativeEngine, "forward_backward", lambda *words, **options: (next(steps), compute(*words, **options))[1]
    )
    with slow_write, failing, patch.object(saver, "ABORT_WAIT_SECONDS", 0.0):
        with pytest.raises(StopIteration):
            train(config)
        try:
            with pytest.raises(LockedError, match="another process is training"):
                run_lock.RunLock(config.run_folder / "lock").acquire()
        finally:
            go_on.set()
            for thread in threading.enumerate():
                if thread.name == "megatfm-save":
                    thread.join()
            run_lock._close_in_child()


def test_a_run_that_fails_while_it_saves_keeps_its_lock(workers: Workers, make_config: MakeConfig) -> None:
    """The save may still commit its checkpoint, and remove older ones, while another job waits for the lock."""
    workers.run(fail_during_a_slow_save, 1, make_config("checkpoint.every=2", "evaluate.every=0"))


# -------------------------------------------------------------------------------------------- silent corruption


REPLICAS = [
    "parallel.dp_replicate=3", "train.global_batch=6", "train.micro_batch=2", "train.steps=6", "checkpoint.every=3",
]  # fmt: skip


def test_a_bit_that_flips_in_a_replica_is_found_and_its_rank_named(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(*REPLICAS, "resilience.compare_replicas_every=2", run="flips")
    errors = workers.run(train_with_bit_flip, 3, config, "weight", 1, 4)
    assert len(set(errors)) == 1
    actual = rf"after step 4, replicas of one parameter differ: rank 1 on {HOST}: model\.\S*\.wo\.weight\. A processor"
    assert re.match(actual, errors[0]), errors[0]
    assert [path.name for path in (tmp_path / "flips/checkpoints").iterdir()] == ["step-00000003"]
    sound = make_config(*REPLICAS, "resilience.compare_replicas_every=1", "resilience.replay_every=2", run="sound")
    assert workers.run(train_with_bit_flip, 3, sound, "none", 0, 0) == ["none"] * 3


def test_a_step_computed_twice_that_differs_in_one_bit_is_found(workers: Workers, make_config: MakeConfig) -> None:
    config = make_config("train.steps=6", "resilience.replay_every=4", "parallel.dp_shard=2")
    errors = workers.run(train_with_bit_flip, 2, config, "gradient", 1, 4)
    assert len(set(errors)) == 1
    assert re.match(rf"step 4, computed twice, differs: rank 1 on {HOST}: \S*\.wo\.weight\. A", errors[0]), errors[0]


def test_two_replicas_can_not_say_which_is_wrong(workers: Workers, make_config: MakeConfig) -> None:
    config = make_config("parallel.dp_replicate=2", "train.steps=4", "resilience.compare_replicas_every=1", run="two")
    errors = workers.run(train_with_bit_flip, 2, config, "weight", 1, 2)
    name = r"model\.\S*\.wo\.weight"
    assert re.search(rf"rank 0 on {HOST}: {name}; rank 1 on {HOST}: {name}\. A", errors[0]), errors[0]


def test_a_run_resumes_with_fewer_ranks_if_allowed(workers: Workers, make_config: MakeConfig, tmp_path: Path) -> None:
    fixed = ["parallel.dp_shard=2", "train.micro_batch=4"]
    ((code, _), _) = workers.run(train_with_faults, 2, make_config(*fixed, "train.steps=4"))
    assert code == EXIT_OK
    longer = [*fixed, 'resume.allow=["schedule"]', "train.steps=8"]
    ((output, _),) = workers.run(train_with_faults, 1, make_config(*longer))
    assert "does not fit 1 process" in str(output)
    ((code, _),) = workers.run(train_with_faults, 1, make_config(*longer, "resilience.elastic=true"))
    assert code == EXIT_OK
    assert [line["step"] for line in training_curve(tmp_path / "run")] == list(range(1, 9))


# ---------------------------------------------------------------------------------------- runs that end early


OPTIONS = '{rank = 3, dropout = 0.1, trained = ["decoder.norm.*"]}'
STANDSTILL = ["train.patience=2", "evaluate.every=2", "optimizer.lr=1e-30", "optimizer.matrix_lr=1e-30"]
"""Settings of a run that learns nothing: its evaluation of step 2 stays the best, and it ends at step 6 of 8."""


def test_a_run_without_progress_ends_early(workers: Workers, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*STANDSTILL, "parallel.dp_shard=2", run="whole")
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert [line["step"] for line in training_curve(tmp_path / "whole")] == list(range(1, 7))
    assert find_best_checkpoint(tmp_path / "whole").name == "step-00000002"
    event = json.loads((tmp_path / "whole/events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("finished early", 6)
    assert "loss was best at step 2, 2 evaluations before" in event["detail"]
    assert is_finished(tmp_path / "whole", 8)
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK], "once more: nothing is left to do"
    assert len(training_curve(tmp_path / "whole")) == 6

    stopped = make_config(*STANDSTILL, "parallel.dp_shard=2", run="stopped")
    assert workers.run(train_until, 2, stopped, 5, signal.SIGTERM) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, stopped) == [EXIT_OK, EXIT_OK]
    assert training_curve(tmp_path / "whole") == training_curve(tmp_path / "stopped")


def train_on_a_full_disk(config: Config) -> str:
    """Train while rank 0 alone can't write the run's files; returns the error."""

    def refuse(*_: object) -> None:
        if dist.get_rank() == 0:
            raise MegatfmError("plan.txt: can't write it: No space left on device")
        raise AssertionError("other ranks write nothing")

    with patch.object(RunDirectory, "write_run_files", refuse):
        try:
            train(config)
        except MegatfmError as error:
            return str(error)
    return "trained"


def test_all_ranks_end_where_rank_0_cannot_write_the_run_s_files(workers: Workers, make_config: MakeConfig) -> None:
    """Each has the reason, and none waits for rank 0 in the first step."""
    message = "plan.txt: can't write it: No space left on device"
    assert workers.run(train_on_a_full_disk, 3, make_config("train.steps=2", "train.global_batch=12")) == [message] * 3


def test_a_run_with_progress_goes_to_its_end(workers: Workers, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("train.steps=12", "train.patience=1", "evaluate.every=4", run="learns")
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert len(training_curve(tmp_path / "learns")) == 12


def test_a_first_result_that_is_no_number_is_not_the_best(make_config: MakeConfig, tmp_path: Path) -> None:
    best = BestCheckpoint(make_config("train.patience=2", "evaluate.every=2"), tmp_path)
    for step, loss in ((2, math.nan), (4, math.nan), (6, 3.0), (8, 2.5), (10, math.nan)):
        assert not best.is_stale
        best.update(step, {"validation": {"loss": loss}})
        stored = check_json_round_trip(best.state_dict())  # a checkpoint may be saved after each
        best.load_state_dict(stored)
    assert (best.step, best.value, best.evaluations_since) == (8, -2.5, 1)


def test_patience_needs_evaluations(make_config: MakeConfig) -> None:
    with pytest.raises(UsageError, match=r"counts evaluations, and evaluate\.every = 0"):
        make_config("train.patience=3", "evaluate.every=0")
    with pytest.raises(UsageError, match=r"there is none: give data\.validation"):
        make_config("train.patience=3", "evaluate.every=2", "data.validation={}")


def test_adapters_resume_to_the_bit_and_leave_the_base_alone(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    assert workers.run(run_training, 2, make_config("train.steps=2", run="base")) == [EXIT_OK, EXIT_OK]
    lora = [f"train.init_from={tmp_path / 'base'}", f"model.lora={OPTIONS}", "parallel.tp=2"]
    assert workers.run(run_training, 2, make_config(*lora, run="whole")) == [EXIT_OK, EXIT_OK]
    config = make_config(*lora, run="stopped")
    assert workers.run(train_until, 2, config, 5, signal.SIGTERM) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(tmp_path / "whole", tmp_path / "stopped")

    newest = checkpoint.find_checkpoint(tmp_path / "whole")
    base = checkpoint.find_checkpoint(tmp_path / "base")
    before, after = (checkpoint.read_tensors(path, "model.") for path in (base, newest))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {"model.decoder.norm.weight"}, "the base is frozen"
    assert all(".lora." in name for name in after.keys() - before.keys())
    states = [name for name in checkpoint.read_tensor_specs(newest) if name.startswith("optimizer.")]
    assert all(".lora." in name or ".decoder.norm." in name for name in states)
    identity = checkpoint.read_state(newest)["base"]
    assert isinstance(identity, dict)
    assert identity["checkpoint"] == str(base)
    assert len(str(identity["blake3"])) == 64

    plain = make_config(f"train.init_from={newest}", run="lost")
    with pytest.raises(
        WorkerFailure, match=r"has an adapter, .*lora\.a\.weight, without which it would be another model"
    ):
        workers.run(run_training, 2, plain)
    louder = make_config(f"train.init_from={newest}", f"model.lora={OPTIONS}", "model.lora.alpha=9", run="louder")
    with pytest.raises(
        WorkerFailure, match=r"trained with model\.lora\.alpha = \d+, and with 9 it would be another model"
    ):
        workers.run(run_training, 2, louder)
