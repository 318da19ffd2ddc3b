"""Faults where samples of a global batch are compared, and where images lie in texts: each must be found."""

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
from megatfm.models import two_towers, vision_language
from megatfm.models.vision_language import Connector, VisionLanguage
from megatfm.ops import contrastive
from megatfm.parallel import context_parallel, cp_plans, parallelize, styles
from tests.support.image_text_models import (
    LLAVA_CASES,
    LLAVA_LAYOUTS,
    LLAVA_MODELS,
    TOWER_MODELS,
    TowerObjective,
    llava_reference,
    tower_microbatches,
    tower_reference,
)
from tests.support.models import ADAMW
from tests.support.parity import (
    EVERYTHING,
    build_engine,
    list_expected_errors,
    model_gradient_errors,
    uneven_microbatches,
)
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


def images_are_shifted_by_one_token(patch: Patch) -> None:
    real = vision_language.find_patch_indices
    patch.setattr(vision_language, "find_patch_indices", lambda *arguments: real(*arguments).roll(1, 1))


def class_tokens_are_passed_on(patch: Patch) -> None:
    real = vision_language.find_patch_indices
    patch.setattr(vision_language, "find_patch_indices", lambda *arguments: (real(*arguments) - 1).clamp(min=0))


def patches_of_a_row_are_read_backwards(patch: Patch) -> None:
    real = vision_language.find_patch_indices

    def backwards(is_image: Tensor, images: Any, n_special: int) -> Tensor:
        return real(is_image.flip(1), images, n_special).flip(1)

    patch.setattr(vision_language, "find_patch_indices", backwards)


def a_row_has_the_images_of_the_next(patch: Patch) -> None:
    """On the second of two data ranks, where the rows fit."""
    real = VisionLanguage.forward

    def forward(self: VisionLanguage, tokens: Tensor, patches: Tensor, **fields: Any) -> Any:
        return real(self, tokens, patches.roll(1, 0), **fields)

    patch.setattr(
        VisionLanguage,
        "forward",
        lambda self, tokens=None, encoder_patches=None, **fields: forward(self, tokens, encoder_patches, **fields),
    )


def image_tokens_are_looked_up_as_well(patch: Patch) -> None:
    patch.setattr(
        "megatfm.layers.embedding.EmbeddedTokens.forward",
        lambda self, sequence: torch.ones_like(sequence.inserted[0])[..., None],
    )


def the_connector_s_second_matrix_is_left_out(patch: Patch) -> None:
    def forward(self: Connector, hidden: Tensor) -> Tensor:
        vectors: Tensor = self.w_in(hidden)
        return vectors + 0 * self.w_out(vectors)  # type: ignore[misc]

    patch.setattr(Connector, "forward", forward)


def the_connector_s_activation_is_left_out(patch: Patch) -> None:
    patch.setattr(vision_language.F, "gelu", lambda x: x)


def gradients_of_image_vectors_stay_on_the_rank_that_reads_them(patch: Patch) -> None:
    patch.setattr(VisionLanguage, "tp_plan", (("image_vectors", "gather_output_replicated"),))


def gradients_of_the_connector_are_of_one_rank_s_tokens(patch: Patch) -> None:
    patch.setattr(Connector, "tp_plan", (("w_in", "replicated"), ("w_out", "replicated")))


def shards_of_image_vectors_are_gathered_in_another_order(patch: Patch) -> None:
    def gather(module: Any, ranks: Any, layouts: Any) -> None:
        def swap(_: Any, __: Any, output: Tensor) -> Tensor:
            halves = ranks.gather_input(output).chunk(2, dim=1)
            return torch.cat(halves[::-1], dim=1)

        module.register_forward_hook(swap)

    style = styles.STYLES.get("gather_output_for_tokens")
    patch.setitem(styles.STYLES._parts, style.name, styles.replace(style, apply=gather))


def image_vectors_are_of_the_micro_batch_before(patch: Patch) -> None:
    before = dict[tuple[int, ...], Tensor]()

    def forward(self: Any, vectors: Tensor, at: Tensor, length: int) -> Tensor:
        stale = before.get(tuple(vectors.shape), vectors)
        before[tuple(vectors.shape)] = vectors.detach()
        return stale.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, vectors.shape[-1]))

    patch.setattr("megatfm.layers.embedding.TokenGather.forward", forward)


def image_tokens_are_counted_from_the_cut(patch: Patch) -> None:
    real = vision_language.find_patch_indices

    def indices(is_image: Tensor, images: Any, n_special: int) -> Tensor:
        at, half = real(is_image, images, n_special), is_image.shape[1] // 2
        patches = at.gather(1, is_image.to(torch.int8).argsort(dim=1, descending=True, stable=True))
        rank = (is_image[:, half:].cumsum(1) - 1).clamp(min=0)
        at[:, half:] = patches.gather(1, rank).where(is_image[:, half:], -1)
        return at

    patch.setattr(vision_language, "find_patch_indices", indices)


