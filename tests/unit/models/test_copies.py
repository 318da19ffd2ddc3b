"""Models of every family can be copied and pickled, before and after a forward pass."""

import copy
import pickle

import pytest
import torch

from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.support.batches import family_batch
from tests.support.models import FAMILY_MODELS


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_copy_has_the_same_losses_and_weights_of_its_own(name: str) -> None:
    config = FAMILY_MODELS[name]
    model = build(config).train()
    initialise(model, 3)
    batch = {key: value for key, value in family_batch(config).items() if key != "ahead"}
    fresh = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    losses = model(**batch).losses
    for other in (*fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied = other(**batch).losses
        assert copied.keys() == losses.keys()
        assert all(torch.equal(copied[term], losses[term]) for term in losses)
        owned = {parameter.data_ptr() for parameter in other.parameters()}
        assert owned.isdisjoint(parameter.data_ptr() for parameter in model.parameters())
        assert len(owned) == len({parameter.data_ptr() for parameter in model.parameters()}), "ties are kept"
