"""`verify` and its expected traffic on models of images whose rows are cut."""

import pytest

from megatfm.config import load_config
from megatfm.verify.verify import verify

ATTENTION_POOL = [
    "model.extra_heads.classifier.pool=attention",
    "model.embedding.n_class_tokens=0",
    "data.sequence_length=196",
]

SIMMIM = [
    "objective={name='simmim', mask_size=16}",
    "model.embedding.mask_token=true",
    "model.extra_heads={pixels={name='pixels', stride=16}}",
]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(
    ("preset", "overrides"),
    [("vit-s16", ATTENTION_POOL), ("mae-b16", []), ("vit-s16", SIMMIM)],
    ids=["attention pool", "masked autoencoder", "simmim"],
)
def test_rows_in_parts_are_the_same(preset: str, overrides: list[str], ranks: int) -> None:
    comparison = verify(load_config(preset, [*overrides, f"parallel.cp={ranks}", "parallel.dp_shard=1"]))
    assert not comparison.wrong
    assert comparison.expected
    assert not comparison.traffic_mismatches
