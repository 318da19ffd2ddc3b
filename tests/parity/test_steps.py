"""Optimizer steps under a layout leave the weights that plain torch optimizers leave, to 1e-7."""

from collections.abc import Sequence

import pytest
import torch

from megatfm.config import AdamWConfig
from tests.support.batches import CAUSAL, global_batch
from tests.support.layouts import DATA_AND_TENSOR_LAYOUTS, RANKS_OF_LAYOUT
from tests.support.models import ADAMW, MUON, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.workers import Workers

STEPS = 5
BOTH = ("zero1 on 2", "zero3 on 2", "tp2", "zero1 2 × tp2", "zero3 2 × tp2")
"""Layouts under which Muon is tried too; AdamW under all."""


def train(layouts: Sequence[str], optimizer: AdamWConfig) -> dict[str, float]:
    """Largest difference of a weight from plain torch optimizers with plain clipping, for each layout."""
    engines = {
        layout: build_engine(UNTIED_MODEL, DATA_AND_TENSOR_LAYOUTS[layout], optimizer) for layout in layouts
    }
    reference = one_device(UNTIED_MODEL)
    named = dict(reference.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() == 2 and (optimizer.name == "muon" and "layers" in n)]
    decayed = [p for n, p in named.items() if p.dim() == 2 and n not in matrices]
    adamw = torch.optim.AdamW(
        [{"params": decayed}, {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}],
        lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
    )  # fmt: skip
    plain = [adamw]
    if matrices:
        plain.append(torch.optim.Muon([named[n] for n in matrices], lr=0.02, momentum=0.95, weight_decay=0.1))
    for step in range(STEPS):
        batch = global_batch(seed=step)
        one_device_gradients(reference, batch)
        expected_norm = torch.nn.utils.clip_grad_norm_(list(named.values()), optimizer.max_grad_norm)
        for torch_optimizer in plain:
            torch_optimizer.step()
        for engine in engines.values():
            engine.forward_backward(microbatches(engine, batch), CAUSAL)
            assert engine.step(optimizer.lr, optimizer.max_grad_norm) == pytest.approx(
                float(expected_norm), rel=1e-6
            )
    return {
        layout: max(
            float((local_block(engine, n, p.detach()) - engine.local[n]).abs().max())
            for n, p in named.items()
            if engine.local[n].numel()
        )
        for layout, engine in engines.items()
    }


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [(ADAMW, 1), (ADAMW, 2), (ADAMW, 4), (MUON, 2), (MUON, 4)],
    ids=["adamw on 1", "adamw on 2", "adamw on 4", "muon on 2", "muon on 4"],
)
def test_steps_equal_plain_torch(workers: Workers, optimizer: AdamWConfig, ranks: int) -> None:
    layouts = [
        layout
        for layout in DATA_AND_TENSOR_LAYOUTS
        if RANKS_OF_LAYOUT[layout] == ranks and (optimizer is ADAMW or layout in BOTH)
    ]
    for differences in workers.run(train, ranks, layouts, optimizer):
        assert list(differences) == layouts
        assert max(differences.values()) <= 1e-7, differences
