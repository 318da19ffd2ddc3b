"""Bytes that a step sends equal the closed forms, by axis, collective and rank; pipelines keep the schedule's order."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatfm.config import Config, ModelConfig, MuonConfig, ParallelConfig
from megatfm.config.objective import (
    CausalObjective,
    MaskedObjective,
    NextSentenceObjective,
    PermutationObjective,
    ReplacedTokenObjective,
    SpanCorruptionObjective,
)
from megatfm.engines.native import replicated
from megatfm.engines.pipeline import PipelineForwardBackward, StepState
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks
from megatfm.parallel.pipeline_schedule import (
    SPLITS_BACKWARD,
    Action,
    Kind,
    add_send_recv,
    build_schedule,
    stage_to_rank,
)
from megatfm.parallel.pipeline_stages import PipelineStage
from megatfm.verify import expected_weights
from megatfm.verify.expected import compute_expected_traffic
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import find_traffic_mismatches
from tests.support.batches import CAUSAL, family_case, global_batch
from tests.support.layouts import (
    PIPELINE_SCHEDULES,
    SLOW,
    bubble_fraction,
    count_traffic,
    list_traffic_mismatches,
    make_cases,
    make_cases_by_ranks,
    simulate_schedule,
    traffic_config,
)
from tests.support.models import ADAMW, FAMILY_MODELS
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    microbatches,
    model_gradient_errors,
    one_device_reference,
)
from tests.support.workers import Workers

WITHOUT_DROPOUT = {"dropout": 0.0, "attention.dropout": 0.0, "ffn.dropout": 0.0, "drop_path": 0.0}
NEXT_TOKENS = CausalObjective()
CASES = {
    "gpt": NEXT_TOKENS, "llama": NEXT_TOKENS, "bert": NextSentenceObjective(), "albert": MaskedObjective(),
    "t5": SpanCorruptionObjective(), "xlnet": PermutationObjective(), "electra": ReplacedTokenObjective(),
}  # fmt: skip
MANY = ("gpt", "bert", "t5", "electra", "xlnet")
"""Are counted under all layouts, the others under those without stages."""
LAYOUTS = {
    2: {
        "zero0": ParallelConfig(dp_shard=2, zero=0), "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
        "zero1": ParallelConfig(dp_shard=2, zero=1), "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero2, shards": ParallelConfig(dp_shard=2, zero=2, grad_accumulation="sharded"),
        "zero3": ParallelConfig(dp_shard=2), "zero3, shards": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
        "tp2": ParallelConfig(tp=2, dp_shard=1),
        "tp2 without sequence parallel": ParallelConfig(tp=2, dp_shard=1, sequence_parallel=False),
    },
    4: {
        "zero0 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=0),
        "zero1 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=1),
        "hsdp": ParallelConfig(dp_replicate=2, dp_shard=2), "tp4": ParallelConfig(tp=4, dp_shard=1),
        "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1), "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    },
}  # fmt: skip
LONGER = {2: ["replicas", "zero2, shards"], 4: ["zero0 2 × replicas 2"]}
"""Layouts of extended cases: what is sent along each of their axes `make test` counts in others."""
STAGES = {
    2: {f"pp2 {schedule}": ParallelConfig(pp=2, dp_shard=1, pp_schedule=schedule) for schedule in PIPELINE_SCHEDULES},
    4: {
        **{
            f"pp4 {schedule}": ParallelConfig(pp=4, dp_shard=1, pp_schedule=schedule) for schedule in PIPELINE_SCHEDULES
        },
        "pp2 × tp2": ParallelConfig(pp=2, tp=2, dp_shard=1),
        "pp2 × zero0": ParallelConfig(pp=2, dp_shard=2, zero=0),
        "pp2 × zero1": ParallelConfig(pp=2, dp_shard=2, zero=1),
        "pp2 × zero2": ParallelConfig(pp=2, dp_shard=2, zero=2),
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2),
        "pp2 gpipe × zero3": ParallelConfig(pp=2, dp_shard=2, pp_schedule="gpipe"),
        "pp2 interleaved × zero3": ParallelConfig(pp=2, dp_shard=2, pp_schedule="interleaved"),
        "pp2 zbv × zero3": ParallelConfig(pp=2, dp_shard=2, pp_schedule="zbv"),
    },
    8: {
        "tp2 × pp2 × zero3": ParallelConfig(tp=2, pp=2, dp_shard=2),
        "tp2 × pp2 zbv × replicas": ParallelConfig(tp=2, pp=2, dp_replicate=2, dp_shard=1, pp_schedule="zbv"),
    },
}
LONGER_STAGES = {
    2: ["pp2 gpipe", "pp2 interleaved-zero-bubble", "pp2 dualpipev"],
    4: ["pp4 gpipe", "pp4 interleaved", "pp4 zbv", "pp2 × zero0", "pp2 × zero2", "pp2 gpipe × zero3",
        "pp2 interleaved × zero3"],
}  # fmt: skip


def case(name: str, parallel: ParallelConfig) -> Config:
    """A model with an objective that uses all of its heads, of seven blocks if eight stages are made of it."""
    changes: dict[str, Any] = {
        "extra_heads": {k: v for k, v in FAMILY_MODELS[name].extra_heads.items() if k != "boundary"}
    }
    if parallel.pp * parallel.stages_per_rank > 4:
        changes["n_layers"] = 7
    return traffic_config(FAMILY_MODELS[name].with_changes(changes), CASES[name], parallel)


@pytest.mark.parametrize(("name", "layouts", "ranks"), make_cases_by_ranks(CASES, LAYOUTS, extended=LONGER))
def test_counted_is_expected(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    configs = {layout: case(name, LAYOUTS[ranks][layout]) for layout in layouts}
    assert list_traffic_mismatches(workers, ranks, configs) == {}


@pytest.mark.parametrize(("name", "layouts", "ranks"), [
    *make_cases_by_ranks(MANY, {2: STAGES[2], 4: STAGES[4]}, extended=LONGER_STAGES),
    *make_cases(dict.fromkeys(MANY[:2], STAGES[8]), 8, extended=["tp2 × pp2 zbv × replicas"], label=" on 8"),
    *(pytest.param(name, list(STAGES[8]), 8, id=f"{name} on 8", marks=SLOW) for name in MANY[2:]),
])  # fmt: skip
def test_counted_is_expected_of_stages(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    configs = {layout: case(name, STAGES[ranks][layout]) for layout in layouts}
    assert list_traffic_mismatches(workers, ranks, configs) == {}


def bucket_misses(config: Config, elements: int) -> list[str]:
    """Flows that differ where messages hold at most so many elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", elements)
        patch.setattr(expected_weights, "BUCKET_NUMEL", elements)
        [answer] = count_traffic([config])
        expected = compute_expected_traffic(config, draw_batch(config))[dist.get_rank()]
        assert max(flow.calls for flow in answer.traffic if flow.axis == "dp_shard") > 5
        return find_traffic_mismatches([answer], [expected])


