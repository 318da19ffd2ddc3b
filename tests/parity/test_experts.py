"""Experts on every layout: gradients of one device, and the same state of routers, over two steps.

State follows from the counts of a whole global batch, so the second step's choices and balance depend on the first's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.batches import family_batch
from tests.support.expert_parity import (
    CONTEXT_EXPERT_MODELS,
    DEEPSEEK_V3_ROUTER,
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_MODELS,
    EXPERT_MODELS_BY_RANKS,
    EXPERT_PIPELINE_LAYOUTS,
    EXPERT_TP_LAYOUTS,
    EXPERT_TP_MODELS,
    MOE_OPTIONS,
    SCHEDULED_MODELS,
    TP2,
    WHOLE_ROW_LAYOUTS,
    compare_expert_layouts,
    expert_layouts_of,
    objective_for,
)
from tests.support.layouts import EXTENDED, SLOW, make_cases
from tests.support.models import ADAMW, SMALL_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LONGER: dict[int, list[str]] = {
    1: [],
    2: ["replicas", "zero0", "zero2", "ep2, zero2", "pp2"],
    4: ["ep2 of 4, zero0", "ep2 of 4, zero2", "ep4, zero1", "ep4, zero3", "ep2 × replicas, zero0", "ep2 × pp2, 1f1b",
        "ep2 × pp2, zero1", "zero3 2 × tp2", "zero1 2 × tp2"],
    8: ["ep2 of 4 × tp2", "ep2 of 4 × replicas, zero1"],
}  # fmt: skip
"""Layouts of extended cases: `make test` has each of their axes with experts in others."""


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"),
    [
        cell
        for ranks, names in EXPERT_MODELS_BY_RANKS.items()
        for cell in make_cases(
            dict.fromkeys(names, expert_layouts_of(ranks)), ranks, extended=LONGER[ranks], label=f" on {ranks}"
        )
    ],
)
def test_gradients_and_state_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: expert_layouts_of(ranks)[layout] for layout in layouts}
    assert workers.run(compare_expert_layouts, ranks, name, tried, timeout=300.0)[0] == layouts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXTENDED if name == "top-k" else SLOW) for name in SCHEDULED_MODELS]
)
def test_stages_go_in_any_order(workers: Workers, name: str) -> None:
    assert workers.run(compare_expert_layouts, 4, name, EXPERT_PIPELINE_LAYOUTS, timeout=300.0)[0] == list(
        EXPERT_PIPELINE_LAYOUTS
    )


AGAIN = {
    *(f"ep2 × tp2 by channels, zero{zero}" for zero in (1, 3)), *(f"ep4 of 2 × tp2, zero{zero}" for zero in (0, 2)),
    *(f"ep2 of 2 × tp2, zero{zero}" for zero in (1, 3)), "ep2 of tp4", "ep2 of tp2 × pp2, 1f1b", "ep2 × cp2, zero1",
    "ep4 of 2 × cp2, zero3",
}  # fmt: skip
"""Slow: what differs in them the others show, too."""
ON_FOUR = [name for name, ranks in EXPERT_TP_MODELS if ranks == 4]
SOONER = [layout for layout in EXPERT_TP_LAYOUTS[4] if layout not in AGAIN]
LONGER_TP = (
    "ep2 × tp2 by channels, zero2", "ep4 of 2 × tp2, zero3", "ep2 of 2 × tp2, zero0", "ep4 of tp4",
    "ep2 of tp2 × replicas", "tp2 by channels × pp2",
)  # fmt: skip
LATER = [layout for layout in EXPERT_TP_LAYOUTS[4] if layout in AGAIN]


@pytest.mark.parametrize(("name", "layouts", "ranks"), [
    *make_cases({"top-k": EXPERT_TP_LAYOUTS[2]}, 2),
    *make_cases(dict.fromkeys(ON_FOUR, SOONER), 4, extended=LONGER_TP),
    *(pytest.param(name, LATER, 4, marks=SLOW, id=f"{name}, again") for name in ON_FOUR),
])  # fmt: skip
def test_tensor_parallel_ranks_take_experts_in_other_ways(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: EXPERT_TP_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_expert_layouts, ranks, name, tried, timeout=300.0)[0] == layouts


SOONER_CONTEXT = [layout for layout in EXPERT_CONTEXT_LAYOUTS if layout not in AGAIN]


@pytest.mark.parametrize(("name", "layouts"), [
    ("by batch", SOONER_CONTEXT[::2]),
    pytest.param("by batch", SOONER_CONTEXT[1::2], marks=EXTENDED),
    ("switch", [*WHOLE_ROW_LAYOUTS[:1]]),
    pytest.param("switch", [*WHOLE_ROW_LAYOUTS[1:]], marks=EXTENDED),
        pytest.param("by batch", [layout for layout in EXPERT_CONTEXT_LAYOUTS if layout in AGAIN], marks=SLOW),
    pytest.param(
        "switch",
        [layout for layout in EXPERT_CONTEXT_LAYOUTS if layout not in WHOLE_ROW_LAYOUTS],
        marks=SLOW,
    ),
    *(
        pytest.param(name, [*EXPERT_CONTEXT_LAYOUTS], marks=SLOW)
        for name in CONTEXT_EXPERT_MODELS
        if name != "switch"
    ),
    ("expert-choice", [*WHOLE_ROW_LAYOUTS[1:]]),
        pytest.param("expert-choice", [*WHOLE_ROW_LAYOUTS[:1]], marks=EXTENDED),
    pytest.param(
        "expert-choice",
        [layout for layout in EXPERT_CONTEXT_LAYOUTS if layout not in WHOLE_ROW_LAYOUTS],
        marks=SLOW,
    ),
], ids=lambda value: value if isinstance(value, str) else f"{len(value)} layouts")  # fmt: skip
def test_rows_are_cut_beside_experts(workers: Workers, name: str, layouts: list[str]) -> None:
    """Capacity and balance of each row, which depend on all of its tokens, are covered, too."""
    tried = {layout: EXPERT_CONTEXT_LAYOUTS[layout] for layout in layouts}
    assert workers.run(compare_expert_layouts, 4, name, tried, timeout=300.0)[0] == layouts


def resume(folder: Path, name: str, parallel: ParallelConfig, between: ParallelConfig) -> list[str]:
    """Two steps, a checkpoint (which another layout opens and saves), a third step: the bits of three steps."""
    config = EXPERT_MODELS[name]
    batch = family_batch(config)
    objective = objective_for(config, batch)

    def train(engine: NativeEngine) -> None:
        engine.forward_backward(microbatches(engine, batch), objective)
        engine.step(1e-2, clip=0.3)

    engine = build_engine(config, parallel, ADAMW)
    for _ in range(2):
        train(engine)
    resumed = engine
    for step, layout in enumerate((between, parallel), 1):
        path = checkpoint.save(folder, step, resumed.state_dict(), {}, keep=3)
        resumed = build_engine(config, layout, ADAMW)
        room = resumed.empty_state_dict(checkpoint.read_tensor_specs(path))
        checkpoint.load(path, room)
        resumed.load_state_dict(room)
    train(engine)
    train(resumed)
    after = resumed.weights()
    assert after.keys() == engine.weights().keys()
    for key, box in engine.weights().items():
        assert torch.equal(box.tensor, after[key].tensor), key
    names = checkpoint.read_tensor_specs(folder / "step-00000001")
    return [key for key in names if key.endswith((".shares", ".router.bias"))]


RESUMED = {
    "tp2": (TP2, ParallelConfig(dp_shard=2, zero=1)),
    "zero3": (ParallelConfig(dp_shard=2), TP2),
    "ep2": (ParallelConfig(dp_shard=2, ep=2), ParallelConfig(dp_shard=2, zero=1)),
    "ep2 between": (ParallelConfig(dp_shard=2, zero=0), ParallelConfig(dp_shard=2, ep=2, zero=1)),
    "ep2 of tp2, channels between": (EXPERT_TP_LAYOUTS[2]["ep2 of tp2"], EXPERT_TP_LAYOUTS[2]["tp2 by channels"]),
}  # fmt: skip


STATE = {"top-k": "shares", "deepseek-v3": "router.bias"}


@pytest.mark.parametrize(
    ("name", "layouts"), make_cases(dict.fromkeys(STATE, RESUMED), extended=["tp2", "zero3", "ep2"])
)
def test_a_resumed_run_has_the_same_bits(workers: Workers, tmp_path: Path, name: str, layouts: list[str]) -> None:
    """Through a checkpoint that another layout has opened and saved as it was."""
    for i, layout in enumerate(layouts):
        stored = workers.run(resume, 2, tmp_path / str(i), name, *RESUMED[layout], timeout=180.0)[0]
        assert stored == [f"model.decoder.layers.1.ffn.{STATE[name]}"]


ROUTERS: dict[str, dict[str, Any]] = {
    "v2": {"name": "deepseek_v2", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "aux_loss_coef": 0.3},
    "v3": DEEPSEEK_V3_ROUTER,
    "noisy": {"name": "noisy_top_k", "importance_loss_coef": 0.2, "load_loss_coef": 0.3},
    "second": {"name": "gshard", "aux_loss_coef": 0.3},
    "hash": {"name": "hash"},
    "plain": {"name": "top_k", "norm_topk_prob": False, "aux_loss_coef": 0.3, "z_loss_coef": 0.1},
}  # fmt: skip


def model_with_every_router(**ffn: Any) -> ModelConfig:
    """A block for each router; where experts are limited, some drop by position."""
    policies = {kind: {"drop_policy": "position"} for kind in ("second", "plain") if ffn}
    kinds = {
        f"layer_type.{kind}.ffn": {**MOE_OPTIONS, **ffn, **policies.get(kind, {}), "router": router}
        for kind, router in ROUTERS.items()
    }
    return ModelConfig.from_dotted(
        **{**SMALL_MODEL, "dropout": 0.2, "n_layers": 6, "layer_types": list(ROUTERS)}, **kinds
    )


ROUTER_MODELS = {
    "every router": model_with_every_router(),
    "every router, limited": model_with_every_router(capacity_factor=0.6),
}
BESIDE = ("ep2 × replicas", "ep2 × tp2", "ep2 × pp2, 1f1b", "ep2 × pp2, zbv")
ACROSS = ("ep4 of 2 × tp2, zero3", "ep2 × tp2 by channels, zero3")
SHARED = {
    **{layout: EXPERT_LAYOUTS[4][layout] for layout in (*(f"ep4, zero{z}" for z in range(4)), *BESIDE)},
    **EXPERT_PIPELINE_LAYOUTS,
    **{layout: EXPERT_TP_LAYOUTS[4][layout] for layout in ACROSS},
}
ROUTER_CASES: dict[str, tuple[str, int, dict[str, ParallelConfig]]] = {
    "shared": ("every router", 4, SHARED),
    "parts of rows": ("every router", 4, EXPERT_CONTEXT_LAYOUTS),
    "limited": ("every router, limited", 4, SHARED),
    "limited, parts of rows": ("every router, limited", 4, EXPERT_CONTEXT_LAYOUTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUTER_CASES)
def test_every_router_on_every_layout_equals_one_device(workers: Workers, case: str) -> None:
    name, ranks, layouts = ROUTER_CASES[case]
    compared = workers.run(compare_expert_layouts, ranks, name, layouts, ROUTER_MODELS, timeout=500.0)
    assert compared[0] == list(layouts)
