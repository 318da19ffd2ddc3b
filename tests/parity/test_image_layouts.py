"""Models of images, and of images and text, under layouts: loss and each gradient as on one device, in float64."""

from collections import Counter

import pytest

from megatfm.config import ParallelConfig
from tests.support.batches import family_case
from tests.support.image_models import CASES, IMAGE_MODELS, LAYOUTS, image_reference
from tests.support.image_text_models import LLAVA_CASES, LLAVA_LAYOUTS, LLAVA_MODELS, llava_reference
from tests.support.layouts import make_cases_by_ranks
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    layout_microbatches,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

RECOMPUTED_LAYOUTS = ("cp3", "tp3", "pp3", "zero3 on 3")
RECOMPUTED_LLAVA_LAYOUTS = ("tp", "zbv", "zero 2", "cp by Ulysses")


def compare(name: str, layouts: list[str], ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients of a model by layout."""
    is_llava = name in LLAVA_MODELS
    batch, model, objective, loss = (llava_reference if is_llava else image_reference)(name)
    layout_of, recomputed = (LLAVA_LAYOUTS, RECOMPUTED_LLAVA_LAYOUTS) if is_llava else (LAYOUTS, RECOMPUTED_LAYOUTS)
    cut = uneven_microbatches if is_llava else layout_microbatches
    wrong = {}
    for layout in layouts:
        mode = "full" if layout in recomputed else "none"
        engine = build_engine((LLAVA_MODELS | IMAGE_MODELS)[name], layout_of[ranks][layout], ADAMW, recomputed=mode)
        stats = engine.forward_backward(cut(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        wrong[layout] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize(("name", "layouts", "ranks"), [*CASES, *LLAVA_CASES])
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for wrong in workers.run(compare, ranks, name, layouts, ranks, timeout=240.0):
        assert wrong == {layout: {} for layout in layouts}


CLASSIFYING_PYRAMIDS = ("swin", "mvit v2", "swin v2")
"""Names in FAMILY_MODELS; maps shrink and widths grow from stage to stage."""
RECOMPUTED = {
    2: {"tp2": (ParallelConfig(tp=2), "full"),
        "tp2 without sequence parallel": (ParallelConfig(tp=2, sequence_parallel=False), "selective"),
        "tp2, a budget": (ParallelConfig(tp=2), "1 MB"),
        "zero1": (ParallelConfig(dp_shard=2, zero=1), "selective"), "zero3": (ParallelConfig(dp_shard=2), "full"),
        "pp2": (ParallelConfig(pp=2), "full"),
        "interleaved": (ParallelConfig(pp=2, pp_schedule="interleaved", virtual_stages=2), "selective")},
    4: {"tp4": (ParallelConfig(tp=4), "selective"), "zero3 2 × tp2": (ParallelConfig(dp_shard=2, tp=2), "full"),
        "pp2 × tp2": (ParallelConfig(pp=2, tp=2), "full")},
}  # fmt: skip
"""Ranks → layouts, and how blocks are recomputed under them; the budget keeps some of their activations."""
LONGER = {2: ["tp2", "pp2"], 4: ["tp4", "zero3 2 × tp2", "pp2 × tp2"]}


def compare_recomputed(name: str, layouts: list[str], ranks: int) -> dict[str, tuple[dict[str, float], list[bool]]]:
    """Wrong gradients by layout, and for each block of this rank whether it ran again in the backward pass."""
    config, batch = family_case(name, deep=False)
    model, objective, loss = one_device_reference(config, batch)
    result = {}
    for layout in layouts:
        parallel, mode = RECOMPUTED[ranks][layout]
        engine = build_engine(config, parallel, ADAMW, recomputed=mode)
        runs = Counter[str]()
        for path, module in engine.model.named_modules():
            if path.endswith(".attn"):
                module.register_forward_pre_hook(lambda *_, path=path, runs=runs: runs.update([path]))
        batches = layout_microbatches(engine, batch)
        stats = engine.forward_backward(batches, objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        result[layout] = model_gradient_errors(engine, model), [count > len(batches) for count in runs.values()]
    return result


@pytest.mark.parametrize(
    ("name", "layouts", "ranks"), make_cases_by_ranks(CLASSIFYING_PYRAMIDS, RECOMPUTED, extended=LONGER)
)
def test_recomputed_pyramids_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for result in workers.run(compare_recomputed, ranks, name, layouts, ranks, timeout=240.0):
        for layout, (wrong, ran_again) in result.items():
            assert wrong == {}, layout
            assert set(ran_again) == ({True, False} if layout == "tp2, a budget" else {True}), layout
