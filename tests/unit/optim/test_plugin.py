"""The plugin of docs/guide/optimizers.md, from the config to a step."""

import re
import sys
from pathlib import Path

import pytest
import torch

from megatfm.config import load_config
from megatfm.describe import describe
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.models import build
from megatfm.optim.lr_schedules import SCHEDULES, schedule_factor
from megatfm.optim.parameters import OPTIMIZERS, optimizer_groups

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "optimizers.md"
OVERRIDES = [
    'plugins=["my_optimizers"]',
    'optimizer={name="momentum", lr=0.1, mass=0.5, layer_decay=0.5, weight_decay=0.25}',
    'lr_schedule={name="steps", every=3, factor=0.5, warmup_steps=2}',
    "model.vocab_size=16",
    "model.n_layers=1",
]


def test_an_optimizer_and_a_schedule_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r'^```python title="my_optimizers.py"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_optimizers.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (OPTIMIZERS, SCHEDULES):
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    config = load_config("quickstart", OVERRIDES)
    try:
        assert describe(config).optimizer_bytes == 4  # imports the plugin
        (group,) = optimizer_groups(config.optimizer, build(config.model))
    finally:
        sys.modules.pop("my_optimizers", None)
    shapes = {name: p.shape for name, p in build(config.model).named_parameters()}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    optimizer = TorchOptimizer(group, weights)
    for _ in range(2):
        optimizer.step({name: torch.ones(shape) for name, shape in shapes.items()}, 0.1)
    # w = 1, g = 1 twice, with mass 0.5; the matrices' gradient has a quarter of the weight added.
    by_hand = {True: (1 - 0.05 * 1.25, 1.25), False: (1 - 0.05, 1.0)}
    for name, decays in (("wq.weight", True), ("norm.weight", False)):
        block = next(weight for key, weight in weights.items() if ".layers.0." in key and key.endswith(name))
        first, buffer = by_hand[decays]
        second = first - 0.05 * (0.5 * buffer + 1 + 0.25 * decays * first)
        torch.testing.assert_close(block, torch.full_like(block, second))
    assert [schedule_factor(config.lr_schedule, step, 10) for step in range(1, 8)] == [
        0.5,
        1,
        0.5,
        0.5,
        0.5,
        0.25,
        0.25,
    ]
