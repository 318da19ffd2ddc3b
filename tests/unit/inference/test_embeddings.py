"""Sentences to vectors, against transformers and pooling by hand."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer, RobertaConfig, RobertaModel, XLNetConfig, XLNetModel

import megatfm
from megatfm.errors import UsageError
from megatfm.inference.embeddings import SentenceEmbedder
from tests.support.reference_gradients import perturb
from tests.support.small_runs import SMALL_DECODER, random_model, write_next_checkpoint, write_trained_run

PIECES = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{letter}" for letter in "abcdefghij"),
]  # fmt: skip
SENTENCES = ["a bad cab", "i", "deaf babe fed a bee had a big bag", "", "cab"]
SMALL = {
    "vocab_size": len(PIECES), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip


def folder_of(path: Path, expected: Any) -> Path:
    """Write a folder like that of a MiniLM on the Hub: a bare encoder and a vocab.txt."""
    perturb(expected)
    expected.eval().save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return path


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, BertModel, BertTokenizer]:
    reference = BertModel(BertConfig(**SMALL))
    folder = folder_of(tmp_path / "bert", reference)
    return folder, reference, BertTokenizer.from_pretrained(folder)


def by_hand(expected: Any, inputs: Any, pooling: str) -> torch.Tensor:
    with torch.no_grad():
        hidden = expected(**inputs).last_hidden_state
    if pooling == "first":
        return hidden[:, 0]
    counted = inputs["attention_mask"].bool()
    if pooling == "last":
        return hidden[torch.arange(len(hidden)), counted.sum(1) - 1]
    if pooling == "masked":
        text = counted & (inputs["input_ids"] > 4)
        counted = torch.where(text.any(1, keepdim=True), text, counted)
    return torch.stack([rows[mask].mean(0) for rows, mask in zip(hidden, counted, strict=True)])


@pytest.mark.parametrize("pooling", ["mean", "first", "last", "masked"])
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_vectors_are_transformers(bert: Any, pooling: Any, batch: int) -> None:
    folder, expected, tokenizer = bert
    encoder = megatfm.load(folder)
    vectors = encoder.encode(SENTENCES, pooling=pooling, batch=batch)
    by_reference = by_hand(expected, tokenizer(SENTENCES, padding=True, return_tensors="pt"), pooling)
    torch.testing.assert_close(vectors, by_reference, rtol=1e-5, atol=1e-5)
    unit = encoder.encode(SENTENCES, pooling=pooling, normalize=True)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(by_reference), rtol=1e-5, atol=1e-5)


def test_a_folder_of_sentence_transformers_says_how(bert: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, expected, tokenizer = bert
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    vectors = megatfm.load(folder).encode(SENTENCES)
    inputs = tokenizer(SENTENCES, padding=True, truncation=True, max_length=8, return_tensors="pt")
    by_reference = torch.nn.functional.normalize(by_hand(expected, inputs, "first"))
    torch.testing.assert_close(vectors, by_reference, rtol=1e-5, atol=1e-5)
    assert "2 of 5 texts are cut at 8 tokens" in caplog.text
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UsageError, match="pooling_mode_max_tokens: megatfm has pooling_mode_mean_tokens"):
        megatfm.load(folder).encode(SENTENCES)
    (folder / "1_Pooling/config.json").unlink()
    for text, message in (
        ("[" * 100_000, "not a list of modules"),
        ("7", "not a list of modules"),
        ('[{"type": "models.Dense"}]', "megatfm has no module models.Dense, only Transformer, Pooling, Normalize"),
    ):
        (folder / "modules.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            megatfm.load(folder).encode(SENTENCES)


def test_positions_that_begin_after_the_padding_s_id(tmp_path: Path) -> None:
    reference = RobertaModel(RobertaConfig(**SMALL, pad_token_id=0))
    folder = folder_of(tmp_path / "roberta", reference)
    tokenizer = BertTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    by_reference = by_hand(reference, inputs, "mean")
    torch.testing.assert_close(megatfm.load(folder).encode(SENTENCES), by_reference, rtol=1e-5, atol=1e-5)


def test_padding_that_is_forgotten_is_said_once(bert: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, tokenizer = bert
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = megatfm.load(folder)
    marked = inputs["attention_mask"].long() - 1
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        caplog.clear()
        model(inputs["input_ids"], documents=marked)
        model(inputs["input_ids"][:1])
        assert caplog.text == ""
        model(inputs["input_ids"])
        model(inputs["input_ids"])
    assert caplog.text.count("rows end in the padding token 0, and no `documents` say so") == 1


def test_wrong_requests_for_embeddings_are_refused(bert: Any) -> None:
    encoder = megatfm.load(bert[0])
    with pytest.raises(UsageError, match="pooling = 'max': choose one of mean, first, last, masked"):
        encoder.encode("a", pooling="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no sentences"):
        encoder.encode([])
    with pytest.raises(UsageError, match="sentences: 7 is no text"):
        encoder.encode(["a", 7])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="batch = 0: choose 1 or more"):
        encoder.encode("a", batch=0)
    short = SentenceEmbedder(encoder.module, encoder.tokenizer, max_tokens=2)
    with pytest.raises(UsageError, match="max_tokens = 2: 2 tokens stand around a text already: choose 3 or more"):
        short.encode("a")
    assert SentenceEmbedder(encoder.module, encoder.tokenizer, max_tokens=3).encode("abc").shape == (1, 24)


@pytest.mark.parametrize("begins", [None, (), (7,)])
def test_a_decoder_reads_what_stood_before_texts_in_training(
    begins: tuple[int, ...] | None, tmp_path: Path, tokenizer_model: bytes
) -> None:
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(SMALL_DECODER, torch.float32))
    if begins is not None:
        write_next_checkpoint(run, {"begins": [*begins]})
    model = megatfm.load(run)
    before = [model.tokenizer.bos] if begins is None else [*begins]
    for text in ("import textwrap", "Größe"):
        tokens = torch.tensor([[*before, *model.tokenizer.encode(text).tolist()]])
        with torch.no_grad():
            by_reference = model(tokens).hidden[0].mean(0)
        vector = model.encode([text, "a longer text beside it"])[0]
        torch.testing.assert_close(vector, by_reference, rtol=1e-5, atol=1e-5)


def test_xlnet_reads_its_marks_behind_the_text(tmp_path: Path) -> None:
    """[CLS] with a segment of its own, as transformers' tokenizer says it."""
    reference = XLNetModel(XLNetConfig(vocab_size=len(PIECES), d_model=24, n_layer=2, n_head=4, d_inner=40))
    folder = folder_of(tmp_path / "xlnet", reference)
    model = megatfm.load(folder)
    ids = [5, 18, 3, 2]  # a ##d [SEP] [CLS]
    segments = torch.tensor([[0, 0, 0, 2]])
    with torch.no_grad():
        by_reference = reference(torch.tensor([ids]), token_type_ids=segments).last_hidden_state[0].mean(0)
    torch.testing.assert_close(model.encode(["ad", "a bad cab"])[0], by_reference, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_makes_no_vectors(tmp_path: Path, tokenizer_model: bytes) -> None:
    config = SMALL_DECODER.model_copy(update={"family": "encoder_decoder"})
    run = write_trained_run(tmp_path / "run", tokenizer_model, random_model(config, torch.float32))
    with pytest.raises(UsageError, match="family = 'encoder_decoder' makes no vectors of texts"):
        megatfm.load(run).encode("a")


@pytest.mark.parametrize("pooling", ["mean", "first", "last", "masked"])
def test_neither_batch_nor_company_changes_a_vector(bert: Any, pooling: Any) -> None:
    """By a model in float64, whose vectors are rounded to float32: equal to its last bit but one."""
    folder, _, _ = bert
    model = megatfm.load(folder, dtype="float64")
    texts = [text * n for n in (1, 3, 5) for text in SENTENCES][:14]
    alone = torch.cat([model.encode(text, pooling=pooling) for text in texts])
    for batch in (1, 7, 32):
        torch.testing.assert_close(model.encode(texts, pooling=pooling, batch=batch), alone, rtol=2e-7, atol=1e-9)
        backwards = model.encode(texts[::-1], pooling=pooling, batch=batch).flip(0)
        torch.testing.assert_close(backwards, alone, rtol=2e-7, atol=1e-9)
