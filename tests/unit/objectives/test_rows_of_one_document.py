"""Rows of one document each come from the loader without document ids: the losses are the same."""

import pytest
import torch

from megatfm.config import load_config
from megatfm.data.loader import without_documents
from megatfm.train.build import build_model
from megatfm.verify.shrink import draw_batch, objective_for, shrink

PRESETS = [
    "albert-base", "bert-base", "bigbird-base", "deberta-v3-base", "deepseek-v2-lite", "electra-base",
    "longformer-base", "mvitv2-b", "prefix-lm-base", "quickstart-vision", "siglip-b16", "simmim-swin-b",
    "spanbert-base", "swin-b", "xlnet-base",
]  # fmt: skip
"""A preset of each objective and family whose rows one document can fill."""


@pytest.mark.parametrize("preset", PRESETS)
def test_losses_do_not_need_ids_of_a_single_document(preset: str) -> None:
    overrides = ["train.micro_batch=2", "train.global_batch=2", "train.precision=fp32"]
    if preset == "siglip-b16":  # its images and captions keep their lengths, which they fill
        config = load_config(preset, [*overrides, "model.n_layers=1", "model.text_tower.n_layers=1"])
    else:
        config, _ = shrink(load_config(preset, overrides))
    rows = draw_batch(config, "one")
    without_ids = without_documents(rows)
    assert "documents" not in without_ids
    model, objective = build_model(config).train(False), objective_for(config)
    losses = []
    for fields in (rows, without_ids):
        batch = {name: torch.from_numpy(values.copy()) for name, values in fields.items()}
        with torch.no_grad():
            losses.append(dict(objective(model, batch)) | objective.target_counts(batch))
    assert losses[0].keys() == losses[1].keys()
    assert all(torch.equal(torch.as_tensor(losses[0][name]), torch.as_tensor(losses[1][name])) for name in losses[0])