def gradients_of_fetched_vectors_stay_on_their_rank(patch: Patch) -> None:
    real = context_parallel.fetch

    def fetch(x: Tensor, plan: context_parallel.FetchPlan) -> Tensor:
        if x.shape[1] > 1:
            return real(x, plan)
        received = x.new_zeros(*x.shape[:2], len(plan.indices) - x.shape[2], x.shape[3])
        return real(x.detach(), plan) + torch.cat([x - x.detach(), received], 2)[:, :, plan.permutation]

    patch.setattr(cp_plans, "fetch", fetch)


def images_of_a_row_see_one_another(patch: Patch) -> None:
    real = vision_language.make_sequence

    def sequence(batch: dict[str, Tensor], input_field: str, side: str = "", **options: Any) -> Any:
        if side:
            fields = ("encoder_documents", "encoder_full_row_documents")
            batch = batch | {name: batch[name].clamp(max=0) for name in fields if name in batch}
        return real(batch, input_field, side, **options)

    patch.setattr(vision_language, "make_sequence", sequence)


def patches_of_a_rank_are_placed_from_the_image_s_corner(patch: Patch) -> None:
    real = SequenceShard.__init__

    def init(self: SequenceShard, row: Any, places: Tensor, memory: Any = None) -> None:
        real(self, row, places, memory)
        self.grid = None if row.grid is None else row.grid[:, : len(places)]

    patch.setattr(SequenceShard, "__init__", init)


VECTORS = {"connector.*", "encoder.*"}
LLAVA_FAULTS: dict[Callable[[Patch], None], tuple[str, int, str, set[str]]] = {
    images_are_shifted_by_one_token: ("mlp", 1, "one process", EVERYTHING),
    class_tokens_are_passed_on: ("linear", 1, "one process", EVERYTHING),
    patches_of_a_row_are_read_backwards: ("experts", 2, "cp", EVERYTHING),
    a_row_has_the_images_of_the_next: ("linear", 2, "zero 1", EVERYTHING),
    image_tokens_are_looked_up_as_well: ("dropout", 1, "one process", EVERYTHING),
    the_connector_s_second_matrix_is_left_out: ("mlp", 2, "cp", EVERYTHING),
    the_connector_s_activation_is_left_out: ("mlp", 1, "one process", EVERYTHING),
    gradients_of_image_vectors_stay_on_the_rank_that_reads_them: ("linear", 2, "tp", VECTORS),
    gradients_of_the_connector_are_of_one_rank_s_tokens: ("mlp", 3, "tp", {"connector.*"}),
    shards_of_image_vectors_are_gathered_in_another_order: ("linear", 4, "cp × tp", EVERYTHING),
    image_vectors_are_of_the_micro_batch_before: ("mlp", 1, "one process", EVERYTHING),
    image_tokens_are_counted_from_the_cut: ("mlp", 2, "cp", EVERYTHING),
    gradients_of_fetched_vectors_stay_on_their_rank: ("linear", 2, "cp", VECTORS),
    images_of_a_row_see_one_another: ("mlp", 2, "cp", EVERYTHING),
    patches_of_a_rank_are_placed_from_the_image_s_corner: ("dropout", 3, "cp", EVERYTHING),
}
"""Fault → the cell that shows it (model, ranks, layout), and parameters whose gradients must be found wrong,
and no others."""


def find_llava_errors(fault: str) -> tuple[set[str], set[str]]:
    """Parameters whose gradients a fault must make wrong, and those that it does."""
    name, ranks, layout, patterns = LLAVA_FAULTS[globals()[fault]]
    batch, model, objective, _ = llava_reference(name)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(LLAVA_MODELS[name], LLAVA_LAYOUTS[ranks][layout], ADAMW)
        engine.forward_backward(uneven_microbatches(engine, batch), objective)
        return list_expected_errors(model, patterns), set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", LLAVA_FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_in_texts_with_images_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    by_rank = workers.run(find_llava_errors, LLAVA_FAULTS[fault][1], fault.__name__)
    assert set().union(*(wrong for _, wrong in by_rank)) == by_rank[0][0]


@pytest.mark.parametrize("fault", LLAVA_FAULTS, ids=lambda fault: fault.__name__)
def test_the_cell_is_a_fast_one(fault: Callable[[Patch], None]) -> None:
    name, ranks, layout, _ = LLAVA_FAULTS[fault]
    fast = [case.values for case in LLAVA_CASES if not case.marks]
    assert [layouts for model, layouts, n in fast if (model, n) == (name, ranks) and layout in layouts]
