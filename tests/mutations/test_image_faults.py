"""Faults that one could make with images: the comparison with one device must find each of them."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.layers import classifier, embedding, stage_blocks
from megatfm.layers.attention.windowed import MapWindows
from megatfm.layers.patches import PixelsHead
from megatfm.layers.sequence_views import SequenceShard
from megatfm.models.masked_autoencoder import MaskedAutoencoder
from megatfm.parallel import context_global_attention, context_parallel, cp_plans, styles
from tests.support.image_models import CASES, IMAGE_MODELS, LAYOUTS, image_reference
from tests.support.models import ADAMW
from tests.support.parity import EVERYTHING, build_engine, list_expected_errors, microbatches, model_gradient_errors
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def a_rank_s_grid_begins_at_the_row_s_first_token(patch: Patch) -> None:
    real = SequenceShard.__init__

    def init(self: SequenceShard, row: Any, places: Tensor, memory: Any = None) -> None:
        real(self, row, places, memory)
        self.grid = row.grid[:, : len(places)]

    patch.setattr(SequenceShard, "__init__", init)


def a_mean_is_of_one_rank_s_patches(patch: Patch) -> None:
    patch.setattr(cp_plans, "_all_reduce_both_passes", lambda x, group: x)


def a_pool_attends_to_one_rank_s_tokens(patch: Patch) -> None:
    patch.setattr(context_global_attention, "reduce_from_group", lambda x, group: x)


def gradients_of_pooled_images_stay_on_their_rank(patch: Patch) -> None:
    patch.setattr(context_global_attention, "copy_to_group", lambda x, group: x)


def scores_are_shifted_by_each_rank_s_largest(patch: Patch) -> None:
    without = SimpleNamespace(all_reduce=lambda *_: None, ReduceOp=torch.distributed.ReduceOp)
    patch.setattr(context_global_attention, "dist", without)


def gradients_of_patches_are_not_summed(patch: Patch) -> None:
    full = replace(styles.STYLES.get("split_output"), gradient="replicated")
    patch.setitem(styles.STYLES._parts, "split_output", full)


def a_rank_s_part_of_the_gradient_is_taken_for_all(patch: Patch) -> None:
    patch.setattr(MaskedAutoencoder, "tp_plan", (("memory", "gather_output_replicated"),))


def gradients_of_copies_are_summed(patch: Patch) -> None:
    patch.setattr(MaskedAutoencoder, "tp_plan", (("memory", "gather_output"),))


def gradients_of_looked_up_tokens_stay_on_their_rank(patch: Patch) -> None:
    real = context_parallel.fetch

    def fetch(x: Tensor, plan: context_parallel.FetchPlan) -> Tensor:
        received = x.new_zeros(*x.shape[:2], len(plan.indices) - x.shape[2], x.shape[3])
        without_values = torch.cat([x - x.detach(), received], 2)[:, :, plan.permutation]
        return real(x.detach(), plan) + without_values

    patch.setattr(cp_plans, "fetch", fetch)


def masked_patches_keep_their_embedding(patch: Patch) -> None:
    patch.setattr(
        embedding.VisiblePatches, "forward", lambda self, sequence: torch.ones_like(sequence.masked)[..., None]
    )


def masks_are_one_token_late(patch: Patch) -> None:
    real = embedding.require_masked
    patch.setattr(embedding, "require_masked", lambda sequence: real(sequence).roll(1, 1))


def visible_patches_count_in_the_loss(patch: Patch) -> None:
    real = PixelsHead.forward

    def forward(self: PixelsHead, hidden: Tensor, masked: Tensor, target: Tensor, **options: Any) -> Tensor:
        return real(self, hidden, torch.ones_like(masked), target, **options)

    patch.setattr(PixelsHead, "forward", forward)


def squares_are_read_column_by_column(patch: Patch) -> None:
    real = PixelsHead._to_patches

    def to_patches(self: PixelsHead, pixels: Tensor, sequence: Any) -> Tensor:
        side, factor = self.options.patch_size, self.factor
        squares = pixels.unflatten(-1, (-1, factor, side, factor, side)).transpose(-4, -2)
        return real(self, squares.flatten(-5), sequence)

    patch.setattr(PixelsHead, "_to_patches", to_patches)


def maps_are_rolled_the_wrong_way(patch: Patch) -> None:
    def roll(self: MapWindows, maps: Tensor) -> Tensor:
        padded = real(replace(self, shift=0), maps)
        return padded.roll((self.shift, self.shift), (1, 2))

    real = MapWindows.pad_and_roll
    patch.setattr(MapWindows, "pad_and_roll", roll)


def windows_see_across_the_edge(patch: Patch) -> None:
    real = MapWindows.mask

    def mask(self: MapWindows, device: torch.device) -> Tensor | None:
        cells = real(self, device)
        return None if cells is None else torch.ones_like(cells)

    patch.setattr(MapWindows, "mask", mask)


def neighbours_are_merged_column_first(patch: Patch) -> None:
    patch.setattr(stage_blocks, "NEIGHBOURS", ((0, 0), (0, 1), (1, 0), (1, 1)))


def a_rank_merges_its_neighbour_s_channels(patch: Patch) -> None:
    patch.setattr(
        stage_blocks.ChannelShard,
        "forward",
        lambda self, x: x.chunk(self.n_shards, -1)[(self.shard_index + 1) % self.n_shards],
    )


def positions_are_the_other_rank_s(patch: Patch) -> None:
    def install(module: Any, ranks: Any, layouts: Any) -> None:
        module.register_forward_hook(lambda _, __, x: ranks.split_tokens(x.roll(x.shape[1] // 2, 1)))

    patch.setitem(styles.STYLES._parts, "split_output", replace(styles.STYLES.get("split_output"), apply=install))


def shards_of_visible_patches_are_gathered_in_another_order(patch: Patch) -> None:
    def install(module: Any, ranks: Any, layouts: Any) -> None:
        def swap(_: Any, __: Any, x: Tensor) -> Tensor:
            return torch.cat(ranks.gather_input(x).chunk(2, dim=1)[::-1], dim=1)

        module.register_forward_hook(swap)

    style = styles.STYLES.get("gather_output_for_tokens")
    patch.setitem(styles.STYLES._parts, style.name, replace(style, apply=install))


def class_tokens_count_in_the_mean(patch: Patch) -> None:
    patch.setattr(classifier, "_find_patches", lambda sequence: sequence.find_document_members())


def an_image_is_pooled_as_the_one_before(patch: Patch) -> None:
    real = classifier.index_documents
    patch.setattr(classifier, "index_documents", lambda *arguments: real(*arguments).roll(1))


CP2, TP2 = ParallelConfig(cp=2, zero=0), ParallelConfig(tp=2)
FAULTS: dict[Callable[[Patch], None], tuple[str, ParallelConfig, set[str]]] = {
    a_rank_s_grid_begins_at_the_row_s_first_token: ("rotary", CP2, EVERYTHING),
    a_mean_is_of_one_rank_s_patches: ("mean", CP2, EVERYTHING),
    a_pool_attends_to_one_rank_s_tokens: ("attention", CP2, {"*", "*wk.bias"}),
    gradients_of_pooled_images_stay_on_their_rank: (
        "attention",
        CP2,
        {"encoder.*", "classifier.pool.w[qkv].*", "classifier.pool.query", "classifier.pool.wk.bias"},
    ),
    scores_are_shifted_by_each_rank_s_largest: ("attention", CP2, {"*", "classifier.pool.wk.bias"}),
    gradients_of_looked_up_tokens_stay_on_their_rank: ("mae", CP2, {"encoder.*", "decoder.*.projection.*"}),
    gradients_of_patches_are_not_summed: (
        "class",
        TP2,
        {"encoder.embedding.*.special", "encoder.embedding.positions.weight"},
    ),
    masked_patches_keep_their_embedding: ("simmim", CP2, EVERYTHING),
    masks_are_one_token_late: ("simmim", CP2, EVERYTHING),
    visible_patches_count_in_the_loss: ("simmim", CP2, EVERYTHING),
    squares_are_read_column_by_column: ("simmim swin", TP2, {"encoder.*", "pixels.*"}),
    # An absolute error's gradient of a bias counts signs, which few wrong numbers turn.
    maps_are_rolled_the_wrong_way: ("simmim swin", TP2, {"encoder.*", "classifier.*", "pixels.*.weight"}),
    windows_see_across_the_edge: ("simmim swin", TP2, {"encoder.*", "classifier.*", "pixels.*.weight"}),
    neighbours_are_merged_column_first: ("simmim swin", TP2, EVERYTHING),
    a_rank_merges_its_neighbour_s_channels: ("simmim swin", TP2, EVERYTHING),
    positions_are_the_other_rank_s: ("class", TP2, EVERYTHING),
    shards_of_visible_patches_are_gathered_in_another_order: ("mae", TP2, EVERYTHING),
    class_tokens_count_in_the_mean: ("rotary", CP2, EVERYTHING),
    # Images that change places leave the sum over images as it is, which is the gradient of the last biases.
    an_image_is_pooled_as_the_one_before: (
        "attention",
        CP2,
        {"encoder.*", "*.weight", "classifier.pool.query", "classifier.pool.norm.bias", "classifier.pool.w[qvo].bias",
         "classifier.pool.w_up.bias"},
    ),
    a_rank_s_part_of_the_gradient_is_taken_for_all: ("mae", ParallelConfig(tp=3), {"encoder.*"}),
    gradients_of_copies_are_summed: ("mae", ParallelConfig(tp=3, sequence_parallel=False), {"encoder.*"}),
}  # fmt: skip
"""Fault → the model and layout that show it, and parameters whose gradients must be found wrong, and no others."""


def wrong_gradients(fault: str) -> tuple[set[str], set[str]]:
    """Parameters whose gradients a fault must make wrong, and those that it does."""
    name, parallel, patterns = FAULTS[globals()[fault]]
    batch, model, objective, _ = image_reference(name)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(IMAGE_MODELS[name], parallel, ADAMW)
        engine.forward_backward(microbatches(engine, batch), objective)
        return list_expected_errors(model, patterns), set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    by_rank = workers.run(wrong_gradients, max(FAULTS[fault][1].tp, 2), fault.__name__)
    assert set().union(*(wrong for _, wrong in by_rank)) == by_rank[0][0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_cell_is_a_fast_one(fault: Callable[[Patch], None]) -> None:
    name, parallel, _ = FAULTS[fault]
    fast = [case.values for case in CASES if not case.marks]
    cells = [(ranks, layout) for model, layouts, ranks in fast if model == name for layout in layouts]
    assert parallel in [LAYOUTS[ranks][layout] for ranks, layout in cells]
