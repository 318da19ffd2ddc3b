"""Signals that ask to stop, layouts for the processes that are left, and flipped bits in copies."""

import os
import random
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.config.world_size import compute_axis_sizes, fit_layout, list_layout_changes
from megatfm.engines.interface import Batch
from megatfm.errors import NO_PROGRESS, MegatfmError, NoProgressError, UsageError
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.resilience import (
    ATTEMPTS,
    adapt_layout,
    check_progress,
    compare_replicas,
    forward_backward_with_replay,
)
from megatfm.train.signals import INTERRUPTED, STOP_SIGNALS, StopSignals
from tests.support.batches import CAUSAL, global_batch
from tests.support.expert_parity import EXPERT_MODELS
from tests.support.forked_commands import ForkedCommand, send_signal
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

CPU = torch.device("cpu")


def signal_one_rank(who: int, number: int) -> list[tuple[str | None, bool]]:
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    with StopSignals(CPU) as signals:
        answers = [signals.agree(busy=dist.get_rank() != who)]
        if dist.get_rank() == who:
            os.kill(os.getpid(), number)
        answers += [signals.agree(), signals.agree()]
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before
    return answers


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_all_ranks_agree_when_one_gets_the_signal(workers: Workers, name: signal.Signals) -> None:
    assert workers.run(signal_one_rank, 2, 1, name) == [[(None, True), (name.name, False), (name.name, False)]] * 2


def hang_up(handler: signal.Handlers) -> str | None:
    signal.signal(signal.SIGHUP, handler)
    with StopSignals(CPU) as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        return signals.agree()[0]


def test_a_closed_terminal_stops_a_run_that_does_not_ignore_it(workers: Workers) -> None:
    """SIGHUP is ignored under `nohup`."""
    assert workers.run(hang_up, 1, signal.SIG_DFL) == ["SIGHUP"]
    assert workers.run(hang_up, 1, signal.SIG_IGN) == [None]


def agreed_a_step_later(number: int) -> list[tuple[str | None, bool]]:
    with StopSignals(CPU) as signals:
        answers = [signals.agree_deferred(busy=dist.get_rank() == 2)]
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        answers += [signals.agree_deferred() for _ in range(3)]
    return answers


def test_the_agreement_of_the_step_before_is_the_same_on_all_ranks(workers: Workers) -> None:
    """The host of a GPU waits for nothing newer; before the first step, all count as busy."""
    expected = [(None, True), (None, True), ("SIGTERM", False), ("SIGTERM", False)]
    assert workers.run(agreed_a_step_later, 3, signal.SIGTERM) == [expected] * 3


def different_signals() -> str | None:
    with StopSignals(CPU) as signals:
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1)[dist.get_rank()])
        return signals.agree()[0]


def test_ranks_that_got_different_ones_name_the_same(workers: Workers) -> None:
    (name,) = set(workers.run(different_signals, 2))
    assert name in {"SIGTERM", "SIGUSR1"}


