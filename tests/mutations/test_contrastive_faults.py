"""Faults that one could make where samples of a global batch are compared: each must be found."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.engines import passes
from megatfm.ops import contrastive
from megatfm.parallel import data_ring
from tests.support.faults import EVERYTHING
from tests.support.models import ADAMW
from tests.support.parity import build_engine, model_gradient_errors
from tests.support.tower_models import TOWER_MODELS, TowerObjective, tower_microbatches, tower_reference
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def one_rank_s_negatives_are_missing(patch: Patch) -> None:
    real = data_ring.DataRing.shift

    def shift(self: Any, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        received = real(self, tensors, length)
        return [torch.zeros_like(x) if x.dim() > 1 and self._rank == 1 else x for x in received]

    patch.setattr(data_ring.DataRing, "shift", shift)


def each_rank_compares_its_own(patch: Patch) -> None:
    patch.setattr("megatfm.parallel.parallelize.install_data_ring", lambda model, mesh: None)


def each_micro_batch_is_compared_alone(patch: Patch) -> None:
    patch.setattr(passes, "compares_samples", lambda objective: False)


def the_temperature_s_gradient_is_counted_in_every_micro_batch(patch: Patch) -> None:
    real = torch.zeros_like

    def zeros_like(x: Tensor, **options: Any) -> Tensor:
        return x.clone() if x.shape == (1,) else real(x, **options)

    patch.setattr(passes.torch, "zeros_like", zeros_like)


def gradients_of_captions_stay_where_they_are(patch: Patch) -> None:
    real = contrastive._backward

    def backward(images: Tensor, texts: Tensor, *others: Any) -> Any:
        of_images, _, of_scale, of_bias = real(images, texts, *others)
        return of_images, torch.zeros_like(texts), of_scale, of_bias

    patch.setattr(contrastive, "_backward", backward)


def the_second_pass_drops_others(patch: Patch) -> None:
    real, counter = TowerObjective.features, [0]

    def features(self: TowerObjective, model: Any, batch: Any) -> dict[str, Tensor]:
        counter[0] += 1
        return real(self, model, {**batch, "keys": batch["keys"] + counter[0]})

    patch.setattr(TowerObjective, "features", features)


def captions_belong_to_the_next_image(patch: Patch) -> None:
    real = TowerObjective.terms_of
    patch.setattr(
        TowerObjective,
        "terms_of",
        lambda self, model, features: real(self, model, {**features, "texts": features["texts"].roll(1, 0)}),
    )


TEMPERATURE = {"temperature.*"}
FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    one_rank_s_negatives_are_missing: ("softmax", EVERYTHING),
    each_rank_compares_its_own: ("sigmoid", EVERYTHING),
    each_micro_batch_is_compared_alone: ("softmax", EVERYTHING),
    the_temperature_s_gradient_is_counted_in_every_micro_batch: ("sigmoid", TEMPERATURE),
    gradients_of_captions_stay_where_they_are: ("softmax", {"text.*", "text_features.*"}),
    the_second_pass_drops_others: ("dropout", EVERYTHING),
    captions_belong_to_the_next_image: ("softmax", EVERYTHING),
}
"""Fault → the model that shows it on three ranks, and parameters whose gradients must be found wrong."""


def wrong_gradients(fault: str) -> tuple[set[str], set[str]]:
    """All parameters, and those that are wrong under a fault."""
    name, _ = FAULTS[globals()[fault]]
    model, batch, _ = tower_reference(name)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(TOWER_MODELS[name], ParallelConfig(dp_shard=3, zero=1), ADAMW)
        mesh = engine.mesh
        engine.forward_backward(
            tower_microbatches(batch, mesh.data_rank, mesh.data_ranks, 2), TowerObjective()
        )
        return {name for name, _ in model.named_parameters()}, set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    by_rank = workers.run(wrong_gradients, 3, fault.__name__)
    parameters, wrong = by_rank[0][0], set().union(*(names for _, names in by_rank))
    expected = {
        name
        for name in parameters
        if any(fnmatchcase(name, pattern) for pattern in FAULTS[fault][1]) and not name.endswith("wk.bias")
    }
    assert expected
    assert expected <= wrong, sorted(expected - wrong)
