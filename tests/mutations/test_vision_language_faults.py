"""Faults that one could make where images stand among text: a fast cell of the layouts' grid must find each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.layers.sequence_views import SequenceShard
from megatfm.models import vision_language
from megatfm.models.vision_language import Connector, VisionLanguage
from megatfm.parallel import context_parallel, cp_plans, styles
from tests.support.image_text_models import LLAVA_CASES, LLAVA_LAYOUTS, LLAVA_MODELS, llava_reference
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
FAULTS: dict[Callable[[Patch], None], tuple[str, int, str, set[str]]] = {
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


def wrong_gradients(fault: str) -> tuple[set[str], set[str]]:
    """Parameters whose gradients a fault must make wrong, and those that it does."""
    name, ranks, layout, patterns = FAULTS[globals()[fault]]
    batch, model, objective, _ = llava_reference(name)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(LLAVA_MODELS[name], LLAVA_LAYOUTS[ranks][layout], ADAMW)
        engine.forward_backward(uneven_microbatches(engine, batch), objective)
        return list_expected_errors(model, patterns), set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    by_rank = workers.run(wrong_gradients, FAULTS[fault][1], fault.__name__)
    assert set().union(*(wrong for _, wrong in by_rank)) == by_rank[0][0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_cell_is_a_fast_one(fault: Callable[[Patch], None]) -> None:
    name, ranks, layout, _ = FAULTS[fault]
    fast = [case.values for case in LLAVA_CASES if not case.marks]
    assert [layouts for model, layouts, n in fast if (model, n) == (name, ranks) and layout in layouts]
