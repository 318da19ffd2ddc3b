"""Exported heads of models that are no relatives of BERT, by the defaults: transformers predicts what we predict."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatfm import tokenizers
from megatfm.config import load_config
from megatfm.tasks.examples import ExampleFormat, build_frame
from tests.support.files import read_lines, write_lines
from tests.support.finetuning_tasks import FILLERS, NAMES, TOWNS, WORDS_OF_QUESTIONS, make_questions, save_bert
from tests.support.forked_commands import run_command

CONFIG = """
name = "task"
task = { train = "train.jsonl", validation = "train.jsonl", epochs = 2 }
data = { sequence_length = 32 }
optimizer = { name = "adamw", lr = 4e-3 }
train = { global_batch = 8, micro_batch = 8, precision = "fp32" }
log = { sinks = [] }
"""
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3}
XLNET = {
    "initializer_range": 0.3, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
LLAMA = {"bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, dict[str, Any]] = {
    "ModernBertForMaskedLM": {"local_attention": 8}, "DebertaForMaskedLM": DEBERTA,
    "ElectraForMaskedLM": {"embedding_size": 16}, "LlamaForCausalLM": LLAMA, "XLNetLMHeadModel": XLNET,
}  # fmt: skip


def save_model(folder: Path, name: str, **options: Any) -> None:
    """Save a small model of a class of transformers, with a tokenizer of whole words."""
    save_bert(folder, WORDS_OF_QUESTIONS)
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    sizes = {"pad_token_id": 0} if "d_model" in options or "n_embd" in options else SIZES
    config = kind.config_class(vocab_size=5 + len(set(WORDS_OF_QUESTIONS)), **sizes, **options)
    kind(config).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.toml").write_text(CONFIG)
    return tmp_path


def finetune_and_open(folder: Path, name: str, kind: str, *words: str) -> tuple[Any, list[dict[str, Any]]]:
    """Fine-tune without an option of the head, and export; the model of transformers, and the run's predictions."""
    assert run_command("finetune", "task.toml", "--from", "start", "--export", "exported", *words) == 0
    model = getattr(transformers, kind).from_pretrained(folder / "exported").eval()
    assert type(model).__name__.startswith(re.sub("LMHeadModel|For.*", "For", name))
    return model, read_lines(folder / "runs/task/predictions/validation.jsonl")


def labelled_rows() -> list[dict[str, str]]:
    draw, rows = random.Random(1), []
    for _ in range(48):
        word = draw.choice(TOWNS + NAMES)
        text = " ".join([*draw.sample(FILLERS, 3), word])
        rows.append({"text": text, "label": "town" if word in TOWNS else "name"})
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_head_gives_the_same_probabilities(name: str, folder: Path) -> None:
    save_model(folder / "start", name, **MODELS[name])
    rows = labelled_rows()
    write_lines(folder / "train.jsonl", rows)
    model, predicted = finetune_and_open(folder, name, "AutoModelForSequenceClassification")
    tokenizer = tokenizers.load(folder / "exported")
    is_xlnet = name.startswith("XLNet")
    frame = build_frame(tokenizer, ExampleFormat(0, is_causal=name.endswith("CausalLM"), ends_in_cls=is_xlnet))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    for row, prediction in zip(rows, predicted[:9], strict=False):
        ids = torch.tensor(frame.wrap(tokenizer.encode(row["text"])).tokens)[None]
        assert hf_tokenizer(row["text"]).input_ids == ids[0].tolist()
        pair = frame.wrap(tokenizer.encode("red lamp"), tokenizer.encode(row["text"])).tokens
        assert hf_tokenizer("red lamp", row["text"]).input_ids == pair.tolist()
        segments = {"token_type_ids": torch.tensor([[0] * (ids.shape[1] - 1) + [2]])} if is_xlnet else {}
        with torch.no_grad():
            shares = model(ids, **segments).logits[0].softmax(-1)
        names = [model.config.id2label[place] for place in range(2)]
        expected = torch.tensor([prediction["probabilities"][label] for label in names])
        torch.testing.assert_close(shares, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("name", "options"), [("GPT2LMHeadModel", GPT), ("LlamaForCausalLM", LLAMA)])
