"""Heads of downstream tasks against transformers' classes: logits, losses and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.models.big_bird import modeling_big_bird
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.llama import modeling_llama
from transformers.models.longformer import modeling_longformer
from transformers.models.mistral import modeling_mistral
from transformers.models.modernbert import modeling_modernbert
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.xlnet import modeling_xlnet

from megatfm.config import ModelConfig
from megatfm.convert.architecture import ARCHITECTURES, TASK_CLASSES
from megatfm.layers.task_heads import compute_summed_loss
from megatfm.models import build
from tests.support.hf_encoders import (
    BERT_ENCODER,
    DEBERTA,
    DEBERTA_V3,
    ENCODER_OPTIONS,
    MODERNBERT,
    PAD,
    VOCABULARY,
    draw_tokens,
    padded_batch,
)
from tests.support.reference_gradients import LargestErrors, build_pair, cast_to_float64

HEAD = {"name": "text_classifier", "classes": 3, "dropout": 0.0}
BARE = {"lm_head.name": "none", "lm_head.bias": False, "extra_heads": {"sentence": HEAD}}
RELATIVES = {
    "Bert": {},
    "Roberta": {"position.offset": PAD + 1, "embedding.n_segments": 1},
    "Albert": {"ffn.activation": "gelu_tanh", "embedding.dim": 10, "distinct_layers": 1},
}
RELATIVES["Electra"] = {"embedding.dim": 10}
RELATIVES["Longformer"] = {
    **RELATIVES["Roberta"],
    "attention.name": "longformer", "attention.pattern": {"name": "longformer", "width": 6, "global_tokens": [0]},
}  # fmt: skip
RELATIVES["BigBird"] = {"ffn.activation": "gelu_tanh", "attention.pattern.name": "bigbird"}
OTHERS = {
    "Deberta": {**DEBERTA, "position.max_distance": 15, "embedding.n_segments": 0},
    "DebertaV2": {**DEBERTA_V3, "embedding.n_segments": 2},
    "ModernBert": MODERNBERT,
}
"""Encoders with other positions than BERT's."""
POOLERS = {
    "BigBird": "activation", "Deberta": "gelu", "DebertaV2": "gelu", "Electra": "gelu", "ModernBert": "transform",
}  # fmt: skip
"""Those of classifiers of sequences and of choices; BERT's is "tanh"."""
SPAN, CHOICE = {"name": "span_extraction"}, {"name": "multiple_choice", "dropout": 0.0}
HEADS_OF_CLASS = {
    "SequenceClassification": {"sentence": HEAD},
    "TokenClassification": {"sentence": HEAD | {"pooler": "none", "token": "all"}},
    "MultipleChoice": {"sentence": CHOICE},
    "QuestionAnswering": {"span": SPAN},
}
UNDONE = {
    "MultipleChoice": ("classifier.bias",),
    "QuestionAnswering": ("qa_outputs.bias", "classifier.bias", ".2.output.LayerNorm.bias"),
}
"""Added to every choice, or token, a bias changes no softmax; before a linear layer neither."""
UNDONE_LAST = {
    (True, "MultipleChoice"): ("logits_proj.bias",),
    (True, "QuestionAnswering"): ("qa_outputs.bias", ".2.ff.layer_norm.bias"),
    (False, "QuestionAnswering"): ("qa_outputs.bias", "ln_f.bias"),
}
"""Biases that no softmax sees, by whether the model is XLNet (else a decoder) and by task."""
LACKING = {
    "Longformer": ("TokenClassification", "MultipleChoice", "QuestionAnswering"),
    "BigBird": ("MultipleChoice", "QuestionAnswering"),
    "Deberta": ("MultipleChoice",),
}
"""Longformer's have no or other global tokens in transformers, BigBird's other layers; DeBERTa has no such class."""
CLASSES = [
    (relative, task)
    for task in HEADS_OF_CLASS
    for relative in RELATIVES | OTHERS
    if task not in LACKING.get(relative, ())
]
UNREAD = {"BigBird": ("bert.pooler.weight", "bert.pooler.bias")}
"""Parameters of transformers' classes that their heads don't read."""
SCORE = {
    "name": "text_classifier", "classes": 3, "pooler": "none", "token": "last", "bias": False, "dropout": 0.0,
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "attention.n_heads": 6, "ffn.d_ff": 96,
    "norm.name": "layer_norm", "ffn.activation": "gelu_tanh", "attention.bias": True, "ffn.bias": True,
    "position.name": "learned", "position.max_positions": 15,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "attention.n_heads": 6, "attention.n_kv_heads": 2,
    "ffn.d_ff": 40, "position.theta": 500.0, "embedding.tied": False,
}  # fmt: skip
DECODERS = {
    "OpenAIGPT": {**GPT, "norm.placement": "post"},
    "GPT2": GPT,
    "Llama": LLAMA,
    "Mistral": {**LLAMA, "attention.pattern": {"name": "window", "width": 4}},
    "Qwen2": {**LLAMA, "attention.bias": True, "attention.output_bias": False},
    "Qwen3": {**LLAMA, "attention.qk_norm": True},
}
XLNET = {
    "family": "xlnet", "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 3, "attention.name": "two_stream",
    "attention.n_heads": 4, "ffn.d_ff": 40, "ffn.activation": "gelu", "ffn.bias": True, "norm.name": "layer_norm",
    "norm.eps": 1e-7, "norm.placement": "post", "position.name": "transformer_xl",
}  # fmt: skip
LAST_TOKEN_CLASSES = [
    ("OpenAIGPT", "SequenceClassification"),
    *(
        (relative, task)
        for relative in ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3")
        for task in HEADS_OF_CLASS
        if task != "MultipleChoice"
    ),
    *(("XLNet", task) for task in HEADS_OF_CLASS),
]
"""Models whose last token tells the class."""
SAME_HEADS = {
    "DeepseekV2": ["SequenceClassification"],
    "DeepseekV3": ["SequenceClassification", "TokenClassification"],
    "Gemma2": ["SequenceClassification", "TokenClassification"],
    "Gemma3Text": ["SequenceClassification"],
    "GptOss": ["SequenceClassification", "TokenClassification"],
    "Mixtral": ["SequenceClassification", "TokenClassification", "QuestionAnswering"],
    "Qwen3Moe": ["SequenceClassification", "TokenClassification", "QuestionAnswering"],
}
"""Decoders whose logits alone are compared (tests/unit/convert/test_task_heads.py): their heads are Llama's."""
LABELS = torch.tensor([2, 0, 1])
MODELING = (
    modeling_big_bird, modeling_longformer, modeling_deberta, modeling_deberta_v2, modeling_modernbert, modeling_llama,
    modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_rope_utils, modeling_xlnet,
)  # fmt: skip


