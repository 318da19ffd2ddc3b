"""Every router on every way of sharing experts, dropless and with a capacity, held to one device.

`test_experts.py` shows each router and each layout; these are the remaining pairs.
"""

from typing import Any

import pytest

from megatfm.config import ModelConfig, ParallelConfig
from tests.support.expert_parity import (
    DEEPSEEK_V3_ROUTER,
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_PIPELINE_LAYOUTS,
    EXPERT_TP_LAYOUTS,
    MOE_OPTIONS,
    compare_expert_layouts,
)
from tests.support.models import SMALL_MODEL
from tests.support.workers import Workers

pytestmark = pytest.mark.slow

ROUTERS: dict[str, dict[str, Any]] = {
    "v2": {"name": "deepseek_v2", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "aux_loss_coef": 0.3},
    "v3": DEEPSEEK_V3_ROUTER,
    "noisy": {"name": "noisy_top_k", "importance_loss_coef": 0.2, "load_loss_coef": 0.3},
    "second": {"name": "gshard", "aux_loss_coef": 0.3},
    "hash": {"name": "hash"},
    "plain": {"name": "top_k", "norm_topk_prob": False, "aux_loss_coef": 0.3, "z_loss_coef": 0.1},
}  # fmt: skip


def model(**ffn: Any) -> ModelConfig:
    """A block for each router; where experts are limited, some drop by position."""
    policies = {kind: {"drop_policy": "position"} for kind in ("second", "plain") if ffn}
    kinds = {
        f"layer_type.{kind}.ffn": {**MOE_OPTIONS, **ffn, **policies.get(kind, {}), "router": router}
        for kind, router in ROUTERS.items()
    }
    return ModelConfig.from_dotted(
        **{**SMALL_MODEL, "dropout": 0.2, "n_layers": 6, "layer_types": list(ROUTERS)}, **kinds
    )


MODELS = {"every router": model(), "every router, limited": model(capacity_factor=0.6)}
BESIDE = ("ep2 × replicas", "ep2 × tp2", "ep2 × pp2, 1f1b", "ep2 × pp2, zbv")
ACROSS = ("ep4 of 2 × tp2, zero3", "ep2 × tp2 by channels, zero3")
SHARED = {
    **{layout: EXPERT_LAYOUTS[4][layout] for layout in (*(f"ep4, zero{z}" for z in range(4)), *BESIDE)},
    **EXPERT_PIPELINE_LAYOUTS,
    **{layout: EXPERT_TP_LAYOUTS[4][layout] for layout in ACROSS},
}
CASES: dict[str, tuple[str, int, dict[str, ParallelConfig]]] = {
    "shared": ("every router", 4, SHARED),
    "parts of rows": ("every router", 4, EXPERT_CONTEXT_LAYOUTS),
    "limited": ("every router, limited", 4, SHARED),
    "limited, parts of rows": ("every router, limited", 4, EXPERT_CONTEXT_LAYOUTS),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_state_equal_one_device(workers: Workers, case: str) -> None:
    name, ranks, layouts = CASES[case]
    compared = workers.run(compare_expert_layouts, ranks, name, layouts, MODELS, timeout=500.0)
    assert compared[0] == list(layouts)
