"""Every layout and every model family has the gradients of one device in float64; steps are those of plain torch.

Within ‖g−r‖ ≤ 1e-9·max(‖r‖, 1e-6·‖all gradients‖), also with dropout, which is keyed by row. A batch goes through the
engine in micro-batches and through the plain model all at once. The loss of each source of rows is that of its rows
computed one by one from all logits.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import AdamWConfig, MuonConfig, ParallelConfig
from megatfm.models import build
from tests.support.batches import CAUSAL, family_case, global_batch
from tests.support.layouts import (
    DATA_AND_TENSOR_LAYOUTS,
    EXTENDED,
    FAMILY_LAYOUTS,
    RANKS_OF_LAYOUT,
    SLOW,
    choose_cells,
    deal_layouts,
    make_cases,
    make_cases_by_ranks,
)
from tests.support.models import ADAMW, FAMILY_NAMES, MUON, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    gradient_errors,
    local_block,
    microbatches,
    one_device,
    one_device_gradients,
    one_device_reference,
)
from tests.support.source_losses import DECODER, ENCODER, check_losses_by_source
from tests.support.workers import Workers

MODELS = {"untied": UNTIED_MODEL, "tied": TIED_MODEL}


@cache
def compute_reference(model: str) -> tuple[nn.Module, float, dict[str, Tensor]]:
    """One device's weights, loss and gradients of a batch, once in a process for all layouts."""
    reference = one_device(MODELS[model])
    return reference, *one_device_gradients(reference, global_batch(seed=3))


def compare_gradients(model: str, parallel: ParallelConfig) -> int:
    engine, (reference, loss, expected) = build_engine(MODELS[model], parallel, ADAMW), compute_reference(model)
    for name, parameter in reference.named_parameters():
        assert torch.equal(local_block(engine, name, parameter.detach()), engine.local[name]), f"initial {name} differs"
    batch = global_batch(seed=3)
    stats = engine.forward_backward(microbatches(engine, batch), CAUSAL)
    assert stats.target_counts == {"causal": int((batch["targets"] != -100).sum())}
    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert gradient_errors(engine, expected) == {}
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert engine.step(0.0, clip=0.0) == pytest.approx(float(norm), rel=1e-12)
    evaluated = engine.evaluate(microbatches(engine, batch), CAUSAL)
    assert evaluated.loss == pytest.approx(loss, rel=1e-12)
    return len(expected)


@pytest.mark.parametrize(
    ("name", "layouts"),
    make_cases(dict.fromkeys(("untied", "tied"), DATA_AND_TENSOR_LAYOUTS), always=["tp2", "zero3 2 × tp2"]),
)
def test_layouts_have_the_gradients_of_one_device(workers, name, layouts):
    for layout in layouts:
        ranks = RANKS_OF_LAYOUT[layout]
        compared = workers.run(compare_gradients, ranks, name, DATA_AND_TENSOR_LAYOUTS[layout])
        assert compared == [len(list(build(MODELS[name]).parameters()))] * ranks


def compare_family(name: str, layouts: list[str]) -> list[str]:
    """The gradients of these layouts; those that were compared."""
    config, batch = family_case(name, deep=False)
    reference, objective, loss = one_device_reference(config, batch)
    expected = {n: p.grad for n, p in reference.named_parameters()}
    compared = []
    for layout in layouts:
        engine = build_engine(config, FAMILY_LAYOUTS[dist.get_world_size()][layout], ADAMW)
        for n, parameter in reference.named_parameters():
            initial = local_block(engine, n, parameter.detach())
            assert torch.equal(initial, engine.local[n]), f"{layout}: initial {n} differs"
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert gradient_errors(engine, expected) == {}, layout
        compared.append(layout)
    return compared


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), make_cases_by_ranks(FAMILY_NAMES, FAMILY_LAYOUTS, always=["tp2"])
)
def test_families_have_the_gradients_of_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    (compared, *_) = workers.run(compare_family, ranks, name, layouts)
    assert compared == layouts


STEPS = 3
BOTH = ("zero1 on 2", "zero3 on 2", "tp2", "zero1 2 × tp2", "zero3 2 × tp2")
"""Layouts under which Muon is tried too; AdamW under all."""


