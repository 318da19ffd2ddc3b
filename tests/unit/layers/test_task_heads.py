"""Heads on the vectors of several layers, BERT's feature-based use, against transformers' hidden states."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm.config import Config
from megatfm.convert.load import load_model
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.verify.verify import verify
from tests.support.hf_encoders import ENCODER_TOKENS, hf_encoder


def head(**options: Any) -> dict[str, Any]:
    return {
        "extra_heads": {"sentence": {"name": "text_classifier", "classes": 3, "pooler": "none", **options}}
    }


def test_layers_are_those_of_transformers(tmp_path: Path) -> None:
    hf_model = hf_encoder("BertForMaskedLM")
    hf_model.save_pretrained(tmp_path / "bert")
    plain = load_model(tmp_path / "bert")
    config = plain.config.with_changes(
        {**head(layers=[0, 1, -1]), "lm_head": {"name": "none", "bias": False}}
    )
    built = build(config).eval()
    initialise(built, 3)
    built.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        states = hf_model(ENCODER_TOKENS, output_hidden_states=True).hidden_states
        features = torch.cat([states[0], states[1], states[-1]], -1)[:, 0]
        expected = built.sentence.classifier(features)
        torch.testing.assert_close(
            built(ENCODER_TOKENS).predictions["sentence"], expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("parallel", "frozen"),
    [({"tp": 2, "dp_shard": 1}, ["encoder.norm.*"]), ({"dp_shard": 2}, ["encoder.*"])],
    ids=["tp2", "zero3, frozen features"],
)
def test_layouts_compute_the_same(parallel: dict[str, Any], frozen: list[str]) -> None:
    assert not verify(layers_config(parallel, frozen)).wrong


def layers_config(parallel: dict[str, Any], frozen: list[str]) -> Config:
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "d_model": 32,
        "n_layers": 2,
        "attention": {"n_heads": 4},
        "ffn": {"d_ff": 48},
    }
    sizes |= {"family": "encoder", "lm_head": {"name": "none"}}
    return Config.model_validate(
        {
            "name": "layers",
            "model": {
                **sizes,
                "family": "encoder",
                "lm_head": {"name": "none"},
                **head(layers=[-2, -1], pooler="tanh"),
            },
            "objective": {"name": "text_classification"},
            "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 4, "micro_batch": 2, "freeze": frozen},
            "parallel": parallel,
        }
    )


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the model has 2 blocks.*there is no 3"):
        build(layers_config({}, []).model.with_changes(head(layers=[3])))
    with pytest.raises(ValueError, match="lie on other pipeline stages"):
        layers_config({"pp": 2, "dp_shard": 1}, [])
