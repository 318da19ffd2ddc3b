"""`verify` and its expected traffic: plugins' styles, cut rows, images, two towers, vision-language models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.errors import UsageError
from megatfm.parallel.styles import COLWISE, STYLES
from megatfm.registry import import_plugins
from megatfm.verify import expected
from megatfm.verify.expected import explain_unpredicted_axes
from megatfm.verify.layouts import Documents
from megatfm.verify.module_shardings import find_module_shardings
from megatfm.verify.rank_processes import RankPool
from megatfm.verify.shrink import draw_batch
from megatfm.verify.verify import GradientComparison, verify
from tests.support.layouts import EXTENDED, extend
from tests.support.small_runs import VERIFIED_CONFIG

PLUGIN = """
from dataclasses import replace
from torch import nn
from megatfm.layers.feed_forward import FFN, FFNS
from megatfm.parallel.styles import ROWWISE, STYLES

STYLES.register("NAME")(replace(ROWWISE, name="NAME", communication=SENDS))

@FFNS.register("NAME")
class Other(FFN):
    tp_plan = (*(row for row in FFN.tp_plan if row[0] != "w_down"), ("w_down", "NAME"))
"""


@pytest.mark.parametrize(("name", "sends", "reason", "is_wrong"), [
    ("declared", ("output summed",), "", False),
    ("wrong", (), "", True),
    ("silent", None, "the style 'silent' doesn't say what it sends (`communication`)", False),
])  # fmt: skip
def test_traffic_of_a_plugin_s_style_is_what_it_declares(
    name: str, sends: tuple[str, ...] | None, reason: str, is_wrong: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / f"style_{name}.py").write_text(PLUGIN.replace("NAME", name).replace("SENDS", repr(sends)))
    monkeypatch.syspath_prepend(tmp_path)
    model = {**VERIFIED_CONFIG["model"], "n_layers": 2, "ffn": {"name": name, "d_ff": 128}}
    changes = {"model": model, "plugins": [f"style_{name}"], "parallel": {"tp": 2, "dp_shard": 1}}
    config = Config.model_validate({**VERIFIED_CONFIG, **changes})
    import_plugins(config.plugins)
    assert explain_unpredicted_axes(config) == ({"tp": reason} if reason else {})
    comparison = verify(config)
    assert not comparison.wrong
    assert bool(comparison.traffic_mismatches) == is_wrong


def test_a_plugin_s_style_for_fewer_heads_than_ranks_is_its_fallback() -> None:
    STYLES.register("plugin_colwise")(replace(COLWISE, name="plugin_colwise"))

    class Keys(nn.Linear):
        tp_plan = (("", "plugin_colwise"),)
        heads = 2

    for ranks, dim, gradient in ((2, 0, "replicated"), (4, None, "partial")):
        sharding = find_module_shardings(Keys(8, 8), ParallelConfig(tp=ranks))[""]
        assert (sharding.dim, sharding.gradient) == (dim, gradient)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def verify_preset(
    pool: RankPool, preset: str, overrides: list[str], documents: Documents = "mixed"
) -> GradientComparison:
    """Assert that a layout computes the same and sends what is expected."""
    comparison = verify(load_config(preset, overrides), documents, pool)
    assert not comparison.wrong
    assert not comparison.traffic_mismatches
    return comparison


# --------------------------------------------------------------------------------------------------- cut rows


FOUR_PARTS = ["parallel.cp=4", "parallel.dp_shard=1"]
SELECTIVE = [*FOUR_PARTS, "train.recompute=selective"]
RING = ["parallel.cp=5", "parallel.dp_shard=1", "parallel.cp_method=ring"]


@pytest.mark.parametrize(("preset", "overrides", "documents"), [
    ("bigbird-base", FOUR_PARTS, "short"),
    ("longformer-base", FOUR_PARTS, "short"),
    *(pytest.param(preset, SELECTIVE, "short", marks=EXTENDED) for preset in ("bigbird-base", "longformer-base")),
    ("t-dmca", SELECTIVE, "short"),
    ("spanbert-base", FOUR_PARTS, "short"),
    pytest.param("bert-base", RING, "short", marks=EXTENDED),
    ("llama3-8b", RING, "short"),
    # Experts on all ranks of two axes, a batch that predicts nothing, averaged weights.
    ("quickstart-moe", ["parallel.dp_shard=2", "parallel.cp=2", "parallel.ep=4", "parallel.zero=0"], "mixed"),
    ("xlnet-base", ["parallel.cp=2", "parallel.dp_shard=1"], "sparse"),
    ("quickstart", ["parallel.tp=2", "optimizer.name=schedule_free_adamw", "lr_schedule.name=constant"], "mixed"),
])  # fmt: skip
def test_rows_in_parts_and_rare_cases_are_the_same(
    pool: RankPool, preset: str, overrides: list[str], documents: Documents
) -> None:
    """Short documents lie within a part, between and across parts; the five parts of a ring are unequal."""
    verify_preset(pool, preset, overrides, documents)


def test_a_generator_s_heads_are_dealt_too() -> None:
    with pytest.raises(UsageError, match=r"1 query and 1 key heads .* can't be divided over parallel\.cp = 2"):
        load_config("electra-small", ["parallel.cp=2", "parallel.cp_method=ulysses"])


# ----------------------------------------------------------------------------------------------------- images


IMAGES = {
    "attention pool": ("vit-s16", [
        "model.extra_heads.classifier.pool=attention", "model.embedding.n_class_tokens=0", "data.sequence_length=196",
    ]),
    "masked autoencoder": ("mae-b16", []),
    "simmim": ("vit-s16", [
        "objective={name='simmim', mask_size=16}", "model.embedding.mask_token=true",
        "model.extra_heads={pixels={name='pixels', stride=16}}",
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "ranks"),
    extend(
        [(case, ranks) for case in IMAGES for ranks in (2, 3, 5)],
        kept=[("attention pool", 3), ("masked autoencoder", 2), ("simmim", 5)],
    ),
)
def test_images_in_parts_are_the_same(pool: RankPool, case: str, ranks: int) -> None:
    preset, overrides = IMAGES[case]
    assert verify_preset(pool, preset, [*overrides, f"parallel.cp={ranks}", "parallel.dp_shard=1"]).expected_traffic


# ------------------------------------------------------------------------------------------------- two towers


CASES = {
    "softmax, three ranks": ("clip-b32", ["parallel.dp_shard=3", "parallel.zero=1"]),
    "sigmoid, stage 3, recomputed": ("siglip-b16", ["parallel.dp_shard=2", "train.recompute=full"]),
    "softmax under tensor parallelism": ("clip-b32", ["parallel.dp_shard=2", "parallel.tp=2", "data.target_length=78"]),
}  # fmt: skip
DIVIDED_CASES = {
    "cp": ("clip-b32", ["parallel.cp=2"]),
    "sigmoid, with data ranks, recomputed": (
        "siglip-b16", ["parallel.cp=2", "parallel.dp_shard=2", "train.recompute=full"],
    ),
    "mean pool, with tensor parallelism": (
        "clip-b32", ["parallel.cp=2", "parallel.tp=2", "model.contrastive.image_pool=mean", "data.target_length=78"],
    ),
    "class pool, three ranks": ("clip-b32", ["parallel.cp=3"]),
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
def test_counted_is_expected(pool: RankPool, case: str) -> None:
    comparison = verify_preset(pool, *CASES[case])
    assert not comparison.axes_without_closed_form
    small = comparison.config
    (sent,) = (flow.sent_bytes for flow in comparison.traffic if flow.collective == "send")
    batch = draw_batch(small)
    pairs = int(((batch["positions"] == 0) & (batch["documents"] >= 0)).sum())
    assert small.model.contrastive is not None
    ranks, d = small.parallel.dp_shard, small.model.contrastive.width
    columns = (2 * ranks - 1) * (small.model.contrastive.loss == "softmax")
    # A rank sends as much as it has pairs, and the blocks that it hands on: about a share of all.
    mean = pairs / ranks * ((3 * ranks - 2) * d + columns) * 8
    assert 0.5 * mean < sent < 2 * mean


@pytest.mark.parametrize(("part", "collective"), [
    ("add_contrastive_loss", "send"), ("list_first_pass_calls", "all_gather"),
])  # fmt: skip
def test_unexpected_traffic_is_named(
    pool: RankPool, part: str, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step sends more than closed forms that lack the ring, or the first pass."""
    monkeypatch.setattr(expected, part, lambda *_: [])
    comparison = verify(load_config("clip-b32", ["parallel.dp_shard=2"]), pool=pool)
    assert not comparison.wrong
    assert any("dp_shard" in mismatch and collective in mismatch for mismatch in comparison.traffic_mismatches)


