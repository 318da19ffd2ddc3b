"""Heads and blocks that no file of megatfm knows, and preferences: on every layout the gradients of one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import Config, ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.verify.verify import verify
from tests.plugins import plugin
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.layouts import PLAIN_LAYOUTS, SLOW, make_cases_by_ranks
from tests.support.models import FAMILY_MODELS, SMALL_MODEL
from tests.support.parity import (
    backward_on_one_device,
    build_engine,
    layout_microbatches,
    microbatches,
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
    2: {"tp2": ParallelConfig(tp=2), "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "pp2": ParallelConfig(pp=2), "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
        "zero3": ParallelConfig(dp_shard=2)},
}  # fmt: skip


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


@pytest.mark.parametrize(("name", "layouts", "ranks"), make_cases_by_ranks(CONFIGS, LAYOUTS, always=["tp2"]))
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


# ----------------------------------------------------------------------------------------------------- blocks


for part in ("dilated", "chosen"):
    plugin(part)
WINDOWS = ModelConfig.from_dotted(
    {**SMALL_MODEL, "attention.n_kv_heads": 2, "attention.dropout": 0.1,
     "attention.pattern": {"name": "dilated", "width": 2, "step": 2}, "layer_types": ["near", "far", "all"],
     "layer_type.near": {}, "layer_type.far.attention.pattern": {"step": 3}, "layer_type.far.position.name": "none",
     "layer_type.all.attention.pattern": "full", "n_layers": 3},
)  # fmt: skip
MODELS = {
    "windows of a decoder": WINDOWS,
    "windows of an encoder": WINDOWS.with_changes({"family": "encoder", "lm_head.bias": True}),
}
CHOSEN = ModelConfig.from_dotted(
    {**SMALL_MODEL, "dropout": 0.2, "n_layers": 3, "layer_types": ["plain", "chosen"], "layer_type.plain": {},
     "layer_type.chosen.ffn": {"name": "chosen", "choices": 3, "rate": 0.01, "weight": 0.3}, "n_mtp_heads": 1},
)  # fmt: skip
PAIRED = CHOSEN.with_changes({"family": "encoder_decoder", "n_mtp_heads": 0})
ROUTED = {"routed tokens": CHOSEN, "routed tokens of an encoder-decoder": PAIRED}


def compare_blocks(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts; those that were compared."""
    config = {**MODELS, **ROUTED}[name]
    batch, model = family_batch(config), build(config).double().train()
    initialise(model, 7)
    objective, loss = backward_on_one_device(config, model, batch)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
        compare_state(engine, model)
    return list(layouts)


def compare_state(engine: NativeEngine, model: nn.Module) -> None:
    """State that is updated once a step from counts over all ranks has the same bits as on one device."""
    engine.step(0.0, clip=0.0)
    modules = dict(engine.model.named_modules())
    for path, module in model.named_modules():
        if hasattr(module, "observed") and modules.get(path) is not None:
            alone = copy.deepcopy(module)
            with torch.no_grad():
                alone.update(alone.observed)
            assert alone.bias.any()
            assert torch.equal(modules[path].bias, alone.bias), path
            assert not modules[path].observed
            assert f"model.{path}.bias" in engine.state_dict()


@pytest.mark.parametrize(("name", "layouts", "ranks"), make_cases_by_ranks([*MODELS, *ROUTED], PLAIN_LAYOUTS, rounds=2))
def test_gradients_of_blocks_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: PLAIN_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_blocks, ranks, name, tried, timeout=180.0)[0] == layouts


# ------------------------------------------------------------------------------------------------ preferences


PREFERENCE_LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"dp_shard": 2},
    "tp2": {"tp": 2, "dp_shard": 1},
    "pp2": {"pp": 2, "dp_shard": 1},
    "cp2": {"cp": 2, "dp_shard": 1},
    "cp2 × tp2": {"cp": 2, "tp": 2, "dp_shard": 1},
}


def preference_config(parallel: dict[str, Any], **model: Any) -> Config:
    return Config.model_validate(
        {"name": "preference", "model": {"vocab_size": 101, "d_model": 32, "n_layers": 2, "attention": {"n_heads": 4},
                                         "ffn": {"d_ff": 48}, **model},
         "objective": {"name": "preference", "beta": 0.4, "label_smoothing": 0.1},
         "data": {"train": "none", "tokenizer": "none", "sequence_length": 32},
         "optimizer": {"name": "adamw", "lr": 1e-3}, "train": {"steps": 1, "global_batch": 8, "micro_batch": 2},
         "parallel": parallel},
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "model"), [
    pytest.param("zero3", {}, marks=SLOW),
    ("tp2", {"embedding": {"tied": False}}),
    ("pp2", {}),
    pytest.param("cp2", {}, marks=SLOW),
    ("cp2 × tp2", {"lora": {"rank": 3}}),
])  # fmt: skip
def test_pairs_are_those_of_one_device(layout: str, model: dict[str, Any]) -> None:
    actual = verify(preference_config(PREFERENCE_LAYOUTS[layout], **model))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert any(gradient.norm > 0 for gradient in actual.gradients)


@pytest.mark.parametrize("parallel", [{"tp": 2, "dp_shard": 1}, {"dp_shard": 2, "zero": 2}], ids=["tp2", "zero2"])
def test_adapters_send_nothing_but_their_own_gradients(parallel: dict[str, Any]) -> None:
    config = preference_config(parallel, lora={"rank": 3, "targets": ["wq", "w_down"]})
    actual = verify(config.with_changes({"objective": {"name": "causal"}}))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert {gradient.name.partition(".lora.")[1] for gradient in actual.gradients if gradient.norm > 0} == {".lora."}
