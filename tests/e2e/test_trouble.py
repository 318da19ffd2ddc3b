"""Numbers that go wrong in a whole run: steps that are skipped, loss spikes that are gone back from, bits that flip."""

import hashlib
import json
import math
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.engines.interface import LossTotals
from megatfm.errors import EXIT_OK, MegatfmError
from megatfm.tracking.metrics import MACHINE_DEPENDENT_KEYS
from megatfm.train.trainer import train
from tests.e2e.ranks import engine_class
from tests.support.workers import Workers

HOST = socket.gethostname()
MakeConfig = Callable[..., Config]


def batch_key(microbatches: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(b"".join(batch["tokens"].tobytes() for batch in microbatches)).hexdigest()


def watched(config: Config, faults: Mapping[str, str] = {}) -> tuple[int | str, list[str]]:
    """Train; returns the exit code or error, and a key of each batch that was read. faults: key of a batch → fault.

    A fault is `nan` (the loss), `spike` (the loss) or `inf` (one gradient of the last rank).
    """
    patched, read = engine_class(config.parallel.engine), []
    genuine = patched.forward_backward

    def faulty(
        engine: Any, microbatches: Sequence[Mapping[str, Any]], objective: Any, **how: Any
    ) -> LossTotals:
        stats = genuine(engine, microbatches, objective, **how)
        read.append(batch_key(microbatches))
        fault = faults.get(read[-1])
        if fault == "inf" and dist.get_rank() == dist.get_world_size() - 1:
            next(g for g in engine.gradients().values() if g.numel()).view(-1)[0] = math.inf
        wrong = {"nan": math.nan, "spike": 1e6}.get(fault or "", 0.0)
        for term in stats.sums:
            stats.sums[term] += wrong
        return stats

    patched.forward_backward = faulty
    try:
        return train(config), read
    except MegatfmError as error:
        return str(error), read
    finally:
        patched.forward_backward = genuine


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in MACHINE_DEPENDENT_KEYS} for line in lines
    ]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / f"checkpoints/step-{step:08d}")


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def events(folder: Path, kind: str) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(line["step"], line["detail"]) for line in lines if line["event"] == kind]


