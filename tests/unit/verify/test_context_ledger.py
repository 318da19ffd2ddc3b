"""Expected traffic of rows that are cut: recomputed blocks, and tokens that look across a part's end."""

import pytest

from megatfm.config import load_config
from megatfm.errors import UsageError
from megatfm.verify.shrink import Documents
from megatfm.verify.verify import verify


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("bigbird-base", ["train.recompute=selective"]),
        ("longformer-base", ["train.recompute=selective"]),
        ("t-dmca", ["train.recompute=selective"]),
        ("spanbert-base", []),
        ("bert-base", ["parallel.cp_method=ring"]),
        ("llama3-8b", ["parallel.cp_method=ring"]),
    ],
)
def test_rows_in_parts_are_the_same(name: str, overrides: list[str]) -> None:
    """Documents lie within a part, between and across parts; four, or five unequal ones where rows go round."""
    parts = 5 if "parallel.cp_method=ring" in overrides else 4
    config = load_config(name, [f"parallel.cp={parts}", "parallel.dp_shard=1", *overrides])
    comparison = verify(config, "short")
    assert not comparison.wrong
    assert not comparison.traffic_mismatches


@pytest.mark.parametrize(
    ("name", "overrides", "documents"),
    [
        (
            "quickstart-moe",
            ["parallel.dp_shard=2", "parallel.cp=2", "parallel.ep=4", "parallel.zero=0"],
            "mixed",
        ),
        ("xlnet-base", ["parallel.cp=2", "parallel.dp_shard=1"], "sparse"),
        (
            "quickstart",
            ["parallel.tp=2", "optimizer.name=schedule_free_adamw", "lr_schedule.name=constant"],
            "mixed",
        ),
    ],
    ids=["experts on all ranks of two axes", "a batch that predicts nothing", "averaged weights"],
)
def test_rare_cases_are_the_same(name: str, overrides: list[str], documents: Documents) -> None:
    comparison = verify(load_config(name, overrides), documents)
    assert not comparison.wrong
    assert not comparison.traffic_mismatches


def test_a_generator_s_heads_are_dealt_too() -> None:
    with pytest.raises(
        UsageError, match=r"1 query and 1 key heads .* can't be divided over parallel\.cp = 2"
    ):
        load_config("electra-small", ["parallel.cp=2", "parallel.cp_method=ulysses"])
