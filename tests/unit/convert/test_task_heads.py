"""Folders of transformers with the head of a downstream task: opened with it, and converted back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import megatfm
from megatfm import checkpoint
from megatfm.convert.architecture import ARCHITECTURES, find_architecture
from megatfm.convert.convert import convert
from megatfm.errors import UsageError
from megatfm.train.finetuning import get_stored_labels
from tests.support.hf_encoders import ENCODER_TOKENS, HF_ENCODERS, SMALL_ENCODER
from tests.support.hf_folders import HF_DECODERS, edit_config, edit_tensors, perturb_parameters

FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": HF_ENCODERS["BertForMaskedLM"],
    "Roberta": HF_ENCODERS["RobertaForMaskedLM"],
    "Albert": HF_ENCODERS["AlbertForMaskedLM"],
    "Longformer": {"attention_window": 4, "type_vocab_size": 1},
    "BigBird": {},
    "Deberta": HF_ENCODERS["DebertaForMaskedLM"],
    "DebertaV2": HF_ENCODERS["DebertaV2ForMaskedLM"],
    "Electra": HF_ENCODERS["ElectraForMaskedLM"],
    "ModernBert": {**HF_ENCODERS["ModernBertForMaskedLM"], "classifier_pooling": "cls", "norm_bias": True},
}
TASKS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
BARE = {"Longformer": TASKS[1:], "BigBird": TASKS[2:]}
"""Classes that open as the bare model: Longformer's have other global tokens, BigBird's other heads."""
CLASSES = [
    f"{family}For{task}"
    for family in FAMILIES
    for task in TASKS
    if task not in BARE.get(family, ()) and hasattr(transformers, f"{family}For{task}")
]
GPT_SIZES = {"vocab_size": 60, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
LLAMA_SIZES = {**SMALL_ENCODER, "num_key_value_heads": 2, "tie_word_embeddings": False}
DECODER_SIZES = {"GPT2": GPT_SIZES, "Llama": LLAMA_SIZES, "Mistral": {**LLAMA_SIZES, "sliding_window": 5}}
MORE_DECODERS = {
    "Mixtral": ("mixtral", TASKS[:3]), "Qwen2": ("qwen2", TASKS[:3]), "Qwen3": ("qwen3", TASKS[:3]),
    "Qwen3Moe": ("qwen3-moe", TASKS[:3]),
    "Gemma2": ("gemma2", TASKS[:2]),
    "Gemma3Text": ("gemma3", TASKS[:1]), "GptOss": ("gpt-oss", TASKS[:2]), "DeepseekV2": ("deepseek-v2", TASKS[:1]),
    "DeepseekV3": ("deepseek-v3", TASKS[:2]),
}  # fmt: skip
"""Family → the decoder of `HF_DECODERS` whose sizes its classes get, and their tasks."""
XLNET_SIZES = {"vocab_size": 60, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 40}
OTHERS: dict[str, dict[str, Any]] = {
    "OpenAIGPTForSequenceClassification": GPT_SIZES,
    **{f"{family}For{task}": sizes for family, sizes in DECODER_SIZES.items() for task in TASKS[:3]},
    **{
        f"{family}For{task}": HF_DECODERS[decoder][1] | {"experts_implementation": "eager"}
        for family, (decoder, tasks) in MORE_DECODERS.items()
        for task in tasks
    },
    **{f"XLNetFor{task}": XLNET_SIZES for task in (*TASKS[:2], "MultipleChoice", "QuestionAnsweringSimple")},
}
"""Decoders, and XLNet."""
LABELS = {0: "sports", 1: "文化", 2: "a b"}


def save_folder(folder: Path, name: str, **options: Any) -> transformers.PreTrainedModel:
    """Save a small model of a class of transformers, with random weights in every tensor."""
    kind = getattr(transformers, name)
    family = name.partition("For")[0]
    labels = {"id2label": LABELS} if "Classification" in name else {}
    sizes = OTHERS[name] | {"pad_token_id": 0} if name in OTHERS else SMALL_ENCODER | FAMILIES[family]
    model = perturb_parameters(kind(kind.config_class(**(sizes | labels | options))))
    model.save_pretrained(folder)
    return model.eval()


def reference_logits(model: transformers.PreTrainedModel) -> Tensor:
    """Logits of transformers; of question answering first and last token side by side."""
    is_choice = type(model).__name__.endswith("MultipleChoice")
    with torch.no_grad():
        output = model(ENCODER_TOKENS[None] if is_choice else ENCODER_TOKENS)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits.T if is_choice else output.logits


def head_logits(folder: Path) -> Tensor:
    """Logits of the one head of a folder that megatfm opens."""
    (logits,) = megatfm.load(folder)(ENCODER_TOKENS).predictions.values()
    return logits


@pytest.mark.parametrize("name", [*CLASSES, *OTHERS])
def test_a_folder_opens_with_its_head(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = reference_logits(save_folder(tmp_path / "theirs", name))
    assert expected.shape[0] == len(ENCODER_TOKENS)
    torch.testing.assert_close(head_logits(tmp_path / "theirs"), expected, rtol=1e-5, atol=1e-5)
    assert "left there" not in caplog.text

    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    torch.testing.assert_close(head_logits(tmp_path / "ours"), expected, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back = getattr(transformers, name).from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(reference_logits(back), expected, rtol=1e-5, atol=1e-5)
    if "Classification" in name:
        assert back.config.id2label == LABELS
        state = checkpoint.read_state(checkpoint.find_checkpoint(tmp_path / "ours"))
        assert get_stored_labels(state) == list(LABELS.values())


def test_every_class_of_a_decoder_s_task_that_transformers_has_is_tried() -> None:
    families = {name.removesuffix("ForCausalLM") for name in ARCHITECTURES.names() if "ForCausalLM" in name}
    existing = {f"{family}For{task}" for family in families for task in TASKS}
    existing = {name for name in existing if hasattr(transformers, name)}
    # Gemma 3's other class is that of models with images.
    assert existing - {"Gemma3ForSequenceClassification"} <= set(OTHERS)


@pytest.mark.parametrize(
    "name", ["BertForTokenClassification", "BertForQuestionAnswering", "RobertaForSequenceClassification"]
)
def test_a_pooler_that_the_class_does_not_use_is_ignored(name: str, tmp_path: Path) -> None:
    """Files of older versions of transformers hold one."""
    expected = reference_logits(save_folder(tmp_path, name))
    prefix = "bert" if name.startswith("Bert") else "roberta"
    edit_tensors(tmp_path, lambda t: t.update({f"{prefix}.pooler.dense.weight": torch.full((24, 24), torch.nan)}))
    torch.testing.assert_close(head_logits(tmp_path), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", ["SequenceClassification", "MultipleChoice"])
def test_modernbert_with_mean_pooling_opens_bare(task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_folder(tmp_path, f"ModernBertFor{task}", classifier_pooling="mean")
    output = megatfm.load(tmp_path)(ENCODER_TOKENS)
    assert output.predictions is None
    expected = model.model(ENCODER_TOKENS).last_hidden_state
    torch.testing.assert_close(output.hidden, expected, rtol=1e-5, atol=1e-5)
    assert "classifier.bias" in caplog.text


def test_a_modernbert_s_dense_layer_may_have_a_bias(tmp_path: Path) -> None:
    expected = reference_logits(
        save_folder(tmp_path / "theirs", "ModernBertForTokenClassification", classifier_bias=True, norm_bias=False)
    )
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    for folder in ("theirs", "ours", "back"):
        torch.testing.assert_close(head_logits(tmp_path / folder), expected, rtol=1e-5, atol=1e-5)


def test_a_decoder_s_head_with_a_bias_is_refused_by_name(tmp_path: Path) -> None:
    save_folder(tmp_path / "theirs", "GPT2ForSequenceClassification")
    model = megatfm.load(tmp_path / "theirs")
    config = model.config.with_changes({"extra_heads.score.bias": True})
    with pytest.raises(UsageError, match=r"GPT2ForSequenceClassification, lacks model.extra_heads.score.bias = True$"):
        find_architecture(config)


def test_a_head_that_the_files_lack_leaves_the_bare_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_folder(tmp_path, "BertForSequenceClassification")
    edit_tensors(tmp_path, lambda t: [t.pop(key) for key in list(t) if key.startswith("classifier")])
    output = megatfm.load(tmp_path)(ENCODER_TOKENS)
    assert output.predictions is None
    torch.testing.assert_close(output.hidden, model.bert(ENCODER_TOKENS).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert "opened without its head: its files lack classifier.bias" in caplog.text


@pytest.mark.parametrize(("options", "loss", "classes"), [
    ({"id2label": {0: "LABEL_0"}}, "squared_error", 1),
    ({"id2label": {0: "score"}, "problem_type": "regression"}, "squared_error", 1),
    ({"problem_type": "multi_label_classification"}, "binary_cross_entropy", 3),
    ({"problem_type": None}, "cross_entropy", 3),
])  # fmt: skip
def test_the_loss_is_that_of_the_problem_type(options: dict[str, Any], loss: str, classes: int, tmp_path: Path) -> None:
    save_folder(tmp_path, "BertForSequenceClassification", **options)
    head = megatfm.load(tmp_path).config.extra_heads["sentence"]
    assert (head.loss, head.classes) == (loss, classes)


def test_an_unknown_problem_type_is_refused_by_name(tmp_path: Path) -> None:
    save_folder(tmp_path, "BertForSequenceClassification")
    edit_config(tmp_path, problem_type="ranking")
    with pytest.raises(UsageError, match="problem_type = 'ranking': megatfm has single_label_classification"):
        megatfm.load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["problem_type"] == "ranking"
