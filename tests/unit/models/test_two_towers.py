"""Two towers: counts of the presets, features of packed rows as of each pair alone, what a config refuses."""

from typing import Any

import pytest
import torch

from megatfm.config import ModelConfig, ParallelConfig, load_config
from megatfm.engines.registry import ENGINES
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from tests.support.image_text_models import SIGLIP, TOWER_MODELS, TOWERS, tower_batch

# Parameters as those of the released models.


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_packed_is_each_pair_alone(name: str) -> None:
    model, batch = build(TOWER_MODELS[name]).double(), tower_batch(name)
    initialise(model, 7)
    del batch["keys"]
    features = model(**batch).predictions
    assert len(features["images"]) == len(features["texts"]) > len(batch["tokens"])
    at = 0
    for row in range(len(batch["tokens"])):
        for document in range(int(batch["documents"][row].max()) + 1):
            alone = {}
            for field in ("tokens", "encoder_patches", "encoder_grid"):
                documents = batch["encoder_documents" if field.startswith("encoder") else "documents"]
                alone[field] = batch[field][row][documents[row] == document][None]
            predictions = model(**alone).predictions
            for kind in ("images", "texts"):
                torch.testing.assert_close(features[kind][at], predictions[kind][0], rtol=1e-12, atol=1e-12)
            at += 1
    assert at == len(features["images"])
    torch.testing.assert_close(features["texts"].norm(dim=1), torch.ones(at, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_factor_has_a_bound() -> None:
    for scale, expected in ((9.0, 9.0), (11.0, 10.0)):
        model = build(ModelConfig.from_dotted(TOWERS | {"contrastive": {"scale": scale, "max_scale": 10.0}}))
        initialise(model, 0)
        factor = model.temperature()["scale"]
        assert factor.item() == pytest.approx(expected)
        factor.backward()
        assert bool(model.temperature.log_scale.grad) == (scale < 10)


def test_unequal_numbers_of_images_and_captions_are_refused() -> None:
    model, batch = build(TOWER_MODELS["softmax"]), tower_batch("softmax")
    with pytest.raises(MegatfmError, match="2 images and 3 captions"):
        model.compare({"images": torch.eye(3)[:2], "texts": torch.eye(3), "scale": torch.ones(1)})
    batch["documents"][1] = torch.where(batch["documents"][1] == 1, -1, batch["documents"][1])
    with pytest.raises(MegatfmError, match="row 1 has 2 images and 1 captions"):
        model(**batch)


@pytest.mark.parametrize(("changes", "message"), [
    ({"text_tower": None}, "needs the sections text_tower and contrastive"),
    ({"embedding": {"name": "tokens"}, "position": {"name": "none"}}, "reads images"),
    ({"lm_head.name": "linear"}, "predicts no tokens"),
    ({"text_tower.n_heads": 5}, r"text_tower.n_heads = 5 does not divide .* choose n_heads = 4"),
    ({"embedding.n_class_tokens": 0}, "image_pool = 'class' reads a class token"),
    ({"contrastive.project_image": False}, "choose width = 24"),
    ({"distinct_layers": 1}, "distinct_layers has no meaning"),
    ({"ffn.name": "moe", "ffn.n_experts": 2, "ffn.top_k": 1}, "has no meaning with family = 'two_towers'"),
    ({"family": "encoder"}, "text_tower has no meaning with family = 'encoder'"),
    ({"extra_heads.classifier.n_classes": 3}, "which compares images and captions"),
])  # fmt: skip
def test_parts_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dotted(TOWERS).with_changes(changes)
    ModelConfig.from_dotted(SIGLIP)


def test_engines_that_see_one_micro_batch_are_refused() -> None:
    config = load_config("clip-b32", ["parallel.engine=deepspeed"])
    with pytest.raises(UsageError, match=r"'deepspeed' does not declare 'compares_samples'.*'native'"):
        ENGINES.check(config, "bf16")
    ENGINES.check(config.model_copy(update={"parallel": ParallelConfig()}), "bf16")
