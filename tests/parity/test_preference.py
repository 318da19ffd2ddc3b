"""Preferences in every layout: loss, metrics, gradients and traffic of one device, whose head computes all logits."""

from typing import Any

import pytest

from megatfm.config import Config
from megatfm.verify.verify import verify
from tests.support.grids import SLOW

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"dp_shard": 2},
    "tp2": {"tp": 2, "dp_shard": 1},
    "pp2": {"pp": 2, "dp_shard": 1},
    "cp2": {"cp": 2, "dp_shard": 1},
    "cp2 × tp2": {"cp": 2, "tp": 2, "dp_shard": 1},
}


def preference_config(parallel: dict[str, Any], **model: Any) -> Config:
    return Config.model_validate(
        {
            "name": "preference",
            "model": {
                "vocab_size": 101,
                "d_model": 32,
                "n_layers": 2,
                "attention": {"n_heads": 4},
                "ffn": {"d_ff": 48},
                **model,
            },
            "objective": {"name": "preference", "beta": 0.4, "label_smoothing": 0.1},
            "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 8, "micro_batch": 2},
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param("zero3", {}, marks=SLOW),
        ("tp2", {"embedding": {"tied": False}}),
        ("pp2", {}),
        pytest.param("cp2", {}, marks=SLOW),
        ("cp2 × tp2", {"lora": {"rank": 3}}),
    ],
)
def test_pairs_are_those_of_one_device(layout: str, model: dict[str, Any]) -> None:
    actual = verify(preference_config(LAYOUTS[layout], **model))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert any(gradient.norm > 0 for gradient in actual.gradients)


@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "dp_shard": 1}, {"dp_shard": 2, "zero": 2}], ids=["tp2", "zero2"]
)
def test_adapters_send_nothing_but_their_own_gradients(parallel: dict[str, Any]) -> None:
    config = preference_config(parallel, lora={"rank": 3, "targets": ["wq", "w_down"]})
    actual = verify(config.with_changes({"objective": {"name": "causal"}}))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert {one.name.partition(".lora.")[1] for one in actual.gradients if one.norm > 0} == {".lora."}
