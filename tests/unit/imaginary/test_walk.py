"""Recommended layouts at real scale, each traced as one rank: they start, fit, send what is modelled, and wait for no
more than the budget."""

import pytest

from megatfm.config import load_config
from megatfm.estimate.devices import load_cluster
from tests.support.recommended_layouts import Recommended, recommended, traced_layout

WAITS_OF_EXPERTS = {"parallel/expert_parallel.py": 1}
"""Waits of the host for each block of experts and micro-batch, by file: how many rows travel. Dense models have none.
The numbers may only fall."""
WAITS_OF_FAMILIES = {"two_towers": {"parallel/parallelize.py": 1}}
"""Waits for each micro-batch of families that read on the host what was computed on the device: samples of each rank.
The numbers may only fall."""
TABLES_AS_LONG_AS_ROWS = ("deberta-v3-base",)
"""Presets with as many relative positions as a row has tokens: scores of those look like scores of all pairs."""
POOLED_SIDE = 28
"""MViTv2's biases depend on queries, so their gradients are as large as scores: of 28 × 28 pooled tokens at most."""
SAME_BYTES = 0.002
SAVED, SAVED_WITH_MERGING = 0.02, 0.05
"""Share by which the activations that blocks save may be off; of hierarchical models the estimate counts the merging of
patches to the block before it, the trace does not."""
PEAK = 0.03
"""Share by which the modelled peak may be off; measured on these presets up to 0.019 (T5 v1.1 XL)."""


def case(layout: Recommended) -> object:
    rows = next((word for word in layout.overrides if word.startswith("data.")), "")
    return pytest.param(layout, id=f"{layout.preset} {rows}".strip())


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize("layout", [case(layout) for layout in recommended()])
def test_a_recommended_layout_runs_on_an_imaginary_gpu(layout: Recommended) -> None:
    traced = traced_layout(layout)
    if traced.full is not None:
        assert traced.full.fits, traced.full.worst
    assert traced.traced.peak < 0.95 * load_cluster("h100", 1).device.memory_bytes
    family = load_config(layout.preset, []).model.family
    saved = SAVED_WITH_MERGING if family == "hierarchical" else SAVED
    for name, modelled, measured in traced.differences:
        tolerance = {"peak": PEAK, "saved by blocks": saved}.get(name, SAME_BYTES)
        assert modelled == pytest.approx(measured, rel=tolerance), name
    budget = {path: times * traced.n_expert_passes for path, times in WAITS_OF_EXPERTS.items()}
    for path, times in WAITS_OF_FAMILIES.get(family, {}).items():
        budget[path] = times * traced.traced.facts["microbatches"]
    assert all(times <= budget.get(path, 0) for path, times in traced.waits.items()), traced.waits
    pairs = traced.traced.facts["all_pairs"]
    if layout.preset.startswith("mvitv2"):
        pairs = [line for line in pairs if f"{POOLED_SIDE**2}, {POOLED_SIDE**2}] at" not in line]
    if layout.preset not in TABLES_AS_LONG_AS_ROWS:
        assert not pairs