@pytest.mark.parametrize("zero", [0, 1])
def test_counted_is_expected_of_several_messages(workers: Workers, zero: int) -> None:
    """A tensor of a message of its own, and several in one."""
    config = case("llama", ParallelConfig(dp_shard=2, zero=zero))
    assert not any(workers.run(bucket_misses, 2, config, 2000))


WHOLE_TENSORS = {
    2: ("zero0", "zero3", "tp2"),
    4: ("hsdp", "zero1 2 × tp2", "zero3 2 × tp2", "pp2 × tp2", "pp2 × zero3"),
}


@pytest.mark.parametrize("ranks", WHOLE_TENSORS)
def test_counted_is_expected_of_optimizers_of_whole_tensors(workers: Workers, ranks: int) -> None:
    layouts = LAYOUTS[ranks] | STAGES[ranks]
    muon = MuonConfig(lr=1e-3)
    configs = {
        layout: traffic_config(FAMILY_MODELS["llama"], NEXT_TOKENS, layouts[layout], optimizer=muon)
        for layout in WHOLE_TENSORS[ranks]
    }
    assert list_traffic_mismatches(workers, ranks, configs) == {}


@pytest.mark.parametrize(
    "layouts",
    [["tp2"], pytest.param(["tp2 without sequence parallel", "zero3"], marks=SLOW)],
    ids=["tp2", "the others"],
)
def test_counted_is_expected_of_blocks_that_are_computed_again(workers: Workers, layouts: list[str]) -> None:
    """Norm and dropout, which save tensors after the last sum, come before or after it, or not at all."""
    configs = {
        f"{name}, {layout}, {how}": traffic_config(
            FAMILY_MODELS[name].with_changes(dropped), CASES[name], LAYOUTS[2][layout], recompute=how
        )
        for name, dropped in (("gpt", {}), ("gpt", WITHOUT_DROPOUT), ("albert", {}), ("t5", WITHOUT_DROPOUT))
        for layout in layouts
        for how in ("full", "selective")
    }
    assert list_traffic_mismatches(workers, 2, configs) == {}


