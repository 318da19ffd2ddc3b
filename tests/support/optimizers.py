"""Every optimizer, as configs."""

from typing import Any

from megatfm.config import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OptimizerSection,
    ScheduleFreeConfig,
    SoapConfig,
)

OPTIMIZER_OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": 0.8}
OPTIMIZERS: dict[str, OptimizerSection] = {
    "adamw": AdamWConfig(**OPTIMIZER_OPTIONS),
    "adamw, short moments": AdamWConfig(**OPTIMIZER_OPTIONS, moments_dtype="bf16"),
    "muon": MuonConfig(**OPTIMIZER_OPTIONS),
    "soap": SoapConfig(**OPTIMIZER_OPTIONS, precondition_frequency=2, max_precond_dim=32),
    "adafactor": AdafactorConfig(**OPTIMIZER_OPTIONS),
    "lamb": LambConfig(**OPTIMIZER_OPTIONS),
    "lion": LionConfig(**OPTIMIZER_OPTIONS),
    "schedule_free_adamw": ScheduleFreeConfig(**OPTIMIZER_OPTIONS),
}
