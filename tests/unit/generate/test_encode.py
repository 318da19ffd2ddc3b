"""Sentences to vectors, against transformers and pooling by hand."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer, RobertaConfig, RobertaModel

import megatfm
from megatfm.errors import UsageError
from tests.parity.oracle import perturb

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghij",
    *(f"##{letter}" for letter in "abcdefghij"),
]
SENTENCES = ["a bad cab", "i", "deaf babe fed a bee had a big bag", "", "cab"]
SMALL = {
    "vocab_size": len(PIECES), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip


def folder_of(path: Path, theirs: Any) -> Path:
    """As a MiniLM lies on the Hub: a bare encoder and a vocab.txt."""
    perturb(theirs)
    theirs.eval().save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return path


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, BertModel, BertTokenizer]:
    theirs = BertModel(BertConfig(**SMALL))
    folder = folder_of(tmp_path / "bert", theirs)
    return folder, theirs, BertTokenizer.from_pretrained(folder)


def by_hand(theirs: Any, given: Any, pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = theirs(**given).last_hidden_state
    if pooling == "first":
        return hidden[:, 0]
    counted = given["attention_mask"].bool()
    if pooling == "masked":
        text = counted & (given["input_ids"] > 4)
        counted = torch.where(text.any(1, keepdim=True), text, counted)
    return torch.stack([rows[kept].mean(0) for rows, kept in zip(hidden, counted, strict=True)])


@pytest.mark.parametrize("pooling", ["mean", "first", "masked"])
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_vectors_are_transformers(bert: Any, pooling: Any, batch: int) -> None:
    folder, theirs, tokenizer = bert
    encoder = megatfm.load(folder)
    vectors = encoder.encode(SENTENCES, pooling=pooling, batch=batch)
    wanted = by_hand(theirs, tokenizer(SENTENCES, padding=True, return_tensors="pt"), pooling)
    torch.testing.assert_close(vectors, wanted, rtol=1e-5, atol=1e-5)
    unit = encoder.encode(SENTENCES, pooling=pooling, normalize=True)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(wanted), rtol=1e-5, atol=1e-5)


def test_a_folder_of_sentence_transformers_says_how(bert: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, theirs, tokenizer = bert
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    modules = [
        {"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    vectors = megatfm.load(folder).encode(SENTENCES)
    given = tokenizer(SENTENCES, padding=True, truncation=True, max_length=8, return_tensors="pt")
    wanted = torch.nn.functional.normalize(by_hand(theirs, given, "first"))
    torch.testing.assert_close(vectors, wanted, rtol=1e-5, atol=1e-5)
    assert "2 of 5 texts are cut at 8 tokens" in caplog.text
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UsageError, match="pooling_mode_max_tokens: megatfm has pooling_mode_mean_tokens"):
        megatfm.load(folder).encode(SENTENCES)


def test_positions_that_begin_after_the_padding_s_id(tmp_path: Path) -> None:
    theirs = RobertaModel(RobertaConfig(**SMALL, pad_token_id=0))
    folder = folder_of(tmp_path / "roberta", theirs)
    tokenizer = BertTokenizer.from_pretrained(folder)
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    given.pop("token_type_ids", None)
    wanted = by_hand(theirs, given, "mean")
    torch.testing.assert_close(megatfm.load(folder).encode(SENTENCES), wanted, rtol=1e-5, atol=1e-5)


def test_padding_that_is_forgotten_is_said_once(bert: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, tokenizer = bert
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = megatfm.load(folder)
    marked = given["attention_mask"].long() - 1
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        caplog.clear()
        model(given["input_ids"], documents=marked)
        model(given["input_ids"][:1])
        assert caplog.text == ""
        model(given["input_ids"])
        model(given["input_ids"])
    assert caplog.text.count("rows end in the padding token 0, and no `documents` say so") == 1


def test_what_can_t_be_pooled(bert: Any) -> None:
    encoder = megatfm.load(bert[0])
    with pytest.raises(UsageError, match="pooling = 'max': choose one of mean, first, masked"):
        encoder.encode("a", pooling="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no sentences"):
        encoder.encode([])