DIVISIBLE = ModelConfig(vocab_size=96, d_model=32, n_layers=2, attention={"n_heads": 4}, ffn={"d_ff": 48})
SCALARS = 1000
"""Bytes that sums of losses and counts, and the gradient's norm, take at most; no weight or activation is so small."""


def test_sums_are_those_of_the_papers(workers: Workers) -> None:
    """In elements of float64, b = 2 rows of s = 12 tokens, two micro-batches a step."""
    with torch.device("meta"):
        model = build(DIVISIBLE)
    everything = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for block in iter_blocks(model) for p in block.parameters())
    residual, m, half = 2 * 12 * 32, 2, 1 / 2
    tp = m * (8 * DIVISIBLE.n_layers + 4) * residual * half  # 4 more for embedding and head
    expected = {
        "zero0": 2 * everything * half,
        "zero1": 2 * everything * half,
        "zero2": 2 * everything * half,
        "zero2, shards": (m + 1) * everything * half,
        # What no block owns is gathered once for both passes.
        "zero3": ((m + 1) * everything + m * in_blocks) * half,
        "zero3, shards": (2 * m * everything + m * in_blocks) * half,
        "tp2": tp,
        "tp2 without sequence parallel": tp,
    }
    configs = [traffic_config(DIVISIBLE, NEXT_TOKENS, LAYOUTS[2][layout]) for layout in expected]
    for answers in workers.run(count_traffic, 2, configs):
        for layout, answer in zip(expected, answers, strict=True):
            sent = sum(flow.sent_bytes for flow in answer.traffic)
            if layout == "tp2":  # norms' gradients
                sent -= next(f.sent_bytes for f in answer.traffic if f.collective == "all_reduce")
            if "tp2" in layout:
                sent -= m * 3 * 24 * 8  # the loss over the vocabulary: 3 numbers a token
            assert 0 <= sent - expected[layout] * 8 < SCALARS, layout


def test_recomputing_repeats_gathers_and_few_sums(workers: Workers) -> None:
    """Two gathers a layer; "full" stops before the second scatter, "selective" keeps what both gave."""
    how = ("none", "full", "selective")
    configs = [traffic_config(DIVISIBLE, NEXT_TOKENS, LAYOUTS[2]["tp2"], recompute=item) for item in how]
    blocks_run = 2 * DIVISIBLE.n_layers  # in two micro-batches
    for answers in workers.run(count_traffic, 2, configs):
        calls = [{f.collective: f.calls for f in answer.traffic} for answer in answers]
        none, full, selective = (Counter(calls_by_name) for calls_by_name in calls)
        assert full - none == Counter(all_gather=2 * blocks_run, reduce_scatter=blocks_run)
        assert selective - none == Counter(all_gather=2 * blocks_run)


SHALLOW = ModelConfig(vocab_size=96, d_model=8, n_layers=1, attention={"n_heads": 2}, ffn={"d_ff": 8})
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
        assert bubble_fraction(simulate_schedule(passes, rank_of)) == pytest.approx((ranks - 1) / (work + ranks - 1)), (
            schedule
        )


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
