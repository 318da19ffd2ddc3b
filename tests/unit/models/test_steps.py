"""Steps one at a time, each with only what earlier ones are said to leave, do what forward does."""

import pytest
import torch

from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.parallel.pipeline_cut import activation_shape
from tests.parity.test_families import MODELS, batch_for


@pytest.mark.parametrize("name", MODELS)
def test_steps_in_turn_are_forward(name: str) -> None:
    config = MODELS[name]
    model = build(config).double().train()
    initialise(model, 7)
    batch = {key: value for key, value in batch_for(config).items() if key != "ahead"}
    steps, carry, losses = model.steps, {}, {}
    assert len({step.name for step in steps}) == len(steps)
    for i in range(len(steps)):
        assert carry.keys() == steps.alive(i).keys()
        done = steps[i : i + 1].start(batch, carry)
        carry = {part: done.carry[part] for part in steps.alive(i + 1)}
        for part, field in steps.alive(i + 1).items():
            assert carry[part].shape == activation_shape(field, batch, 1)
            assert carry[part].dtype == (torch.int64 if field.width is None else torch.float64)
        losses |= done.losses
    expected = model(**batch).losses
    assert losses.keys() == expected.keys()
    for term, value in expected.items():
        assert torch.equal(losses[term], value)


def test_a_missing_input_is_named() -> None:
    model = build(MODELS["t5"])
    with pytest.raises(TypeError, match="encoder_tokens"):
        model.steps.start({"tokens": torch.zeros(1, 3, dtype=torch.int64)}, {})
