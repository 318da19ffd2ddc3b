"""Heads of downstream tasks: against transformers' classifiers, and in every layout as on one device."""

import pytest
import torch
from transformers.models.longformer import modeling_longformer

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.convert.architecture import ARCHITECTURES
from megatfm.models import build
from tests.support.batches import task_batch
from tests.support.encoder_batches import BERT_ENCODER, PAD, draw_tokens, our_inputs, padded_batch
from tests.support.grids import cells
from tests.support.models import FAMILY_MODELS
from tests.support.parity import (
    build_engine,
    layout_microbatches,
    model_gradient_errors,
    one_device_reference,
)
from tests.support.reference_gradients import Figures, doubled, pair
from tests.support.workers import Workers

HEAD = {"name": "text_classifier", "classes": 3, "dropout": 0.0}
BARE = {"lm_head.name": "none", "lm_head.bias": False, "extra_heads": {"sentence": HEAD}}
CLASSES = {
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": {"position.offset": PAD + 1, "embedding.n_segments": 1},
    "AlbertForSequenceClassification": {
        "ffn.activation": "gelu_tanh", "embedding.dim": 10, "distinct_layers": 1,
    },
}  # fmt: skip
LONGFORMER = {
    **CLASSES["RobertaForSequenceClassification"],
    "attention.name": "longformer", "attention.pattern": {"name": "longformer", "width": 6, "global_tokens": [0]},
}  # fmt: skip
CLASSES["LongformerForSequenceClassification"] = LONGFORMER
LABELS = torch.tensor([2, 0, 1])


def test_every_classifier_here_is_tried() -> None:
    assert {name for name in ARCHITECTURES.names() if "SequenceClassification" in name} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_logits_loss_and_gradients_are_transformers_s(name: str) -> None:
    config = ModelConfig.from_dotted(BERT_ENCODER | CLASSES[name] | BARE)
    both, figures = pair(config, torch.float64, among=[name]), Figures()
    assert type(both.theirs).__name__ == name
    batch = padded_batch(config)
    del batch["labels"]
    if "Longformer" in name:  # which sees padding a little
        batch = {key: value[:, :9] for key, value in batch.items()}
    with doubled(torch.float64, modeling_longformer):
        expected = both.theirs(**batch, labels=LABELS)
    inputs = our_inputs(batch | {"labels": batch["input_ids"]}, {"label": LABELS}, "encoder")
    del inputs["targets"]
    plain = {key: value for key, value in inputs.items() if key != "sentence_targets"}
    predictions = both.ours(batch["input_ids"], **plain).predictions
    figures.see_logits(predictions["sentence"], expected.logits, torch.float64)
    loss = both.ours(batch["input_ids"], **inputs).losses["sentence"] / len(LABELS)
    figures.see_logits(loss, expected.loss, torch.float64)
    loss.backward()
    expected.loss.backward()
    if "Longformer" not in name:  # the first token's last queries are global: the others have no gradient
        figures.see_gradients(both, torch.float64)


def test_the_examples_of_a_row_are_seen_with_their_numbers() -> None:
    """Logits of three packed examples go to `on_logits` in evaluation, and are those of each alone."""
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE)
    model = pair(config, torch.float64, among=["BertForSequenceClassification"]).ours.eval()
    tokens, lengths = draw_tokens(47, 1, 15, seed=4, low=PAD + 1), (6, 4, 5)
    targets, examples = torch.full((1, 15), -100), torch.full((1, 15), -1)
    starts = [0, 6, 10]
    targets[0, starts], examples[0, starts] = torch.tensor([1, 0, 2]), torch.tensor([7, 70, 9])
    seen = []
    model.sentence.on_logits = lambda *tensors: seen.append(tensors)
    model(
        tokens,
        documents=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None],
        positions=torch.cat([torch.arange(n) for n in lengths])[None],
        sentence_targets=targets,
        examples=examples,
    )
    ((numbers, words, logits, labels),) = seen
    assert words.tolist() == [0, 0, 0]
    assert numbers.tolist() == [7, 70, 9]
    assert labels.tolist() == [1, 0, 2]
    for start, length, logits_of_row in zip(starts, lengths, logits, strict=True):
        alone = model(tokens[:, start : start + length]).predictions["sentence"][0]
        torch.testing.assert_close(logits_of_row, alone, rtol=1e-12, atol=1e-12)


def test_dropout_of_the_head_depends_on_the_example_alone() -> None:
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE).with_changes({"extra_heads.sentence.dropout": 0.5})
    model = pair(config, torch.float64, among=["BertForSequenceClassification"]).ours.train()
    tokens = draw_tokens(47, 2, 9, seed=4, low=PAD + 1)
    targets = torch.full((2, 9), -100)
    targets[:, 0] = 1
    fields = {"sentence_targets": targets, "keys": torch.tensor([5, 11])}
    both = model(tokens, **fields).losses["sentence"]
    alone = [model(tokens[i : i + 1], **{k: v[i : i + 1] for k, v in fields.items()}) for i in (0, 1)]
    torch.testing.assert_close(both, sum(output.losses["sentence"] for output in alone))
    other = model(tokens, **fields | {"keys": torch.tensor([6, 12])}).losses["sentence"]
    assert (both - other).abs() > 1e-6


LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "zbv": ParallelConfig(pp=2, pp_schedule="zbv"),
    "zero3": ParallelConfig(dp_shard=2),
    "cp2": ParallelConfig(cp=2),
}
HEADS = {
    "classes": {"sentence": HEAD | {"classes": 2, "dropout": 0.3}},
    "both orders": {"sentence": HEAD | {"classes": 2, "dropout": 0.3, "both_orders": True}},
    "choices": {"sentence": {"name": "multiple_choice", "dropout": 0.3}},
    "spans": {"span": {"name": "span_extraction", "dropout": 0.3}},
}
CONFIGS = {
    name: FAMILY_MODELS["bert"].with_changes({**BARE, "extra_heads": heads}) for name, heads in HEADS.items()
}
TERMS = {"choices": "choice", "spans": "answer_span"}
CASES = cells(dict.fromkeys(CONFIGS, LAYOUTS), 2, always=list(LAYOUTS))


def compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config = CONFIGS[name]
    batch = task_batch(config)
    model, objective, loss = one_device_reference(config, batch)
    assert list(objective.loss_weights) == [TERMS.get(name, "sentence")]
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(layout_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
    return list(layouts)


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: LAYOUTS[layout] for layout in layouts}
    assert workers.run(compare, ranks, name, tried, timeout=240.0)[0] == layouts


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "squared_error"])
def test_losses_of_numbers_are_transformers_s(loss: str) -> None:
    """Those of multi_label_classification and regression, which are means over classes."""
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE).with_changes({"extra_heads.sentence.loss": loss})
    plain = ModelConfig.from_dotted(BERT_ENCODER | BARE)
    both = pair(plain, torch.float64, among=["BertForSequenceClassification"])
    actual = build(config).double()
    actual.load_state_dict(both.ours.state_dict())
    kinds = {"binary_cross_entropy": "multi_label_classification", "squared_error": "regression"}
    both.theirs.config.problem_type = kinds[loss]
    tokens = draw_tokens(47, 2, 9, seed=4, low=PAD + 1)
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    targets, examples = torch.zeros(2, 9, 3), torch.full((2, 9), -1)
    targets[:, 0], examples[:, 0] = labels.float(), torch.tensor([3, 4])
    observed = actual(tokens, sentence_targets=targets, examples=examples).losses["sentence"] / 2
    reference = both.theirs(tokens, labels=labels).loss
    torch.testing.assert_close(observed, reference, rtol=1e-12, atol=0)
