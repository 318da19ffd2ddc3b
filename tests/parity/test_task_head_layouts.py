"""Heads of downstream tasks in every layout as on one device: gradients, and predictions."""

import numpy as np
import pytest

from megatfm.config import ModelConfig, ParallelConfig, TaskConfig
from megatfm.object_collectives import all_gather_object
from megatfm.tasks.predictions import collect_predictions, get_engine_model
from tests.support.batches import task_batch
from tests.support.expert_parity import EXPERT_MODELS
from tests.support.layouts import EXTENDED, make_cases
from tests.support.models import FAMILY_MODELS
from tests.support.parity import build_engine, layout_microbatches, model_gradient_errors, one_device_reference
from tests.support.workers import Workers

HEAD, LAST = {"name": "text_classifier", "classes": 2, "dropout": 0.3}, {"token": "last"}
LAYOUTS = {
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
CONFIGS = {
    **{name: with_heads("bert", heads) for name, heads in HEADS.items()},
    "answers of a decoder": with_heads("gpt", HEADS["spans"], n_mtp_heads=0),
    "classes of XLNet": with_heads("xlnet", {"sentence": CLASSES_OF_LAST}),
    "choices of a decoder": with_heads("gpt", {"score": CHOICES_OF_LAST | {"pooler": "none"}}, n_mtp_heads=0),
}
MIXTURE = "classes of a mixture"
CONFIGS[MIXTURE] = EXPERT_MODELS["top-k"].with_changes({
    "lm_head.name": "none", "lm_head.bias": False, "layer_type.sparse.ffn.router": {"name": "top_k"},
    "extra_heads": {"score": HEAD | LAST | {"dropout": 0.0, "pooler": "none"}},
})  # fmt: skip
TERMS = {
    "choices": "choice", "choices of a decoder": "choice",
    "spans": "answer_span", "answers of a decoder": "answer_span",
}  # fmt: skip
LAYOUTS_WITH_EXPERTS = {**LAYOUTS, "ep2": ParallelConfig(dp_shard=2, ep=2)}
CASES = make_cases(
    dict.fromkeys(CONFIGS, LAYOUTS) | {MIXTURE: LAYOUTS_WITH_EXPERTS}, 2, rounds=2, always=["tp2", "cp2"]
)


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config = CONFIGS[name]
    batch = task_batch(config)
    model, objective, loss = one_device_reference(config, batch)
    assert list(objective.loss_weights) == [TERMS.get(name, "sentence")]
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
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


def collect(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Predictions of a batch under layouts, against those of one device."""
    config, batch = CONFIGS[name], task_batch(CONFIGS[name])
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
    tried = {layout: LAYOUTS[layout] for layout in ("tp2", "pp2", "zero3", "cp2")}
    assert workers.run(collect, 2, name, tried, timeout=240.0)[0] == list(tried)


LARGER = {3: {"cp3": ParallelConfig(cp=3, zero=0)}, 4: {"tp2 cp2": ParallelConfig(tp=2, cp=2)}}


@pytest.mark.parametrize("name", ["both orders", "choices", "spans"])
@pytest.mark.parametrize("ranks", [pytest.param(3, marks=EXTENDED), pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_on_more_ranks_equal_one_device(workers: Workers, name: str, ranks: int) -> None:
    assert workers.run(compare, ranks, name, LARGER[ranks], timeout=240.0)[0] == list(LARGER[ranks])