def forget_after(folder: Path, step: int) -> None:
    """As if the run had been killed before it saved any later checkpoint."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize(("fault", "ranks"), [("nan", 1), ("inf", 2)])
def test_a_step_that_is_not_finite_is_skipped_by_all_ranks_and_skipped_again_on_resume(
    workers: Workers, make_config: MakeConfig, tmp_path: Path, fault: str, ranks: int
) -> None:
    plain = ["train.steps=8", "checkpoint.every=1", "checkpoint.keep=9", "evaluate.max_rows=2"]
    keys = [read for _, read in workers.run(watched, ranks, make_config(*plain, run="whole"))]
    bad = {rank_keys[5]: fault for rank_keys in keys}
    config = make_config(*plain)
    assert [code for code, _ in workers.run(watched, ranks, config, bad)] == [EXIT_OK] * ranks
    run = tmp_path / "run"
    assert [line["step"] for line in curve(run)] == list(range(1, 9))
    assert [line["step"] for line in curve(run) if line.get("skipped")] == [6]
    ((step, output),) = events(run, "skipped")
    assert step == 6
    assert "not finite, so the weights stay as they are (1 in a row)" in output
    assert same(weights(run, 5), weights(run, 6)), "weights, optimizer state and all"
    assert not same(weights(run, 6), weights(run, 7))
    assert same(weights(tmp_path / "whole", 5), weights(run, 5))
    assert not same(weights(tmp_path / "whole", 8), weights(run, 8))
    # A resume repeats the decision, also where this time the numbers are sound.
    before, last = curve(run), weights(run, 8)
    forget_after(run, 4)
    assert [code for code, _ in workers.run(watched, ranks, config)] == [EXIT_OK] * ranks
    assert same(weights(run, 8), last)
    if fault == "inf":
        assert curve(run) == before
    assert events(run, "skipped")[1] == (
        6,
        "as before: not finite, so the weights stay as they are (1 in a row)",
    )


def test_a_run_that_only_makes_nan_ends_with_a_clear_error(workers: Workers, make_config: MakeConfig) -> None:
    ((_, keys),) = workers.run(watched, 1, make_config("train.steps=6", run="whole"))
    config = make_config("train.steps=6", "resilience.max_skipped=2")
    ((output, _),) = workers.run(watched, 1, config, dict.fromkeys(keys, "nan"))
    assert "step 3: loss nan" in str(output)
    assert "3 steps in a row" in str(output)
    assert "optimizer.lr" in str(output)


ROLLBACK = ["train.steps=16", "checkpoint.keep=9", "resilience.spike=rollback", "resilience.spike_window=16"]


def test_a_spike_is_gone_back_from_its_data_skipped_and_every_resume_repeats_it(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    ((_, keys),) = workers.run(watched, 1, make_config(*ROLLBACK, "train.steps=20", run="whole"))
    config, run = make_config(*ROLLBACK), tmp_path / "run"
    ((code, read),) = workers.run(watched, 1, config, {keys[9]: "spike"})  # the tenth step's
    assert code == EXIT_OK
    assert read == keys[:10] + keys[10:18], "back to step 8, and on after the data of the spike"
    assert [line["step"] for line in curve(run)] == list(range(1, 17)), "each step once"
    assert max(line["loss"] for line in curve(run)) < 100
    ((step, output),) = events(run, "rolled back")
    assert step == 10
    assert "from step-00000008 on" in output
    assert [line["tokens"] for line in curve(run)] == [8 * 64 * step for step in range(1, 17)]
    # Every resume takes the same data and ends with the same bits, even where nothing spikes this time.
    before, last = curve(run), weights(run, 16)
    for kept, expected in ((12, keys[14:18]), (8, keys[10:18]), (4, keys[4:8] + keys[10:18])):
        forget_after(run, kept)
        ((code, read),) = workers.run(watched, 1, config)
        assert (code, read) == (EXIT_OK, expected), kept
        assert curve(run) == before
        assert same(weights(run, 16), last)


def test_rollbacks_are_bounded_and_without_a_checkpoint_a_spike_is_only_reported(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    ((_, keys),) = workers.run(watched, 1, make_config(*ROLLBACK, "train.steps=20", run="whole"))
    early = make_config(*ROLLBACK, "checkpoint.every=16", run="early")
    ((code, _),) = workers.run(watched, 1, early, {keys[9]: "spike"})
    assert code == EXIT_OK
    ((step, output),) = events(tmp_path / "early", "spike")
    assert step == 10
    assert "deviations above the median" in output
    config = make_config(*ROLLBACK, "resilience.max_rollbacks=2")
    ((output, _),) = workers.run(watched, 1, config, dict.fromkeys(keys[9:], "spike"))
    assert "the loss spikes again after 2 rollbacks to step 8" in str(output)


# -------------------------------------------------------------------------------------------- silent corruption


def flipped(engine: Any) -> str:
    """The last output projection of a block of which something is here."""
    return [name for name, weight in engine.local.items() if name.endswith(".wo.weight") and weight.numel()][
        -1
    ]


def error_after(config: Config, fault: str, rank: int, step: int) -> str:
    """Train with a bit that flips on one rank; the error. fault: `gradient`, when it is computed twice, or `weight`."""
    patched = engine_class(config.parallel.engine)
    backward, optimize = patched.forward_backward, patched.step
    calls = 0

    def flip(tensor: torch.Tensor) -> None:
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    def forward_backward(engine: Any, *batch: Any, **how: Any) -> LossTotals:
        nonlocal calls
        calls += 1
        stats = backward(engine, *batch, **how)
        if fault == "gradient" and dist.get_rank() == rank and calls == step + 1:
            flip(engine.gradients()[flipped(engine)])
        return stats

    def optimizer_step(engine: Any, *how: float, skip: bool) -> float:
        norm = optimize(engine, *how, skip=skip)
        if fault == "weight" and dist.get_rank() == rank and calls == step:
            flip(engine.local[flipped(engine)])
        return norm

    patched.forward_backward, patched.step = forward_backward, optimizer_step
    try:
        train(config)
    except MegatfmError as error:
        return str(error)
    finally:
        patched.forward_backward, patched.step = backward, optimize
    return "none"


REPLICAS = ["parallel.dp_replicate=3", "train.global_batch=6", "train.steps=6", "checkpoint.every=3"]


def test_a_bit_that_flips_in_a_replica_is_found_and_its_rank_named(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(*REPLICAS, "resilience.compare_replicas_every=2", run="flips")
    errors = workers.run(error_after, 3, config, "weight", 1, 4)
    assert len(set(errors)) == 1
    actual = rf"after step 4, replicas of one parameter differ: rank 1 on {HOST}: model\.\S*\.wo\.weight\. A processor"
    assert re.match(actual, errors[0]), errors[0]
    assert [path.name for path in (tmp_path / "flips/checkpoints").iterdir()] == ["step-00000003"]
    sound = make_config(
        *REPLICAS, "resilience.compare_replicas_every=1", "resilience.replay_every=2", run="sound"
    )
    assert workers.run(error_after, 3, sound, "none", 0, 0) == ["none"] * 3


def test_a_step_computed_twice_that_differs_in_one_bit_is_found(
    workers: Workers, make_config: MakeConfig
) -> None:
    config = make_config("train.steps=6", "resilience.replay_every=4", "parallel.dp_shard=2")
    errors = workers.run(error_after, 2, config, "gradient", 1, 4)
    assert len(set(errors)) == 1
    assert re.match(rf"step 4, computed twice, differs: rank 1 on {HOST}: \S*\.wo\.weight\. A", errors[0]), (
        errors[0]
    )


def test_two_replicas_can_not_say_which_is_wrong(workers: Workers, make_config: MakeConfig) -> None:
    config = make_config(
        "parallel.dp_replicate=2", "train.steps=4", "resilience.compare_replicas_every=1", run="two"
    )
    errors = workers.run(error_after, 2, config, "weight", 1, 2)
    name = r"model\.\S*\.wo\.weight"
    assert re.search(rf"rank 0 on {HOST}: {name}; rank 1 on {HOST}: {name}\. A", errors[0]), errors[0]


def test_a_run_goes_on_with_fewer_ranks_where_that_is_allowed(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    fixed = ["parallel.dp_shard=2", "train.micro_batch=4"]
    ((code, _), _) = workers.run(watched, 2, make_config(*fixed, "train.steps=4"))
    assert code == EXIT_OK
    longer = [*fixed, 'resume.allow=["schedule"]', "train.steps=8"]
    ((output, _),) = workers.run(watched, 1, make_config(*longer))
    assert "does not fit 1 process" in str(output)
    ((code, _),) = workers.run(watched, 1, make_config(*longer, "resilience.elastic=true"))
    assert code == EXIT_OK
    assert [line["step"] for line in curve(tmp_path / "run")] == list(range(1, 9))
