"""Faults that one could make where samples of a global batch are compared: each must be found."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.engines import passes
from megatfm.layers.classifier import index_documents
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models import two_towers
from megatfm.ops import contrastive
from megatfm.parallel import cp_plans, parallelize
from tests.support.image_text_models import TOWER_MODELS, TowerObjective, tower_microbatches, tower_reference
from tests.support.models import ADAMW
from tests.support.parity import EVERYTHING, build_engine, list_expected_errors, model_gradient_errors
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def one_rank_s_negatives_are_missing(patch: Patch) -> None:
    real = parallelize.DataRing.shift

    def shift(self: Any, tensors: Sequence[Tensor], length: int) -> list[Tensor]:
        received = real(self, tensors, length)
        return [torch.zeros_like(x) if x.dim() > 1 and self._rank == 1 else x for x in received]

    patch.setattr(parallelize.DataRing, "shift", shift)


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
    real = contrastive._ContrastiveLoss.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        images_grad, texts_grad, *other_grads = real(ctx, gradient)
        return images_grad, torch.zeros_like(texts_grad), *other_grads

    patch.setattr(contrastive._ContrastiveLoss, "backward", staticmethod(backward))


def the_second_pass_drops_others(patch: Patch) -> None:
    real, counter = TowerObjective.features, [0]

    def of_others(self: TowerObjective, model: Any, batch: Any) -> dict[str, Tensor]:
        counter[0] += 1
        return real(self, model, {**batch, "keys": batch["keys"] + counter[0]})

    patch.setattr(TowerObjective, "features", of_others)


def captions_belong_to_the_next_image(patch: Patch) -> None:
    real = TowerObjective.compute_terms
    patch.setattr(
        TowerObjective,
        "compute_terms",
        lambda self, model, features: real(self, model, {**features, "texts": features["texts"].roll(1, 0)}),
    )


def pooled_vectors_are_of_one_rank_s_tokens(patch: Patch) -> None:
    patch.setattr(cp_plans, "_all_reduce_both_passes", lambda x, group: x)


def gradients_of_pooled_vectors_stay_on_their_rank(patch: Patch) -> None:
    patch.setattr(cp_plans, "copy_to_group", lambda x, group: x)


def only_data_ranks_are_compared(patch: Patch) -> None:
    patch.setattr(parallelize, "DENSE_DATA_AXES", SimpleNamespace(all=("dp_shard", "dp_replicate")))


def every_rank_of_a_row_has_all_its_pairs(patch: Patch) -> None:
    real = two_towers.find_boundary_tokens

    def tokens(sequence: Any, *, last: bool) -> Tensor:
        is_side = not isinstance(sequence, SequenceShard)
        return real(sequence if is_side else sequence.full_sequence, last=last)

    def index(sequence: Any, at: Tensor, other: Any = None) -> Tensor:
        row = other or sequence
        return index_documents(sequence, at, row.full_sequence if isinstance(row, SequenceShard) else row)

    real_pool = two_towers.BoundaryVector.forward

    def pool(self: Any, hidden: Tensor, at: Tensor, sequence: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(two_towers, "find_boundary_tokens", real)
            inner.setattr(two_towers, "index_documents", index_documents)
            return real_pool(self, hidden, at, sequence)

    patch.setattr(two_towers, "find_boundary_tokens", tokens)
    patch.setattr(two_towers, "index_documents", index)
    patch.setattr(two_towers.BoundaryVector, "forward", pool)


def a_caption_ends_at_its_rank_s_last_token(patch: Patch) -> None:
    real = two_towers.find_boundary_tokens

    def tokens(sequence: Any, *, last: bool) -> Tensor:
        if not last:
            return real(sequence, last=last)
        return real(
            SimpleNamespace(
                on_host=lambda: SimpleNamespace(
                    full_sequence=SimpleNamespace(positions=sequence.positions, documents=sequence.documents)
                ),
                positions=sequence.positions,
            ),
            last=True,
        )

    patch.setattr(two_towers, "find_boundary_tokens", tokens)


def a_caption_s_image_is_that_of_the_first_row(patch: Patch) -> None:
    def index(sequence: Any, at: Tensor, other: Any = None) -> Tensor:
        indices = index_documents(sequence, at, other)
        return indices if other is None else indices.clamp(max=sequence.max_documents_per_row)

    patch.setattr(two_towers, "index_documents", index)


FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    one_rank_s_negatives_are_missing: ("softmax", EVERYTHING),
    each_rank_compares_its_own: ("sigmoid", EVERYTHING),
    each_micro_batch_is_compared_alone: ("softmax", EVERYTHING),
    the_temperature_s_gradient_is_counted_in_every_micro_batch: ("sigmoid", {"temperature.*"}),
    gradients_of_captions_stay_where_they_are: ("softmax", {"text.*", "text_features.*"}),
    the_second_pass_drops_others: ("dropout", EVERYTHING),
    captions_belong_to_the_next_image: ("softmax", EVERYTHING),
}
CONTEXT_FAULTS: dict[Callable[[Patch], None], tuple[str, set[str]]] = {
    pooled_vectors_are_of_one_rank_s_tokens: ("softmax", EVERYTHING),
    gradients_of_pooled_vectors_stay_on_their_rank: ("softmax", {"encoder.*", "text.*"}),
    only_data_ranks_are_compared: ("sigmoid", EVERYTHING),
    every_rank_of_a_row_has_all_its_pairs: ("softmax", EVERYTHING),
    a_caption_ends_at_its_rank_s_last_token: ("sigmoid", EVERYTHING),
    a_caption_s_image_is_that_of_the_first_row: ("dropout", EVERYTHING),
}
"""Fault → the model that shows it on three data or context ranks, and parameters whose gradients must be wrong, and no
others."""


def wrong_gradients(fault: str) -> tuple[set[str], set[str]]:
    """Parameters whose gradients a fault must make wrong, and those that it does."""
    name, patterns = (FAULTS | CONTEXT_FAULTS)[globals()[fault]]
    parallel = ParallelConfig(cp=3) if globals()[fault] in CONTEXT_FAULTS else ParallelConfig(dp_shard=3, zero=1)
    model, batch, _ = tower_reference(name)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(TOWER_MODELS[name], parallel, ADAMW)
        mesh = engine.mesh
        engine.forward_backward(tower_microbatches(batch, mesh.data_rank, mesh.data_ranks, 2), TowerObjective())
        return list_expected_errors(model, patterns), set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", FAULTS | CONTEXT_FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    by_rank = workers.run(wrong_gradients, 3, fault.__name__)
    assert set().union(*(wrong for _, wrong in by_rank)) == by_rank[0][0]