# ------------------------------------------------------------------------------------- vision-language models


FROZEN = 'train.freeze=["encoder.*"]'
VISION_LANGUAGE_CASES = {
    "tensor parallel": ["parallel.tp=2", "data.sequence_length=578"],
    "pipeline": ["parallel.pp=2"],
    "context parallel": ["parallel.cp=2"],
    "context and tensor parallel": ["parallel.cp=2", "parallel.tp=2", "data.sequence_length=578"],
    "context parallel on three ranks, recomputed": ["parallel.cp=3", "train.recompute=full"],
    "context parallel, a window of text": ["parallel.cp=2", 'model.attention.pattern={name="window", width=5}'],
    "context parallel in a pipeline": ["parallel.cp=2", "parallel.pp=2", "objective.image_placement=in_text"],
    "frozen encoder in context parallelism": ["parallel.cp=2", FROZEN],
    "frozen encoder in tensor parallelism, recomputed": [
        "parallel.tp=2", "data.sequence_length=578", "train.recompute=full", FROZEN,
    ],
    "frozen encoder": ["parallel.dp_shard=2", FROZEN],
    "frozen encoder in a pipeline": ["parallel.pp=2", "parallel.dp_shard=2", "parallel.zero=1", FROZEN],
}  # fmt: skip


PREDICTED = DIVIDED_CASES | {case: ("llava-1.5-7b", words) for case, words in VISION_LANGUAGE_CASES.items()}
KEPT = {
    "mean pool, with tensor parallelism", "class pool, three ranks", "pp", "interleaved", "sigmoid, with data ranks",
    "tensor parallel", "pipeline", "context parallel", "context parallel, a window of text",
    *(case for case in VISION_LANGUAGE_CASES if "frozen" in case),
}  # fmt: skip


@pytest.mark.parametrize("case", extend(PREDICTED, kept=KEPT))
def test_the_layout_is_the_same_computation_with_the_expected_traffic(pool: RankPool, case: str) -> None:
    comparison = verify_preset(pool, *PREDICTED[case])
    assert comparison.expected_traffic
    assert not comparison.axes_without_closed_form


@pytest.mark.parametrize("schedule", extend(["1f1b", "gpipe", "interleaved"], kept=["1f1b"]))
def test_a_frozen_block_before_a_trained_part_of_its_stage_is_not_predicted(pool: RankPool, schedule: str) -> None:
    layout = ["parallel.pp=2", f"parallel.pp_schedule={schedule}", "parallel.dp_shard=2"]
    comparison = verify_preset(pool, "llava-1.5-7b", [*layout, FROZEN])
    assert "FSDP2 prefetches it unused" in comparison.axes_without_closed_form["dp_shard"]


def test_frozen_blocks_in_separate_stages_are_predicted(pool: RankPool) -> None:
    layout = ["parallel.pp=2", "parallel.dp_shard=2", "parallel.zero=3"]
    comparison = verify_preset(pool, "quickstart", [*layout, 'train.freeze=["decoder.layers.*"]'])
    assert not comparison.axes_without_closed_form
