"""The comparison of one device with engines whose weights are frozen in part, adapters among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import Normal, initialise
from megatfm.layers.linear import Linear
from megatfm.layers.moe.experts import Experts
from megatfm.models import build
from megatfm.train.build import freeze
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.models import ADAMW, FAMILY_MODELS
from tests.support.parity import build_engine, layout_microbatches, local_block

BELOW_MIDDLE = ("*.embedding.*", "*.layers.0.*", "*.layers.1.attn.*")
FREEZE = {"llama": BELOW_MIDDLE, "bert": BELOW_MIDDLE, "t5": ("encoder.*",)}
"""Model → what of it is frozen: what lies below a block in the middle, or all of an encoder."""
UNDECAYED = ("decoder.position.weight",)
"""T5's biases by distance, one for each head: they don't decay."""


def frozen_model(config: ModelConfig, patterns: tuple[str, ...]) -> nn.Module:
    """A model whose parameters of these names are frozen."""
    model = build(config)
    freeze(model, patterns)
    return model


@cache
def frozen_builder(name: str) -> Callable[[ModelConfig], nn.Module]:
    """Return a function that builds a model with the frozen weights of this name."""
    patterns = FREEZE[name]
    named = dict(frozen_model(FAMILY_MODELS[name], patterns).named_parameters())
    assert all(named[n].requires_grad != any(fnmatchcase(n, pattern) for pattern in patterns) for n in named)
    return partial(frozen_model, patterns=patterns)


def frozen_errors(
    name: str, *layouts: ParallelConfig, fault: Callable[[pytest.MonkeyPatch], None] | None = None
) -> list[set[str]]:
    """Differences from one device of a model whose weights are frozen in part, by layout. fault: planted in engines."""
    return compare_two_steps(FAMILY_MODELS[name], frozen_builder(name), layouts, UNDECAYED, fault=fault)


@dataclass(frozen=True)
class ReferenceStep:
    """A step of one device: its loss, gradients, their norm, and all weights after it."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


@cache
def take_two_reference_steps(
    config_json: str, build_model: Callable[[ModelConfig], nn.Module], undecayed: Sequence[str]
) -> tuple[PassThroughObjective, list[ReferenceStep]]:
    """Train one device by plain torch, once in a process. undecayed: matrices without decay."""
    config = ModelConfig.model_validate_json(config_json)
    batch, reference = family_batch(config), build_model(config).double().train()
    initialise(reference, 7)
    trained = {n: p for n, p in reference.named_parameters() if p.requires_grad}
    decayed = [p for n, p in trained.items() if p.dim() > 1 and n not in undecayed]
    others = [p for n, p in trained.items() if p.dim() == 1 or n in undecayed]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay,
    )  # fmt: skip
    objective = PassThroughObjective(list(PassThroughObjective([])(reference, batch)))
    counts, steps = objective.target_counts(batch), []
    for _ in range(2):
        reference.zero_grad()
        terms = objective(reference, batch)
        loss = torch.stack([objective.loss_weights[n] * terms[n] / counts[n] for n in terms]).sum()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), ADAMW.max_grad_norm)
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in reference.named_parameters()}
        steps.append(ReferenceStep(float(loss.detach()), gradients, float(norm), weights))
    return objective, steps


def compare_two_steps(
    config: ModelConfig,
    build_model: Callable[[ModelConfig], nn.Module],
    layouts: Sequence[ParallelConfig],
    undecayed: Sequence[str] = (),
    recomputed: str = "none",
    fault: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> list[set[str]]:
    """Differences from one device in two steps, by layout. fault: planted after the steps of one device."""
    objective, steps = take_two_reference_steps(config.model_dump_json(), build_model, undecayed)
    batch = family_batch(config)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            fault(patch)
        engines = (
            build_engine(config, parallel, build_model=build_model, recomputed=recomputed) for parallel in layouts
        )
        return [find_layout_errors(engine, batch, objective, steps) for engine in engines]


def find_layout_errors(
    engine: NativeEngine, batch: dict[str, Tensor], objective: PassThroughObjective, steps: Sequence[ReferenceStep]
) -> set[str]:
    """Differences of an engine from these steps of one device."""
    errors = set[str]()
    for step in steps:
        stats = engine.forward_backward(layout_microbatches(engine, batch), objective)
        if stats.loss != pytest.approx(step.loss, rel=1e-9):
            errors.add("loss")
        errors |= wrong_gradients(engine, step.gradients)
        if engine.step(ADAMW.lr, ADAMW.max_grad_norm) != pytest.approx(step.norm, rel=1e-9):
            errors.add("norm")
        for n, local in engine.local.items():
            expected = local_block(engine, n, step.weights[n])
            is_trained = n in step.gradients
            same = torch.allclose(local, expected, rtol=0, atol=1e-7) if is_trained else local.equal(expected)
            errors |= set() if same else {f"weight {n}"}
    with_state = {
        key.removeprefix("optimizer.").rpartition(".")[0] for key in engine.state_dict() if "optimizer." in key
    }
    frozen = steps[-1].weights.keys() - steps[-1].gradients.keys()
    return errors | {f"state {n}" for n in with_state & frozen}


def wrong_gradients(engine: NativeEngine, expected: dict[str, Any]) -> set[str]:
    """Names of gradients that are wrong, missing, or there and not expected."""
    gradients = engine.gradients()
    floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
    actual = {n for n in engine.local if (n in gradients) != (n in expected)}
    for n in gradients.keys() & expected.keys():
        error = (gradients[n] - local_block(engine, n, expected[n])).norm() / max(expected[n].norm(), floor)
        actual |= set() if error <= 1e-9 else {n}
    return {f"gradient {n}" for n in actual}


LORA = {"rank": 3, "alpha": 6.0}
"""A rank that no number of processes divides."""


DIVISIBLE = FAMILY_MODELS["llama"].with_changes(
    {"d_model": 60, "attention.n_heads": 30, "attention.n_kv_heads": 30, "ffn.d_ff": 60}
)
"""A decoder whose sizes two, three and five ranks divide."""


def build_adapted(config: ModelConfig) -> nn.Module:
    """A model whose B are not 0 at first: then A would have no gradient."""
    model = build(config)
    for module in model.modules():
        if isinstance(module, Linear) and module.lora is not None:
            module.lora.b.initial = {"weight": Normal(0.2)}
        if isinstance(module, Experts):
            module.initial |= {name: Normal(0.2) for name in module.initial if name.endswith("_lora_b")}
    return model