def test_every_head_here_is_tried() -> None:
    expected = {class_name(relative, task) for relative, task in [*CLASSES, *LAST_TOKEN_CLASSES]}
    expected |= {f"{relative}For{task}" for relative, tasks in SAME_HEADS.items() for task in tasks}
    assert {name for name in ARCHITECTURES.names() if TASK_CLASSES.fullmatch(name)} == expected


def class_name(relative: str, task: str) -> str:
    is_simple = (relative, task) == ("XLNet", "QuestionAnswering")
    return f"{relative}For{task}{'Simple' if is_simple else ''}"


def task_inputs(task: str, batch: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Inputs of transformers, its labels, and the labels as we read them, for rows without padding."""
    tokens, none = batch["input_ids"], torch.full_like(batch["input_ids"], -100)
    first = torch.zeros_like(tokens, dtype=torch.bool)
    first[:, 0] = True
    if task == "SequenceClassification":
        return batch, {"labels": LABELS}, {"sentence_targets": LABELS[:, None].where(first, none)}
    if task == "TokenClassification":
        labels = (tokens % 3).where(tokens % 2 == 0, none)
        return batch, {"labels": labels}, {"sentence_targets": labels}
    if task == "QuestionAnswering":
        starts, ends = torch.tensor([0, 3, 2]), torch.tensor([0, 3, 6])
        places = torch.arange(tokens.shape[1])
        marks = (places == starts[:, None]).long() + 2 * (places == ends[:, None])
        model_fields = {"answer_marks": marks, "examples": torch.arange(3)[:, None].where(first, -1)}
        return batch, {"start_positions": starts, "end_positions": ends}, model_fields
    # One question of three choices.
    model_fields = {
        "choice_targets": torch.tensor([1, -100, -100])[:, None].where(first, none),
        "examples": torch.full_like(tokens, 7).where(first, -1),
        "parts": torch.tensor([0, 1, 2])[:, None].expand_as(tokens),
    }
    return {key: value[None] for key, value in batch.items()}, {"labels": torch.tensor([1])}, model_fields


def join_rows(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows one after another, each a document."""
    n_rows, length = fields["tokens"].shape
    fields = {"documents": torch.arange(n_rows)[:, None].expand(-1, length), **fields}
    fields = {"positions": torch.arange(length).expand(n_rows, -1), **fields}
    return {name: values.reshape(1, -1) for name, values in fields.items()}


@pytest.mark.parametrize(("relative", "task"), CLASSES)
def test_logits_loss_and_gradients_are_transformers_s(relative: str, task: str) -> None:
    ((module, head),) = HEADS_OF_CLASS[task].items()
    if task in ("SequenceClassification", "MultipleChoice") or relative == "ModernBert":
        head = head | {"pooler": POOLERS.get(relative, "tanh"), "pooler_bias": relative != "ModernBert"}
    options = BERT_ENCODER | RELATIVES[relative] if relative in RELATIVES else ENCODER_OPTIONS | OTHERS[relative]
    config = ModelConfig.from_dotted(options | BARE | {"extra_heads": {module: head}})
    name = f"{relative}For{task}"
    figures = LargestErrors()
    with cast_to_float64(torch.float64, *MODELING):
        pair = build_pair(config, torch.float64, among=[name], unused=UNREAD.get(relative, ()))
    assert type(pair.reference).__name__ == name
    batch = {
        key: value[:, :9] for key, value in padded_batch(config).items() if key not in ("labels", "attention_mask")
    }
    reference_fields, labels, model_fields = task_inputs(task, batch)
    with cast_to_float64(torch.float64, *MODELING):
        expected = pair.reference(**reference_fields, **labels)
    segments = {"segments": batch["token_type_ids"]} if "token_type_ids" in batch else {}
    plain = pair.model(batch["input_ids"], **segments).predictions[module]
    if task == "QuestionAnswering":
        reference = torch.stack([expected.start_logits, expected.end_logits], -1)
    else:
        reference = expected.logits.reshape(plain.shape)
    figures.compare_logits(plain, reference, torch.float64)
    fields = {"tokens": batch["input_ids"], **segments, **model_fields}
    fields = join_rows(fields) if task == "MultipleChoice" else fields
    (total,) = pair.model(**fields).losses.values()
    counted = (
        {"MultipleChoice": 1, "TokenClassification": int((labels["labels"] >= 0).sum())} if "labels" in labels else {}
    )
    loss = total / counted.get(task, len(LABELS))
    figures.compare_logits(loss, expected.loss, torch.float64)
    loss.backward()
    expected.loss.backward()
    if relative != "Longformer":  # the first token's last queries are global: the others have no gradient
        figures.compare_gradients(pair, torch.float64, UNDONE.get(task, ()))


@pytest.mark.parametrize(("relative", "task"), LAST_TOKEN_CLASSES)
def test_heads_of_decoders_and_xlnet_are_transformers_s(relative: str, task: str) -> None:
    """A class or a choice is told by the last token, whose labels stand there."""
    is_xlnet, name = relative == "XLNet", class_name(relative, task)
    ((module, head),) = HEADS_OF_CLASS[task].items()
    last = {"pooler": "tanh", "token": "last"} if is_xlnet else SCORE
    head = head | last if task in ("SequenceClassification", "MultipleChoice") else head
    module = "score" if module == "sentence" and not is_xlnet else module
    body = XLNET if is_xlnet else DECODERS[relative]
    config = ModelConfig.from_dotted(body | BARE | {"extra_heads": {module: head}})
    figures = LargestErrors()
    with cast_to_float64(torch.float64, *MODELING):
        pair = build_pair(config, torch.float64, among=[name])
    if is_xlnet:
        assert not pair.model.encoder.query.weight.requires_grad
    assert type(pair.reference).__name__ == name
    pair.reference.config.pad_token_id = PAD  # by which it finds the last tokens; none of these is padding
    tokens = draw_tokens(VOCABULARY, 3, 9, seed=4, low=PAD + 1)
    segments = {"token_type_ids": draw_tokens(3, 3, 9, seed=5)} if is_xlnet else {}
    reference_fields, labels, model_fields = task_inputs(task, {"input_ids": tokens, **segments})
    with cast_to_float64(torch.float64, *MODELING):
        expected = pair.reference(**reference_fields, **labels)
    fields = {"tokens": tokens} | ({"segments": segments["token_type_ids"]} if segments else {})
    plain = pair.model(**fields).predictions[module]
    reference = torch.stack([expected.start_logits, expected.end_logits], -1) if module == "span" else expected.logits
    figures.compare_logits(plain, reference.reshape(plain.shape), torch.float64)
    if task in ("SequenceClassification", "MultipleChoice"):
        model_fields = {key: values if key == "parts" else values.flip(1) for key, values in model_fields.items()}
    fields |= model_fields
    (total,) = pair.model(**(join_rows(fields) if task == "MultipleChoice" else fields)).losses.values()
    undone = UNDONE_LAST.get((is_xlnet, task), ())
    counts = {"MultipleChoice": 1, "TokenClassification": int((labels.get("labels", LABELS) >= 0).sum())}
    figures.compare_logits(total / counts.get(task, len(LABELS)), expected.loss, torch.float64)
    (total / counts.get(task, len(LABELS))).backward()
    expected.loss.backward()
    if is_xlnet:  # the vector of tokens to predict: neither has a gradient of it
        assert pair.reference.transformer.mask_emb.grad is None
        pair.reference.transformer.mask_emb.grad = torch.zeros(1, 1, config.d_model, dtype=torch.float64)
        pair.model.encoder.query.weight.grad = torch.zeros(config.d_model, dtype=torch.float64)
        undone = (*undone, "transformer.mask_emb")
    figures.compare_gradients(pair, torch.float64, undone)


def test_the_examples_of_a_row_are_seen_with_their_numbers() -> None:
    """Logits of three packed examples go to `on_logits` in evaluation, and are those of each alone."""
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE)
    model = build_pair(config, torch.float64, among=["BertForSequenceClassification"]).model.eval()
    tokens, lengths = draw_tokens(47, 1, 15, seed=4, low=PAD + 1), (6, 4, 5)
    targets, examples = torch.full((1, 15), -100), torch.full((1, 15), -1)
    starts = [0, 6, 10]
    targets[0, starts], examples[0, starts] = torch.tensor([1, 0, 2]), torch.tensor([7, 70, 9])
    seen = []
    model.sentence.on_logits = lambda *tensors: seen.append(tensors)
    model(
        tokens, documents=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None],
        positions=torch.cat([torch.arange(n) for n in lengths])[None], sentence_targets=targets, examples=examples,
    )  # fmt: skip
    ((numbers, words, logits, labels),) = seen
    assert words.tolist() == [0, 0, 0]
    assert numbers.tolist() == [7, 70, 9]
    assert labels.tolist() == [1, 0, 2]
    for start, length, logits_of_row in zip(starts, lengths, logits, strict=True):
        alone = model(tokens[:, start : start + length]).predictions["sentence"][0]
        torch.testing.assert_close(logits_of_row, alone, rtol=1e-12, atol=1e-12)


