"""Frozen weights in every layout: one device's gradients for the rest, and not a bit of theirs moves."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

from megatfm.config import Config, ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.train.build import freeze
from megatfm.verify.verify import verify
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.grids import SLOW, cells
from tests.support.models import ADAMW, FAMILY_MODELS
from tests.support.parity import build_engine, local_block, microbatches, uneven_microbatches
from tests.support.workers import Workers

BELOW = ("*.embedding.*", "*.layers.0.*", "*.layers.1.attn.*")
FREEZE = {"llama": BELOW, "bert": BELOW, "t5": ("encoder.*",)}
"""Model → what of it is frozen: what lies below a block in the middle, or all of an encoder."""
NUMBERS = ("decoder.position.weight",)
"""Of T5's distances, one for each head: they don't decay."""
LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "zero3": ParallelConfig(dp_shard=2),
        "zero3, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
        "tp2": ParallelConfig(tp=2),
        "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
    },
    4: {
        "pp2 × zero3": ParallelConfig(pp=2, dp_shard=2),
        "zbv × zero1": ParallelConfig(pp=2, pp_schedule="zbv", dp_shard=2, zero=1),
        "zero2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=2),
    },
}


def frozen_model(config: ModelConfig, patterns: tuple[str, ...]) -> nn.Module:
    model = build(config)
    freeze(model, patterns)
    return model


def make_engine(config: ModelConfig, patterns: tuple[str, ...], parallel: ParallelConfig) -> NativeEngine:
    return build_engine(config, parallel, build_model=lambda config: frozen_model(config, patterns))


def wrong(name: str, parallel: ParallelConfig) -> set[str]:
    """What differs from one device, whose weights plain torch moves, in two steps."""
    config, patterns = FAMILY_MODELS[name], FREEZE[name]
    batch, reference = family_batch(config), frozen_model(config, patterns).double().train()
    initialise(reference, 7)
    engine = make_engine(config, patterns, parallel)
    named = dict(reference.named_parameters())
    assert all(named[n].requires_grad != any(fnmatchcase(n, one) for one in patterns) for n in named)
    trained = {n: p for n, p in named.items() if p.requires_grad}
    plain = torch.optim.AdamW(
        [
            {"params": [p for n, p in trained.items() if p.dim() == 2 and n not in NUMBERS]},
            {"params": [p for n, p in trained.items() if p.dim() == 1 or n in NUMBERS], "weight_decay": 0.0},
        ],
        lr=ADAMW.lr,
        betas=ADAMW.betas,
        eps=ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
    )
    terms = PassThroughObjective([])(reference, batch)
    objective, found = PassThroughObjective(list(terms)), set[str]()
    counts = objective.target_counts(batch)
    cut = uneven_microbatches if parallel.pp > 1 else microbatches
    for _ in range(2):
        reference.zero_grad()
        terms = objective(reference, batch)
        loss = torch.stack([objective.loss_weights[n] * terms[n] / counts[n] for n in terms]).sum()
        loss.backward()
        stats = engine.forward_backward(cut(engine, batch), objective)
        if stats.loss != pytest.approx(float(loss.detach()), rel=1e-9):
            found.add("loss")
        found |= wrong_gradients(engine, {n: p.grad for n, p in trained.items()})
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), ADAMW.max_grad_norm)
        plain.step()
        if engine.step(ADAMW.lr, ADAMW.max_grad_norm) != pytest.approx(float(norm), rel=1e-9):
            found.add("norm")
        for n, local in engine.local.items():
            wanted = local_block(engine, n, named[n].detach())
            same = torch.allclose(local, wanted, rtol=0, atol=1e-7) if n in trained else local.equal(wanted)
            found |= set() if same else {f"weight {n}"}
    with_state = {
        key.removeprefix("optimizer.").rpartition(".")[0]
        for key in engine.state_dict()
        if "optimizer." in key
    }
    return found | {f"state {n}" for n in with_state & named.keys() - trained.keys()}


def wrong_gradients(engine: NativeEngine, expected: dict[str, Any]) -> set[str]:
    gradients = engine.gradients()
    floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
    found = {n for n in engine.local if (n in gradients) != (n in expected)}
    for n in gradients.keys() & expected.keys():
        error = (gradients[n] - local_block(engine, n, expected[n])).norm() / max(expected[n].norm(), floor)
        found |= set() if error <= 1e-9 else {n}
    return {f"gradient {n}" for n in found}


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    for layout, parallel in layouts.items():
        assert not (found := wrong(name, parallel)), f"{layout}: {sorted(found)}"
    return list(layouts)


CASES = [
    case
    for ranks, layouts in LAYOUTS.items()
    for case in cells(dict.fromkeys(FREEZE, layouts), ranks, label=f" on {ranks}")
]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_the_rest_is_trained_as_on_one_device(
    workers: Workers, name: str, layouts: list[str], ranks: int
) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_shard": 2, "zero": 0}, marks=SLOW),
        {"dp_shard": 2, "zero": 1},
        pytest.param({"dp_shard": 2, "zero": 2}, marks=SLOW),
        {"pp": 2, "pp_schedule": "zbv"},
        {"pp": 2, "dp_shard": 2, "zero": 3},
    ],
    ids=["zero0", "zero1", "zero2", "zbv", "pp2 × zero3"],
)
def test_nothing_is_sent_of_them(parallel: dict[str, Any]) -> None:
    """Every byte is one that the closed forms expect, and these leave frozen gradients out."""
    model = {
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 4,
        "attention": {"n_heads": 4},
        "ffn": {"d_ff": 128},
    }
    found = verify(
        Config.model_validate(
            {
                "name": "frozen",
                "model": model,
                "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
                "optimizer": {"name": "adamw", "lr": 1e-3},
                "train": {
                    "steps": 1,
                    "global_batch": 8,
                    "micro_batch": 2,
                    "freeze": ["decoder.embedding.*", "decoder.layers.0.*", "decoder.layers.1.attn.*"],
                },
                "parallel": {"dp_shard": 1, **parallel},
            }
        )
    )
    assert not found.wrong
    assert not found.traffic_mismatches
    still = {one.name for one in found.gradients if one.norm == 0}
    assert "decoder.layers.0.ffn.w_up.weight" in still
    assert "decoder.layers.1.ffn.w_up.weight" not in still
