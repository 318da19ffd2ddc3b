"""Ranks run a step in the schedule's order, pass by pass and transfer by transfer: so its bubble is the
formula's."""

from collections.abc import Callable, Sequence

import pytest
import torch

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.pipeline import PipelineForwardBackward, StepState
from megatfm.parallel.pipeline_schedule import (
    SPLITS_BACKWARD,
    Action,
    Kind,
    add_send_recv,
    build_schedule,
    stage_to_rank,
)
from megatfm.parallel.pipeline_stages import PipelineStage
from tests.support.batches import CAUSAL, family_case, global_batch
from tests.support.layouts import PIPELINE_SCHEDULES, bubble_fraction, simulate_schedule
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    microbatches,
    model_gradient_errors,
    one_device_reference,
)
from tests.support.workers import Workers

SHALLOW = ModelConfig(vocab_size=96, d_model=8, n_layers=1, attention={"n_heads": 2}, ffn={"d_ff": 8})
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
METHODS: dict[str, Kind] = {
    "_run_forward": "F", "_run_backward": "B", "_run_backward_input": "I", "_run_backward_weight": "W",
    "_send_forward": "send F", "_receive_forward": "recv F",
    "_send_backward": "send B", "_receive_backward": "recv B",
}  # fmt: skip


def noted(kind: Kind, real: Callable[..., None], actions: list[Action]) -> Callable[..., None]:
    def method(self: PipelineForwardBackward, step: StepState, stage: PipelineStage, i: int) -> None:
        real(self, step, stage, i)
        actions.append(Action(stage.index, kind, i))

    return method


def one_step(schedules: Sequence[str], ranks: int) -> dict[str, list[Action]]:
    """This rank's actions under each schedule, with two micro-batches for each rank."""
    actual, config = {}, SHALLOW.with_changes({"n_layers": 2 * ranks - 1})
    rows = {key: value[: 2 * ranks] for key, value in global_batch(seed=3).items()}
    batch = [{key: value[i : i + 1] for key, value in rows.items()} for i in range(2 * ranks)]
    for schedule in schedules:
        engine = build_engine(config, ParallelConfig(pp=ranks, pp_schedule=schedule))
        actions: list[Action] = []
        with pytest.MonkeyPatch.context() as patch:
            for name, kind in METHODS.items():
                patch.setattr(
                    PipelineForwardBackward, name, noted(kind, getattr(PipelineForwardBackward, name), actions)
                )
            engine.forward_backward(batch, CAUSAL)
        assert all(torch.isfinite(g).all() for g in engine.gradients().values())
        actual[schedule] = actions
    return actual


@pytest.mark.parametrize("ranks", [2, 4])
def test_schedules_have_the_bubble_of_the_formula(workers: Workers, ranks: int) -> None:
    """Whole backward passes: (p − 1) / (v·m + p − 1); split ones, where F = I = W: (p − 1) / (3·v·m + p − 1)."""
    by_rank = workers.run(one_step, ranks, PIPELINE_SCHEDULES, ranks)
    microbatches = 2 * ranks
    for schedule in PIPELINE_SCHEDULES:
        virtual = 1 if schedule in ("gpipe", "1f1b") else 2
        rank_of = stage_to_rank(schedule, ranks, virtual)
        actions_by_rank = [rank[schedule] for rank in by_rank]
        planned = build_schedule(schedule, ranks, virtual, microbatches)
        assert actions_by_rank == add_send_recv(planned, rank_of), schedule
        passes = [[action for action in rank if " " not in action.kind] for rank in actions_by_rank]
        work = (3 if schedule in SPLITS_BACKWARD else 1) * virtual * microbatches
        assert bubble_fraction(simulate_schedule(passes, rank_of, TIMES)) == pytest.approx(
            (ranks - 1) / (work + ranks - 1)
        ), schedule


def compare(names: Sequence[str], layouts: Sequence[ParallelConfig], backend: str) -> int:
    """Compare blocks compiled by a backend that makes no machine code, which would take minutes."""
    n_blocks = 0
    for name in names:
        config, batch = family_case(name, deep=False)
        model, objective, loss = one_device_reference(config, batch)
        for parallel in layouts:
            with compile_blocks_by(backend) as compilation:
                engine = build_engine(config, parallel, ADAMW, compile_blocks=True)
                stats = engine.forward_backward(microbatches(engine, batch), objective)
                assert stats.loss == pytest.approx(loss, rel=1e-12)
                assert model_gradient_errors(engine, model) == {}
            n_blocks += len(compilation.blocks)
    return n_blocks


@pytest.mark.parametrize(
    ("schedules", "backend"),
    [(["1f1b"], "eager"), pytest.param(["gpipe", "1f1b", "interleaved"], "aot_eager", marks=pytest.mark.slow)],
    ids=["as dynamo has it", "through autograd's graphs"],
)  # fmt: skip
def test_compiled_blocks_in_stages_have_the_gradients_of_one_device(
    workers: Workers, schedules: list[str], backend: str
) -> None:
    layouts = [ParallelConfig(pp=2, pp_schedule=schedule) for schedule in schedules]
    blocks = workers.run(compare, 2, ["llama"], layouts, backend, timeout=280.0)
    assert sum(blocks) == 2 * len(layouts)
