"""`verify` and its expected traffic on the vision-language preset, also with a frozen image encoder."""

import pytest

from megatfm.config import load_config
from megatfm.verify.verify import verify

FROZEN = 'train.freeze=["encoder.*"]'
CASES = {
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


@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_the_same_computation_with_the_expected_traffic(case: str) -> None:
    comparison = verify(load_config("llava-1.5-7b", CASES[case]))
    assert not comparison.wrong
    assert comparison.expected
    assert not comparison.axes_without_closed_form
    assert not comparison.traffic_mismatches


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_frozen_block_before_a_trained_part_of_its_stage_is_not_predicted(schedule: str) -> None:
    """Gradients are compared all the same."""
    layout = ["parallel.pp=2", f"parallel.pp_schedule={schedule}", "parallel.dp_shard=2"]
    comparison = verify(load_config("llava-1.5-7b", [*layout, FROZEN]))
    assert not comparison.wrong
    assert "FSDP2 prefetches it in vain" in comparison.axes_without_closed_form["dp_shard"]
    assert not comparison.traffic_mismatches


def test_frozen_blocks_in_stages_of_their_own_are_predicted() -> None:
    config = load_config(
        "quickstart",
        ["parallel.pp=2", "parallel.dp_shard=2", "parallel.zero=3", 'train.freeze=["decoder.layers.*"]'],
    )
    comparison = verify(config)
    assert not comparison.axes_without_closed_form
    assert not comparison.traffic_mismatches
