"""Heads of tasks and of plugins, blocks of plugins, and preferences: on every layout the gradients of one device."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatfm.config import Config, ModelConfig, ParallelConfig, TaskConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.object_collectives import all_gather_object
from megatfm.tasks.predictions import collect_predictions, get_engine_model
from megatfm.verify.verify import verify
from tests.plugins import plugin
from tests.support.batches import PassThroughObjective, family_batch, task_batch
from tests.support.expert_parity import EXPERT_MODELS
from tests.support.layouts import EXTENDED, PLAIN_LAYOUTS, SLOW, make_cases, make_cases_by_ranks
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


HEAD, LAST = {"name": "text_classifier", "classes": 2, "dropout": 0.3}, {"token": "last"}
TASK_LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2 of whole sequences": ParallelConfig(tp=2, sequence_parallel=False),
    "pp2": ParallelConfig(pp=2),
    "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
    "zero3": ParallelConfig(dp_shard=2),
    "cp2": ParallelConfig(cp=2, zero=0),
}
HEADS = {
    "classes": {"sentence": HEAD | {"class_weights": [0.5, 2.0]}},
    "transform": {"sentence": HEAD | {"pooler": "transform"}},
    "both orders": {"sentence": HEAD | {"both_orders": True}},
    "choices": {"sentence": {"name": "multiple_choice", "dropout": 0.3}},
    "spans": {"span": {"name": "span_extraction", "dropout": 0.3}},
}


def with_heads(family: str, heads: dict[str, dict[str, object]], **changes: object) -> ModelConfig:
    bare = {"lm_head.name": "none", "lm_head.bias": False, **changes}
    return FAMILY_MODELS[family].with_changes({**bare, "extra_heads": heads})


CLASSES_OF_LAST, CHOICES_OF_LAST = HEADS["classes"]["sentence"] | LAST, HEADS["choices"]["sentence"] | LAST
TASK_CONFIGS = {
    **{name: with_heads("bert", heads) for name, heads in HEADS.items()},
    "answers of a decoder": with_heads("gpt", HEADS["spans"], n_mtp_heads=0),
    "classes of XLNet": with_heads("xlnet", {"sentence": CLASSES_OF_LAST}),
    "choices of a decoder": with_heads("gpt", {"score": CHOICES_OF_LAST | {"pooler": "none"}}, n_mtp_heads=0),
}
MIXTURE = "classes of a mixture"
TASK_CONFIGS[MIXTURE] = EXPERT_MODELS["top-k"].with_changes({
    "lm_head.name": "none", "lm_head.bias": False, "layer_type.sparse.ffn.router": {"name": "top_k"},
    "extra_heads": {"score": HEAD | LAST | {"dropout": 0.0, "pooler": "none"}},
})  # fmt: skip
TASK_TERMS = {
    "choices": "choice", "choices of a decoder": "choice",
    "spans": "answer_span", "answers of a decoder": "answer_span",
}  # fmt: skip
LAYOUTS_WITH_EXPERTS = {**TASK_LAYOUTS, "ep2": ParallelConfig(dp_shard=2, ep=2)}
CASES = make_cases(
    dict.fromkeys(TASK_CONFIGS, TASK_LAYOUTS) | {MIXTURE: LAYOUTS_WITH_EXPERTS}, 2, rounds=2, always=["tp2", "cp2"]
)


def compare_task_heads(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config = TASK_CONFIGS[name]
    batch = task_batch(config)
    model, objective, loss = one_device_reference(config, batch)
    assert list(objective.loss_weights) == [TASK_TERMS.get(name, "sentence")]
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(layout_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        errors = model_gradient_errors(engine, model)
        errors = {n: e for n, e in errors.items() if model.get_parameter(n).requires_grad}
        assert errors == {}, (layout, errors)
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_of_heads_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS_WITH_EXPERTS[layout] for layout in layouts}
    assert workers.run(compare_task_heads, ranks, name, tried, timeout=240.0)[0] == layouts


def collect(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Predictions of a batch under layouts, against those of one device."""
    config, batch = TASK_CONFIGS[name], task_batch(TASK_CONFIGS[name])
    form = "multiple_choice" if "choices" in name else "span_extraction"
    choices = {"choices": ["a"]} if form == "multiple_choice" else {}
    task = TaskConfig.model_validate({"form": form, "train": "x", **choices})
    model, objective, _ = one_device_reference(config, batch)
    with collect_predictions(model.eval()) as collector:
        model(**batch)
    expected = collector.parts[0]
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        with collect_predictions(get_engine_model(engine)) as collector:
            engine.evaluate(layout_microbatches(engine, batch), objective)
        parts = [part for parts in all_gather_object(collector.parts) for part in parts]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        collected = {pair: place for place, pair in enumerate(zip(*(c.tolist() for c in columns[:2]), strict=True))}
        keys = list(zip(*(c.tolist() for c in expected[:2]), strict=True))
        assert collected.keys() == set(keys), layout
        order = [collected[pair] for pair in keys]
        np.testing.assert_allclose(columns[2][order], expected[2], rtol=1e-6, atol=1e-7, err_msg=layout)
        assert columns[3][order].tolist() == expected[3].tolist(), layout
        assert len(collector.gather(task, "").logits), layout
    return list(layouts)


@pytest.mark.parametrize("name", ["choices", "spans"])
def test_predictions_of_layouts_equal_one_device(workers: Workers, name: str) -> None:
    tried = {layout: TASK_LAYOUTS[layout] for layout in ("tp2", "pp2", "zero3", "cp2")}
    assert workers.run(collect, 2, name, tried, timeout=240.0)[0] == list(tried)


LARGER = {3: {"cp3": ParallelConfig(cp=3, zero=0)}, 4: {"tp2 cp2": ParallelConfig(tp=2, cp=2)}}


@pytest.mark.parametrize("name", ["both orders", "choices", "spans"])
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=EXTENDED), pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_on_more_ranks_equal_one_device(workers: Workers, name: str, ranks: int) -> None:
    assert workers.run(compare_task_heads, ranks, name, LARGER[ranks], timeout=240.0)[0] == list(LARGER[ranks])
