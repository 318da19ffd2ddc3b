"""Stages of one split point each, given only what earlier ones are declared to hand on, do what forward does."""

import pytest
import torch

from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.parallel.pipeline_stages import activation_shape
from megatfm.split_points import live_fields
from tests.support.batches import family_batch
from tests.support.models import FAMILY_MODELS


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_stages_of_one_split_point_in_turn_are_forward(name: str) -> None:
    config = FAMILY_MODELS[name]
    model = build(config).double().train()
    initialise(model, 7)
    batch = {key: value for key, value in family_batch(config).items() if key != "ahead"}
    points, carry, losses = model.split_points, {}, {}
    assert len({point.name for point in points}) == len(points)
    for i, point in enumerate(points):
        assert carry.keys() == live_fields(points, i).keys()
        output = model.stage({point.name}).forward(**batch, **carry)
        carry = {name: output.carried()[name] for name in live_fields(points, i + 1)}
        for name, spec in live_fields(points, i + 1).items():
            assert carry[name].shape == activation_shape(spec, batch, 1)
            assert carry[name].dtype == (torch.int64 if spec.d_model is None else torch.float64)
        losses |= output.losses or {}
    expected = model(**batch).losses
    assert losses.keys() == expected.keys()
    for term, value in expected.items():
        assert torch.equal(losses[term], value)


def test_a_missing_input_is_named() -> None:
    model = build(FAMILY_MODELS["t5"])
    with pytest.raises(TypeError, match="encoder_tokens"):
        model(torch.zeros(1, 3, dtype=torch.int64))
