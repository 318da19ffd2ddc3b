"""Faults that one could make where images stand among text: each must be found."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.models import vision_language
from tests.support.batches import PassThroughObjective
from tests.support.llava_models import LLAVA_MODELS, llava_batch
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

Patch = pytest.MonkeyPatch


def images_are_shifted_by_one_token(patch: Patch) -> None:
    real = vision_language.place_patches
    patch.setattr(vision_language, "place_patches", lambda *arguments: real(*arguments).roll(1, 1))


def class_tokens_are_passed_on(patch: Patch) -> None:
    real = vision_language.place_patches

    def place(vectors: Tensor, is_image: Tensor, images: object, n_special: int) -> Tensor:
        return real(vectors.roll(1, 1), is_image, images, n_special)

    patch.setattr(vision_language, "place_patches", place)


def image_tokens_are_looked_up_as_well(patch: Patch) -> None:
    patch.setattr(
        "megatfm.layers.embedding.EmbeddedTokens.forward",
        lambda self, sequence: torch.ones_like(sequence.inserted[0])[..., None],
    )


def gradients_of_image_vectors_stay_on_the_rank_that_reads_them(patch: Patch) -> None:
    plan = (("image_vectors", "gather_output_replicated"),)
    patch.setattr(vision_language.VisionLanguage, "tp_plan", plan)


FAULTS: dict[Callable[[Patch], None], ParallelConfig] = {
    images_are_shifted_by_one_token: ParallelConfig(dp_shard=2, zero=1),
    class_tokens_are_passed_on: ParallelConfig(dp_shard=2, zero=1),
    image_tokens_are_looked_up_as_well: ParallelConfig(pp=2),
    gradients_of_image_vectors_stay_on_the_rank_that_reads_them: ParallelConfig(tp=2),
}


def wrong_gradients(fault: str) -> set[str]:
    """Parameters whose gradients are wrong under a fault."""
    config, batch = LLAVA_MODELS["mlp"], llava_batch("mlp")
    model, objective, _ = one_device_reference(config, batch, PassThroughObjective)
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        engine = build_engine(config, FAULTS[globals()[fault]], ADAMW)
        engine.forward_backward(uneven_microbatches(engine, batch), objective)
        return set(model_gradient_errors(engine, model))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(workers: Workers, fault: Callable[[Patch], None]) -> None:
    wrong = set().union(*workers.run(wrong_gradients, 2, fault.__name__))
    assert any(name.startswith("connector.") for name in wrong)
