"""`megatfm verify` of two towers: the same step as one device's, and what data ranks send to compare their pairs."""

import pytest

from megatfm.config import load_config
from megatfm.verify import expected
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import verify

CASES = {
    "softmax, three ranks": ("clip-b32", ["parallel.dp_shard=3", "parallel.zero=1"]),
    "sigmoid, stage 3, recomputed": ("siglip-b16", ["parallel.dp_shard=2", "train.recompute=full"]),
    "softmax under tensor parallelism": ("clip-b32", ["parallel.dp_shard=2", "parallel.tp=2", "data.target_length=78"]),
}  # fmt: skip
CONTEXT_CASES = {
    "cp": ("clip-b32", ["parallel.cp=2"]),
    "sigmoid, with data ranks, recomputed": (
        "siglip-b16", ["parallel.cp=2", "parallel.dp_shard=2", "train.recompute=full"],
    ),
    "mean pool, with tensor parallelism": (
        "clip-b32", ["parallel.cp=2", "parallel.tp=2", "model.contrastive.image_pool=mean", "data.target_length=78"],
    ),
    "class pool, three ranks": ("clip-b32", ["parallel.cp=3"]),
}  # fmt: skip
PIPELINE_CASES = {
    "pp": ("clip-b32", ["parallel.pp=2"]),
    "sigmoid, with data ranks": ("siglip-b16", ["parallel.pp=2", "parallel.dp_shard=2"]),
    "zbv, with data ranks": (
        "clip-b32", ["parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.dp_shard=2", "parallel.zero=1"],
    ),
    "interleaved": ("clip-b32", ["parallel.pp=2", "parallel.pp_schedule=interleaved"]),
    "with tensor parallelism": ("clip-b32", ["parallel.pp=2", "parallel.tp=2", "data.target_length=78"]),
    "with context parallelism": ("clip-b32", ["parallel.pp=2", "parallel.cp=2"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_counted_is_expected(case: str) -> None:
    preset, overrides = CASES[case]
    comparison = verify(load_config(preset, overrides))
    assert not comparison.wrong
    assert not comparison.traffic_mismatches
    assert not comparison.axes_without_closed_form
    small = comparison.config
    (sent,) = (flow.sent_bytes for flow in comparison.flows if flow.collective == "send")
    batch = draw_batch(small)
    pairs = int(((batch["positions"] == 0) & (batch["documents"] >= 0)).sum())
    assert small.model.contrastive is not None
    ranks, d = small.parallel.dp_shard, small.model.contrastive.width
    columns = (2 * ranks - 1) * (small.model.contrastive.loss == "softmax")
    # A rank sends as much as it has pairs, and the blocks that it hands on: about a share of all.
    mean = pairs / ranks * ((3 * ranks - 2) * d + columns) * 8
    assert 0.5 * mean < sent < 2 * mean


@pytest.mark.parametrize("case", CONTEXT_CASES | PIPELINE_CASES)
def test_counted_is_expected_where_rows_or_layers_are_divided(case: str) -> None:
    preset, overrides = (CONTEXT_CASES | PIPELINE_CASES)[case]
    comparison = verify(load_config(preset, overrides))
    assert not comparison.wrong
    assert not comparison.traffic_mismatches
    assert not comparison.axes_without_closed_form


@pytest.mark.parametrize(
    ("part", "collective"),
    [("add_contrastive_loss", "dp_shard send"), ("list_first_pass_calls", "dp_shard all_gather")],
)
def test_what_is_not_expected_is_named(part: str, collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ring, or the first pass, in the closed forms, the step sends more than these say."""
    monkeypatch.setattr(expected, part, lambda *_: [])
    comparison = verify(load_config("clip-b32", ["parallel.dp_shard=2"]))
    assert not comparison.wrong
    axis, name = collective.split()
    assert any(axis in mismatch and name in mismatch for mismatch in comparison.traffic_mismatches)