def test_a_decoder_s_tags_are_exported(name: str, options: dict[str, Any], folder: Path) -> None:
    """Each word is a token, behind BOS."""
    save_model(folder / "start", name, **options)
    rows = [
        {"text": words, "label": ["TOWN" if word in TOWNS else "NAME" if word in NAMES else "O" for word in words]}
        for words in (row["text"].split() for row in labelled_rows())
    ]
    write_lines(folder / "train.jsonl", rows)
    model, predicted = finetune_and_open(
        folder, name, "AutoModelForTokenClassification", "task.form=tagging", "task.epochs=1"
    )
    tokenizer = tokenizers.load(folder / "exported")
    for row, prediction in zip(rows, predicted[:9], strict=False):
        ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(" ".join(row["text"])).tolist(), tokenizer.eos]])
        with torch.no_grad():
            numbers = model(ids).logits[0, 1:-1].argmax(-1).tolist()
        assert [model.config.id2label[number] for number in numbers] == prediction["labels"]


@pytest.mark.parametrize(("name", "options"), [("GPT2LMHeadModel", GPT), ("LlamaForCausalLM", LLAMA)])
def test_a_decoder_s_answers_are_exported(name: str, options: dict[str, Any], folder: Path) -> None:
    save_model(folder / "start", name, **options)
    rows = make_questions(64, 1)
    write_lines(folder / "train.jsonl", rows)
    kind = "AutoModelForQuestionAnswering"
    model, predicted = finetune_and_open(
        folder, name, kind, "task.form=span_extraction", "data.sequence_length=48", "task.epochs=4"
    )
    tokenizer = tokenizers.load(folder / "exported")
    right = 0
    for row, prediction in zip(rows, predicted, strict=True):
        question, context = (tokenizer.encode(row[key]).tolist() for key in ("question", "context"))
        ids = torch.tensor([[tokenizer.bos, *question, tokenizer.sep, *context, tokenizer.cls]])
        with torch.no_grad():
            output = model(ids)
        begins, ends = (x[0, len(question) + 2 : -1] for x in (output.start_logits, output.end_logits))
        scores = begins[:, None] + ends
        allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(29)
        begin, end = divmod(int(scores.masked_fill(~allowed, -torch.inf).argmax()), len(ends))
        assert " ".join(row["context"].split()[begin : end + 1]) == prediction["answer"]
        right += prediction["answer"] == row["answers"][0]["text"]
    assert right / len(rows) > 0.5  # it has learnt something: towns are not answers by chance


def test_a_run_resumes_with_the_head_that_it_has(folder: Path) -> None:
    """Earlier versions gave a decoder's head a bias; one that an option gave it stays, too."""
    save_model(folder / "start", "LlamaForCausalLM", **LLAMA)
    write_lines(folder / "train.jsonl", labelled_rows())
    older = 'model.extra_heads.score={name="text_classifier",pooler="none",bias=true}'
    assert run_command("finetune", "task.toml", "--from", "start", "task.epochs=1", older) == 0
    assert run_command("finetune", "task.toml", "--from", "start", "task.epochs=2", "resume.allow=schedule") == 0
    head = load_config(folder / "runs/task/finetune.toml").model.extra_heads["score"]
    assert (head.pooler, head.bias) == ("none", True)
    steps = [row["step"] for row in read_lines(folder / "runs/task/metrics.jsonl") if "loss" in row]
    assert steps == sorted(set(steps)), "the run went on, and did not start again"


def test_a_head_in_the_config_s_file_counts_beside_a_model_to_start_from(folder: Path) -> None:
    save_model(folder / "start", "LlamaForCausalLM", **LLAMA)
    write_lines(folder / "train.jsonl", labelled_rows())
    head = '\n[model.extra_heads.score]\nname = "text_classifier"\ndropout = 0.25\n'
    (folder / "task.toml").write_text(CONFIG + head)
    assert run_command("finetune", "task.toml", "--from", "start", "--prepare") == 0
    section = load_config(folder / "runs/task/finetune.toml").model.extra_heads["score"]
    assert (section.dropout, section.pooler, section.bias) == (0.25, "none", False)


def test_a_head_that_no_class_has_is_refused_before_training(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_bert(folder / "start", WORDS_OF_QUESTIONS)
    write_lines(folder / "train.jsonl", [row | {"other": row["text"]} for row in labelled_rows()])
    words = ["--export", "exported", "task.text_pair=other", "task.both_orders=true"]
    assert run_command("finetune", "task.toml", "--from", "start", *words) == 2
    error = "the nearest, BertForSequenceClassification, lacks model.extra_heads.sentence.both_orders = True"
    assert error in capfd.readouterr().err
    assert not (folder / "runs/task/metrics.jsonl").exists()