def test_dropout_of_the_head_depends_on_the_example_alone() -> None:
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE).with_changes({"extra_heads.sentence.dropout": 0.5})
    model = build_pair(config, torch.float64, among=["BertForSequenceClassification"]).model.train()
    tokens = draw_tokens(47, 2, 9, seed=4, low=PAD + 1)
    targets = torch.full((2, 9), -100)
    targets[:, 0] = 1
    fields = {"sentence_targets": targets, "keys": torch.tensor([5, 11])}
    loss = model(tokens, **fields).losses["sentence"]
    alone = [model(tokens[i : i + 1], **{k: v[i : i + 1] for k, v in fields.items()}) for i in (0, 1)]
    torch.testing.assert_close(loss, sum(output.losses["sentence"] for output in alone))
    other = model(tokens, **fields | {"keys": torch.tensor([6, 12])}).losses["sentence"]
    assert (loss - other).abs() > 1e-6


def test_classes_weigh_as_those_of_torch() -> None:
    """torch's mean is over weights, ours over examples."""
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 2, 1, 2, 0])
    weights = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)
    total = weights[targets].sum()
    expected = torch.nn.functional.cross_entropy(logits, targets, weights) * total
    torch.testing.assert_close(compute_summed_loss("cross_entropy", logits, targets, weights), expected)


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "squared_error"])
def test_losses_of_numbers_are_transformers_s(loss: str) -> None:
    """Losses of multi_label_classification and regression are means over classes."""
    config = ModelConfig.from_dotted(BERT_ENCODER | BARE).with_changes({"extra_heads.sentence.loss": loss})
    plain = ModelConfig.from_dotted(BERT_ENCODER | BARE)
    pair = build_pair(plain, torch.float64, among=["BertForSequenceClassification"])
    actual = build(config).double()
    actual.load_state_dict(pair.model.state_dict())
    kinds = {"binary_cross_entropy": "multi_label_classification", "squared_error": "regression"}
    pair.reference.config.problem_type = kinds[loss]
    tokens = draw_tokens(47, 2, 9, seed=4, low=PAD + 1)
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    targets, examples = torch.zeros(2, 9, 3), torch.full((2, 9), -1)
    targets[:, 0], examples[:, 0] = labels.float(), torch.tensor([3, 4])
    observed = actual(tokens, sentence_targets=targets, examples=examples).losses["sentence"] / 2
    reference = pair.reference(tokens, labels=labels).loss
    torch.testing.assert_close(observed, reference, rtol=1e-12, atol=0)
