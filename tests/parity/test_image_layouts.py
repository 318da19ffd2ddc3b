"""Models of images, and of images and text, under layouts: loss and each gradient as on one device, in float64.

Two towers compare all samples of the global batch; the memory of their loss does not grow with the number of ranks.
"""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import ParallelConfig
from megatfm.ops.contrastive import LossOptions, compute_retrieval_ranks, contrastive_loss
from megatfm.parallel.parallelize import DataRing
from tests.support.batches import family_case
from tests.support.image_models import CASES, IMAGE_MODELS, LAYOUTS, image_reference
from tests.support.image_text_models import (
    LLAVA_CASES,
    LLAVA_LAYOUTS,
    LLAVA_MODELS,
    TOWER_LAYOUTS,
    TOWER_MODELS,
    TowerObjective,
    llava_reference,
    tower_batch,
    tower_microbatches,
    tower_reference,
)
from tests.support.layouts import make_cases_by_ranks
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    layout_microbatches,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.tensors import OperatorRecorder
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


LONGER_TOWER_LAYOUTS = {
    2: ["zero 0", "zero 2", "pp 2 gpipe", "pp 2 interleaved zero bubble", "pp 2 dualpipev"],
    3: ["zero 1", "tp 3 without sequence parallelism", "pp 3"],
    4: ["tp 2", "cp 2", "pp 2 × zero 1", "pp 2 × replicas", "pp 2 × cp 2"],
    5: ["zero 0", "zero 3", "cp 5"],
}
"""Layouts of extended cases: `make test` has each of their axes with towers in others."""
RECOMPUTED_TOWER_LAYOUTS = ("tp 2", "zero 3", "cp 3", "pp 3")
TOWER_CASES = make_cases_by_ranks(TOWER_MODELS, TOWER_LAYOUTS, extended=LONGER_TOWER_LAYOUTS)


def caption_numbers(batch: Mapping[str, Tensor]) -> Tensor:
    """Numbers of captions [rows, T, 2] at their first tokens, as two parts; every third pair of rows has the same."""
    rows = torch.arange(len(batch["tokens"]), dtype=torch.int32)
    numbers = torch.where(rows % 3 == 0, 7, rows - 11)[:, None] + batch["documents"].int() * 100
    return torch.stack([numbers, -numbers], dim=-1)


def compare_towers(name: str, layouts: list[str], ranks: int) -> dict[str, dict[str, float]]:
    """Wrong gradients by layout: of one micro-batch and of three, in turn."""
    wrong, row = {}, list(TOWER_MODELS).index(name)
    model, batch, loss = tower_reference(name)
    for column, (layout, parallel) in enumerate(TOWER_LAYOUTS[ranks].items()):
        if layout not in layouts:
            continue
        recomputed = "full" if layout in RECOMPUTED_TOWER_LAYOUTS else "none"
        engine = build_engine(TOWER_MODELS[name], parallel, ADAMW, recomputed=recomputed)
        mesh = engine.mesh
        n = 2 * parallel.pp if parallel.pp > 1 else (3, 1)[(row + column) % 2]
        batches = tower_microbatches(batch, mesh.data_rank, mesh.data_ranks, n)
        totals = engine.forward_backward(batches, TowerObjective())
        assert totals.loss == pytest.approx(loss, rel=1e-12), (layout, n)
        wrong[layout] = model_gradient_errors(engine, model)
    return wrong


@pytest.mark.parametrize(("name", "layouts", "ranks"), TOWER_CASES)
def test_gradients_of_towers_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    for wrong in workers.run(compare_towers, ranks, name, layouts, ranks, timeout=240.0):
        assert wrong == {layout: {} for layout in layouts}


def evaluate(ranks: int) -> dict[str, dict[str, float]]:
    """Means of the terms of a batch by model, where this is one of so many ranks."""
    terms = {}
    for name in ("softmax", "sigmoid"):
        batch = tower_batch(name)
        batch["captions"] = caption_numbers(batch)
        engine = build_engine(TOWER_MODELS[name], ParallelConfig(dp_shard=ranks), ADAMW)
        batches = tower_microbatches(batch, engine.mesh.data_rank, ranks, 2)
        terms[name] = engine.evaluate(batches, TowerObjective(evaluates=True)).terms
    return terms


def test_evaluation_is_the_same_on_any_number_of_ranks(workers: Workers) -> None:
    """All pairs are one batch, and figures of found captions are counted by hand."""
    expected = {}
    for name in ("softmax", "sigmoid"):
        model, batch, loss = tower_reference(name)
        numbers = caption_numbers(batch)[(batch["positions"] == 0) & (batch["documents"] >= 0)].tolist()
        inputs = {field: values for field, values in batch.items() if field != "keys"}
        features = deepcopy(model).eval()(**inputs).predictions
        cosines = (features["images"] @ features["texts"].T).tolist()
        before = [
            sum(x >= row[at] and numbers[j] != numbers[at] for j, x in enumerate(row)) for at, row in enumerate(cosines)
        ]
        recalls = {f"top{k}": sum(n < k for n in before) / len(before) for k in (1, 5)}
        assert 0 < recalls["top5"] < 1
        expected[name] = {"contrastive": pytest.approx(loss, rel=1e-12), **recalls}
    for ranks in (1, 3):
        for terms in workers.run(evaluate, ranks, ranks):
            assert terms == expected


PAIRS, FEATURE_WIDTH, CHUNK = 48, 40, 16
"""Pairs of each rank; a chunk of logits is smaller than a block of features, which is smaller than all logits."""


def measure_loss_memory(kind: Any) -> tuple[int, int]:
    """Bytes of the largest tensor of a step and of the retrieval ranks, and of all that the forward pass keeps."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    images, texts = (torch.randn(PAIRS, FEATURE_WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    scale = torch.full((1,), 2.0, requires_grad=True)
    bias = torch.full((1,), -1.0, requires_grad=True) if kind == "sigmoid" else None
    ring, storages = DataRing(dist.group.WORLD), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with OperatorRecorder(lambda _, __, outputs: [x.untyped_storage().nbytes() for x in outputs]) as sizes:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = contrastive_loss(images, texts, scale, bias, LossOptions(kind, ring, CHUNK))
        loss.backward()
        compute_retrieval_ranks(images, texts, torch.arange(PAIRS), ring, CHUNK)
    return max(sizes.records), sum(storages.values())


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_memory_of_the_loss_does_not_grow_with_ranks(workers: Workers, kind: str) -> None:
    """The largest is a block of features; kept are this rank's, scale and bias, and two numbers for each pair."""
    features = 4 * PAIRS * FEATURE_WIDTH
    numbers = 4 * (2 * PAIRS + (2 if kind == "sigmoid" else 1))
    for ranks in (1, 2, 4):
        for largest, saved in workers.run(measure_loss_memory, ranks, kind):
            assert (largest, saved) == (features, 2 * features + numbers), ranks