def test_only_a_second_interrupt_interrupts() -> None:
    with StopSignals(CPU):
        for first in (*STOP_SIGNALS, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


STUCK = """
import ctypes
import torch
from megatfm.train import signals
signals.GRACE_SECONDS = 0.2
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with signals.StopSignals(torch.device("cpu")):
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # in C, which no signal interrupts, as in a collective
"""


def test_a_second_interrupt_ends_a_main_thread_that_is_stuck_in_c(tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    stuck = ForkedCommand([], tmp_path / "output", program=str(program))
    try:
        stuck.wait_for_lines(stuck.output_path, 1)
        send_signal(stuck.pid, signal.SIGINT)
        stuck.process.join(0.5)
        assert stuck.process.is_alive()
        os.kill(stuck.pid, signal.SIGINT)
        assert stuck.wait(20) == INTERRUPTED
    finally:
        stuck.end()
    assert stuck.output == "ready\nerror: interrupted while stuck, so nothing is saved\n"


def fail_inside() -> None:
    with StopSignals(CPU):
        raise ZeroDivisionError


def test_handlers_are_given_back_after_an_error() -> None:
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before


def test_a_run_outside_the_main_thread_warns_that_it_handles_no_signals(caplog: pytest.LogCaptureFixture) -> None:
    """`megatfm.fit` in a thread of a notebook or a service."""
    before = [signal.getsignal(name) for name in STOP_SIGNALS]
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with StopSignals(CPU):
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failed
    assert "training runs outside the main thread" in caplog.text
    assert [signal.getsignal(name) for name in STOP_SIGNALS] == before


# -------------------------------------------------------------------------------------------- fewer processes


def config(**settings: object) -> Config:
    words = ["data.tokenizer=t", "data.train=d", "train.global_batch=24", "train.micro_batch=4"]
    return load_config("quickstart", words + [f"{key}={value}" for key, value in settings.items()])


def layout(config: Config, world_size: int) -> tuple[dict[str, int], int]:
    return compute_axis_sizes(config.parallel, world_size), config.train.micro_batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_layout_that_fits_stays(world_size: int) -> None:
    result = config()
    assert fit_layout(result, world_size) == (result, None)


@pytest.mark.parametrize(("settings", "world_size", "axes", "micro_batch"), [
    ({}, 4, (1, 4, 1), 3),  # a share of 6 rows
    ({}, 8, (1, 8, 1), 3),
    ({}, 24, (1, 24, 1), 1),
    ({"parallel.dp_shard": 8}, 6, (1, 6, 1), 4),
    ({"parallel.dp_shard": 4, "parallel.dp_replicate": 2}, 6, (2, 3, 1), 4),
    ({"parallel.dp_replicate": 4}, 6, (2, 3, 1), 4),
    ({"parallel.dp_replicate": 2}, 3, (1, 3, 1), 4),
    ({"parallel.tp": 2, "parallel.dp_shard": 4}, 6, (1, 3, 2), 4),
])  # fmt: skip
def test_the_data_axes_and_the_micro_batch_give_way(
    settings: dict[str, object], world_size: int, axes: tuple[int, int, int], micro_batch: int
) -> None:
    before = config(**settings)
    after, output = fit_layout(before, world_size)
    sizes, micro = layout(after, world_size)
    assert (sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"]) == axes
    assert micro == micro_batch
    assert after.train.global_batch == before.train.global_batch
    assert output is not None
    assert all(" → " in change for change in output.split(", "))


def test_fewer_ranks_divide_experts() -> None:
    experts = {"model.ffn.name": "moe", "model.ffn.n_experts": 8, "model.ffn.top_k": 2}
    after, output = fit_layout(config(**experts, **{"parallel.ep": 4, "parallel.dp_shard": 4}), 6)
    assert layout(after, 6)[0]["dp_shard"] == 6
    assert after.parallel.ep == 2
    assert output == "parallel.dp_shard 4 → -1, parallel.ep 4 → 2"


@pytest.mark.parametrize(("settings", "world_size", "words"), [
    ({}, 5, "no layout fits 5 processes: train.global_batch = 24 and 1 ranks per model allow 1, 2, 3, 4, 6, 8"),
    ({"parallel.tp": 2}, 3, "allow 2, 4, 6, 8"),
    ({"parallel.tp": 2}, 1, "no layout fits 1 process:"),
])  # fmt: skip
def test_a_layout_that_can_not_be_fitted_is_refused(settings: dict[str, object], world_size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit_layout(config(**settings), world_size)


def test_a_run_is_elastic_only_where_it_is_asked_to() -> None:
    assert adapt_layout(config(), 4) == config()
    assert adapt_layout(config(**{"resilience.elastic": "true"}), 4).train.micro_batch == 3


@pytest.mark.parametrize(
    ("shared", "nodes", "warns"), [("True", "2", True), ("False", "2", False), ("True", "1", False)]
)
def test_an_elastic_run_warns_if_it_needs_its_first_node(
    shared: str, nodes: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    adapt_layout(config(**{"resilience.elastic": "true"}), 4)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warns


def test_logged_changes_of_a_layout_are_its_differences() -> None:
    inputs = config(**{"parallel.dp_replicate": 2, "train.micro_batch": 2})
    fitted, output = fit_layout(inputs, 3)
    assert output == ", ".join(list_layout_changes(inputs, fitted))
    assert list_layout_changes(inputs, inputs) == []


def start(folder: Path, restarts: int, step: int, agent: str = "none") -> None:
    environment = {"TORCHELASTIC_RUN_ID": agent, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    check_progress(RunDirectory(folder, 0), step, 2, environment)


@pytest.mark.parametrize("starts", [
    [(0, 0), (1, 0), (2, 0)],
    [(0, 0), (1, 0), (2, 4), (3, 4), (4, 8), (5, 8), (6, 8)],  # a new checkpoint starts the count again
    [(3, 4), (4, 4), (4, 4, "b"), (5, 4, "b"), (0, 4, "b"), (1, 4, "b"), (2, 4, "b")],  # another agent and a new start
], ids=len)  # fmt: skip
def test_restarts_without_a_new_checkpoint_are_bounded(tmp_path: Path, starts: list[tuple[Any, ...]]) -> None:
    for restarts, step, *agent in starts[:-1]:
        start(tmp_path, restarts, step, *agent)
    restarts, step, *agent = starts[-1]
    reason = rf"2 restarts in a row saved no checkpoint after step {step}"
    with pytest.raises(NoProgressError, match=reason) as caught:
        start(tmp_path, restarts, step, *agent)
    assert caught.value.exit_code == NO_PROGRESS == 76


def test_without_an_agent_nothing_is_counted(tmp_path: Path) -> None:
    for _ in range(9):
        check_progress(RunDirectory(tmp_path, 0), 0, 1, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"\x80\x04}.", b"{", b"[1]", b'{"agent": "none"}', b'{"agent": "none", "step": 0, "restarts": "x"}']
)
def test_a_count_that_is_none_starts_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ATTEMPTS).write_bytes(content)
    for restarts in (7, 8):
        start(tmp_path, restarts, 0)
    with pytest.raises(NoProgressError):
        start(tmp_path, 9, 0)


# ----------------------------------------------------------------------------------------------- flipped bits


HOST = re.escape(socket.gethostname())
COPIES = {
    "zero 0": ParallelConfig(dp_shard=3, zero=0),
    **{f"replicas, zero {zero}": ParallelConfig(dp_replicate=3, dp_shard=1, zero=zero) for zero in range(4)},
}
NAME = "decoder.layers.1.attn.wo.weight"


def flipped(parallel: ParallelConfig, kind: str, precision: str) -> str:
    """The error after a bit has flipped on rank 1; none may come before."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision=precision)
    rows = {key: value[2 * dist.get_rank() :][:2] for key, value in global_batch(seed=1).items()}
    engine.forward_backward([rows], CAUSAL)
    engine.step(1e-2, clip=1.0)
    compare_replicas(engine, step=4, every=2)
    if dist.get_rank() == 1:
        tensor = engine.local[NAME] if kind == "model" else engine.optimizers[0].state()[NAME]["exp_avg"]
        tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
    compare_replicas(engine, step=5, every=2)  # not due
    try:
        compare_replicas(engine, step=6, every=2)
    except MegatfmError as error:
        return str(error)
    return "nothing was found"


def everywhere() -> dict[tuple[str, str], str]:
    return {
        (layout, kind): flipped(parallel, kind, "bf16" if parallel.zero % 2 else "fp32")
        for layout, parallel in COPIES.items()
        for kind in ("model", "optimizer")
    }


def test_a_flipped_bit_is_named_under_every_stage(workers: Workers) -> None:
    by_rank = workers.run(everywhere, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(by_rank[0]) == 2 * len(COPIES)
    for (layout, kind), message in by_rank[0].items():
        name = re.escape(f"model.{NAME}" if kind == "model" else f"optimizer.{NAME}.exp_avg")
        actual = rf"after step 6, replicas of one parameter differ: rank 1 on {HOST}: {name}\. A processor"
        assert re.match(actual, message), (layout, kind, message)


def flip_on_rank_3(part: str) -> str:
    """The error after a weight has changed on one of four ranks, each with half of the experts."""
    layout = ParallelConfig(dp_replicate=2, dp_shard=2, ep=2, zero=0)
    engine = build_engine(EXPERT_MODELS["top-k"], layout, ADAMW)
    compare_replicas(engine, step=1, every=1)
    if dist.get_rank() == 3:
        next(tensor for name, tensor in engine.local.items() if part in name).view(-1)[0] += 1
    with pytest.raises(MegatfmError) as error:
        compare_replicas(engine, step=2, every=1)
    return str(error.value)


@pytest.mark.parametrize(("part", "ranks"), [(".experts.", [1, 3]), (".attn.", [3])], ids=["experts", "attention"])
def test_experts_are_compared_with_copies_of_theirs(workers: Workers, part: str, ranks: list[int]) -> None:
    """Neither of two copies that differ is known to be the right one."""
    message = workers.run(flip_on_rank_3, 4, part)[0]
    assert [rank for rank in range(4) if f"rank {rank} on " in message] == ranks
    assert part in message


class Drawing:
    """An objective that a plugin might bring: it draws from the global generators."""

    loss_weights, target_counts = CAUSAL.loss_weights, CAUSAL.target_counts

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        factor = 1.0 + torch.rand(()) + random.random() + float(np.random.rand())
        return {name: factor * term for name, term in CAUSAL(model, batch).items()}


def replayed_with_draws() -> list[float]:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), ADAMW)
    rows = {key: value[2 * dist.get_rank() :][:2] for key, value in global_batch(seed=1).items()}
    losses = []
    for step in (1, 2, 3):
        losses.append(forward_backward_with_replay(engine, [rows], Drawing(), step, replay_every=step % 2).loss)
        engine.zero_grad()
    return losses


def test_a_plugin_that_draws_from_global_generators_can_be_replayed(workers: Workers) -> None:
    losses = workers.run(replayed_with_draws, 2)[0]
    assert len(set(losses)) == 3, "the draws of a step are those of one pass, and go on"


def shards_differ() -> None:
    for zero in (1, 2, 3):
        engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=3, zero=zero), ADAMW)
        compare_replicas(engine, step=2, every=2)


def test_shards_are_no_copies(workers: Workers) -> None:
    workers.run(shards_differ, 3)