def train(layouts: Sequence[str], optimizer: AdamWConfig | MuonConfig) -> dict[str, float]:
    """Largest difference of a weight from plain torch optimizers with plain clipping, for each layout."""
    engines = {layout: build_engine(UNTIED_MODEL, DATA_AND_TENSOR_LAYOUTS[layout], optimizer) for layout in layouts}
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
            assert engine.step(optimizer.lr, optimizer.max_grad_norm) == pytest.approx(float(expected_norm), rel=1e-6)
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
    [(ADAMW, 1), (ADAMW, 2), (ADAMW, 4), (MUON, 2), pytest.param(MUON, 4, marks=EXTENDED)],
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


SOURCE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": (DECODER, {}),
    "future heads, zero1": (DECODER | {"n_mtp_heads": 2}, {"dp_shard": 2, "zero": 1}),
    "zero3 x tp": (DECODER, {"dp_shard": 2, "tp": 2}),
    "tp without sequence parallelism": (DECODER, {"tp": 2, "sequence_parallel": False}),
    "pp x cp": (DECODER, {"pp": 2, "cp": 2, "pp_schedule": "1f1b"}),
    "zero bubble": (DECODER, {"pp": 2, "pp_schedule": "zbv"}),
    "sparse head, tp": (ENCODER, {"tp": 2}),
    "sparse head, cp": (ENCODER, {"cp": 2}),
}


@pytest.mark.parametrize("case", SOURCE_CASES)
def test_the_loss_of_each_source_is_that_of_its_rows(workers: Workers, case: str) -> None:
    """DeepSpeed's is in test_deepspeed, whose processes have imported it."""
    check_losses_by_source(workers, *SOURCE_CASES[case])


GRID = {"a": ["w", "x", "y"], "b": ["x", "y", "z"], "c": ["x"], "d": ["x", "w"]}


def test_everybody_is_dealt_a_share() -> None:
    square = dict.fromkeys("abc", "xyz")
    assert deal_layouts(square) == {"a": ["x"], "b": ["y"], "c": ["z"]}
    assert all(len(hand) == len(set(hand)) == 2 for hand in deal_layouts(square, rounds=2).values())
    hands = deal_layouts(GRID)
    assert all(hands.values())
    assert set().union(*hands.values()) == set("wxyz")
    assert all(set(hand) <= set(GRID[model]) for model, hand in hands.items())


def test_make_test_has_each_layout_and_each_model() -> None:
    """One process is no layout, unless there is nothing else."""
    dealt = {1: {"a": ["w"], "b": ["w"]}, 2: {"a": ["x"], "b": ["y", "z"]}, 4: {"a": ["x"], "b": ["x"], "c": ["x"]}}
    chosen = {(1, "a", "w"), (2, "a", "x"), (2, "b", "y"), (2, "b", "z"), (4, "c", "x")}
    assert choose_cells(dealt) == chosen
    assert choose_cells(dealt, always="w") == chosen | {(1, "b", "w")}
    assert choose_cells({1: dealt[1]}) == {(1, "a", "w"), (1, "b", "w")}


def test_no_cell_of_several_numbers_of_ranks_is_lost() -> None:
    layouts = {1: ["w"], 2: ["x", "y", "z"], 4: ["x", "y"]}
    cases = make_cases_by_ranks("abcde", layouts, extended={2: ["z"]})
    tried = [(case.values[2], case.values[0], layout) for case in cases for layout in case.values[1]]
    assert sorted(tried) == sorted(
        (n, model, layout) for n, names in layouts.items() for model in "abcde" for layout in names
    )
    now = [(case.values[2], layout) for case in cases if not case.marks for layout in case.values[1]]
    later = [case.values[1] for case in cases if EXTENDED in case.marks]
    assert set(now) == {(1, "w"), (2, "x"), (2, "y"), (4, "x"), (4, "y")}
    assert ["z"] in later
    by_hand = make_cases(GRID, extended=["y", "c"])
    assert [case.values for case in by_hand if EXTENDED in case.marks] == [("a", ["y"]), ("c", ["x"])]


def test_no_cell_is_lost() -> None:
    actual = make_cases(GRID, 4, always="x")
    tried = [(case.values[0], layout) for case in actual for layout in case.values[1]]
    assert sorted(tried) == sorted((model, layout) for model, layouts in GRID.items() for layout in layouts)
    now = {case.values[0]: case.values[1] for case in actual if SLOW not in case.marks}
    assert now.keys() == GRID.keys()
    assert all("x" in layouts for layouts in now.values())
    assert all(case.values[2:] == (4,) for case in actual)
