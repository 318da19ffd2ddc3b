"""A head that no file of megatfm knows, in the families that others are tested in less: gradients as on one device."""

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.models import build
from tests.plugins import plugin
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.grids import cells_by_ranks
from tests.support.models import FAMILY_MODELS
from tests.support.parity import (
    build_engine,
    layout_microbatches,
    model_gradient_errors,
    one_device_reference,
)
from tests.support.workers import Workers

plugin("labels")
TOPIC = {"extra_heads": {"topic": {"classes": 5}}}
NONE = {**TOPIC, "lm_head.name": "none", "lm_head.bias": False}
DISCRIMINATOR = FAMILY_MODELS["electra"].with_changes({"family": "discriminator", "generator": None})
CONFIGS = {
    "encoder-decoder": FAMILY_MODELS["t5"].with_changes(TOPIC),
    "encoder-decoder, that head alone": FAMILY_MODELS["t5"].with_changes(NONE),
    "discriminator": DISCRIMINATOR.with_changes({**TOPIC, "extra_heads.sentence": {}}),
    "discriminator, that head alone": DISCRIMINATOR.with_changes(NONE),
}
TERMS = {
    "encoder-decoder": {"span", "topic"},
    "encoder-decoder, that head alone": {"topic"},
    "discriminator": {"discriminator", "sentence", "topic"},
    "discriminator, that head alone": {"topic"},
}
LAYOUTS = {
    1: {"one process": ParallelConfig()},
    2: {
        "tp2": ParallelConfig(tp=2),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "zero3": ParallelConfig(dp_shard=2),
    },
}


class WithTopics(PassThroughObjective):
    """Counts rows that have a label, too."""

    fields = {**PassThroughObjective.fields, "topic": "labels", "discriminator": "replaced"}  # noqa: RUF012


def batch_of(config: ModelConfig) -> dict[str, Tensor]:
    batch = family_batch(config)
    draw = torch.Generator().manual_seed(5)
    batch["in_text"] = batch["documents"] == 0
    batch["labels"] = torch.randint(5, (len(batch["tokens"]),), generator=draw)
    batch["labels"][1] = -100
    if config.family == "discriminator":
        del batch["targets"]
        places = batch["documents"]
        batch["replaced"] = torch.randint(2, places.shape, generator=draw).masked_fill(places < 0, -100)
    if config.lm_head.name == "none":
        for name in ("targets", "replaced", "sentence_targets"):
            batch.pop(name, None)
    return batch


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config = CONFIGS[name]
    batch = batch_of(config)
    model, objective, loss = one_device_reference(config, batch, WithTopics)
    assert objective.loss_weights.keys() == TERMS[name]
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "topic" in n)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(layout_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), cells_by_ranks(CONFIGS, LAYOUTS, always=["tp2"]))
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_the_mean_of_the_text(name: str) -> None:
    """By hand, from the hidden vectors; and the head's weights are no one else's."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    batch, model = batch_of(config), build(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    output = model(**{key: value for key, value in batch.items() if key != "ahead"})
    total = torch.zeros((), dtype=torch.float64)
    for row, label in enumerate(batch["labels"].tolist()):
        mean = output.hidden[row][batch["in_text"][row]].sum(0) / max(int(batch["in_text"][row].sum()), 1)
        logits = model.topic.classifier(mean)
        total = total + (logits.logsumexp(0) - logits[label] if label >= 0 else 0.0)
    torch.testing.assert_close(output.losses["topic"], total)
    assert (model.head if hasattr(model, "head") else getattr(model, "verdict", None)) is None or (
        config.lm_head.name != "none"
    )
