"""Training of SentencePiece and tokenizer.json: deterministic, silent, nothing skipped, errors that say what to do."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import pytest
import sentencepiece
import tokenizers

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_byte_bpe,
    train_sentencepiece,
    train_wordpiece,
)
from megatfm.tokenizers.training import _SEGMENT

Type = Literal["bpe", "unigram"]


def test_the_same_texts_give_the_same_bytes(texts: list[str], model: bytes) -> None:
    assert train_sentencepiece(iter(texts), vocab_size=900, sentinels=8) == model


def test_other_sentinels_leave_the_learnt_pieces(texts: list[str], model: bytes) -> None:
    fewer = SentencePieceTokenizer(train_sentencepiece(texts, vocab_size=892, sentinels=0))
    more = SentencePieceTokenizer(model)
    assert fewer.sentinels == ()
    assert pieces(fewer)[7:] == pieces(more)[15:]


TYPES = ("bpe", "unigram")
FEW = {"bpe": 295, "unigram": 283}


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-unigram"])
def test_pieces_may_hold_breaks_indentation_and_tabs(trained: dict[str, Tokenizer], kind: str) -> None:
    learnt = pieces(trained[kind])
    assert any(piece.startswith("\n\u2581\u2581\u2581\u2581") for piece in learnt)
    assert any("\t" in piece and (len(piece) > 1 or kind == "sentencepiece-unigram") for piece in learnt)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("mark", ["\u2585", "\u2581", "\t", "\0", "\u2047", "\ue009", "\ue020"])
def test_no_line_is_skipped_for_a_special_character(mark: str, model_type: Type) -> None:
    # A unigram model learns a word only if it is a part of two different segments.
    text = f"unmistakable {mark} word\nunmistakable1 " * 50
    model = train_sentencepiece([text], vocab_size=FEW[model_type], sentinels=0, model_type=model_type)
    assert any("unmistak" in piece for piece in pieces(SentencePieceTokenizer(model)))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_text_without_breaks_is_not_skipped(model_type: Type) -> None:
    text = "unmistakable unmistakable1 " * 20_000
    model = train_sentencepiece([text], vocab_size=FEW[model_type] - 5, sentinels=0, model_type=model_type)
    assert any("unmistak" in piece for piece in pieces(SentencePieceTokenizer(model)))


@pytest.mark.parametrize("size", [700, 1500])
def test_unigram_pieces_stay_within_segments(texts: list[str], size: int) -> None:
    """A segment is a word or a run of signs with the space before it, or a break with its indentation, as for BPE."""
    model = train_sentencepiece(texts, vocab_size=size, sentinels=0, model_type="unigram")
    spelled = [piece.replace("\u2581", " ") for piece in pieces(SentencePieceTokenizer(model))[7 + 256 :]]
    assert all(_SEGMENT.fullmatch(piece) for piece in spelled)


def test_the_model_is_a_plain_sentencepiece_model(model: bytes, texts: list[str]) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert all(plain.decode(plain.encode(text)) == text for text in texts)


def test_only_the_text_of_pieces_is_changed(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the protobuf library, where it fits SentencePiece."""
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", exc_type=Exception).ModelProto
    changed = proto.FromString(train_sentencepiece(texts, vocab_size=900, sentinels=8))
    monkeypatch.setattr("megatfm.tokenizers.training._restore_spaces", lambda model: model)
    expected = proto.FromString(train_sentencepiece(texts, vocab_size=900, sentinels=8))
    assert changed != expected
    for piece in expected.pieces:
        piece.piece = piece.piece.replace("\ue009", "\t").replace("\ue020", "\u2581")
    assert changed == expected


def pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_piece(token) for token in range(tokenizer.vocab_size)]


TRAIN: dict[str, Callable[..., bytes]] = {
    "byte-bpe": train_byte_bpe,
    "llama3": partial(train_byte_bpe, pattern="llama3"),
    "wordpiece": train_wordpiece,
    "cased": partial(train_wordpiece, lowercase=False),
}
SENTENCEPIECE: dict[str, Callable[..., bytes]] = {
    "sentencepiece": train_sentencepiece,
    "sentencepiece-unigram": partial(train_sentencepiece, model_type="unigram"),
}
ALL = {**SENTENCEPIECE, **TRAIN}
SCRIPT = """
import hashlib, inspect, json.decoder, textwrap
from megatfm.tokenizers import train_byte_bpe, train_wordpiece
texts = [inspect.getsource(json.decoder), inspect.getsource(textwrap), "Größe, naïve, 東京 한국어 " * 20]
for train in (train_byte_bpe, train_wordpiece):
    print(hashlib.sha256(train(texts, vocab_size=600)).hexdigest())
"""


def test_every_process_trains_the_same(tmp_path: object) -> None:
    """The library's hash tables have another order in each process."""
    run = partial(subprocess.run, [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    first, *remaining = (run().stdout for _ in range(4))
    assert len(first.split()) == 2
    assert remaining == [first] * 3


@pytest.mark.parametrize("kind", ALL)
def test_training_is_silent(texts: list[str], kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    ALL[kind](texts[:1], vocab_size=500)
    assert capfd.readouterr() == ("", "")


def test_byte_bpe_learns_the_merges_of_a_plain_training(texts: list[str]) -> None:
    plain = tokenizers.ByteLevelBPETokenizer()
    plain.train_from_iterator(texts, vocab_size=600, show_progress=False)
    expected = json.loads(plain._tokenizer.to_str())["model"]["merges"]
    actual = json.loads(train_byte_bpe(texts, vocab_size=606, sentinels=0, modes=False))["model"]["merges"]
    assert actual == expected
    assert len(actual) == 600 - 256


def test_wordpiece_encodes_as_berts_own_class(texts: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    for lowercase in (True, False):
        file = train_wordpiece(texts, vocab_size=900, sentinels=4, lowercase=lowercase)
        tokenizer = HuggingFaceTokenizer(file)
        reference = transformers.BertTokenizer(vocab=json.loads(file)["model"]["vocab"], do_lower_case=lowercase)
        for text in (*texts, "Größe, naïve [MASK] 東京 İ don't 🗼"):
            ids = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert tokenizer.encode(text).tolist() == ids
            assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_wordpiece_learns_whole_words_and_what_continues_them(texts: list[str]) -> None:
    for lowercase in (True, False):
        vocab = json.loads(train_wordpiece(texts, vocab_size=900, lowercase=lowercase))["model"]["vocab"]
        assert sorted(vocab.values()) == list(range(900))
        assert {"the", "def", "##ing", "self", "(", "_", "京", "##e"} <= set(vocab)
        assert any(piece != piece.lower() and "<" not in piece and "[" not in piece for piece in vocab) != lowercase
        assert "##(" not in vocab, "signs are words of their own"


def test_rare_characters_take_no_piece() -> None:
    text = "many plain words " * 5000 + "\u4e00\u4e01\u4e02"
    vocab = json.loads(train_wordpiece([text], vocab_size=77))["model"]["vocab"]
    assert "m" in vocab
    assert "\u4e00" not in vocab


@pytest.mark.parametrize("kind", ALL)
def test_a_vocabulary_that_does_not_fit_names_one_that_does(kind: str) -> None:
    """The largest for a little text; for a small size one that holds all bytes, or all reserved ids."""
    train = partial(ALL[kind], ["too little text for so many pieces\n" * 5])
    tokenizer = SentencePieceTokenizer if kind in SENTENCEPIECE else HuggingFaceTokenizer
    for size, message in ((5000, "too large for this little text"), (20, "too small for the characters")):
        with pytest.raises(UsageError, match=message) as caught:
            train(vocab_size=size)
        fitting = int(str(caught.value).split("vocab_size=")[1].split()[0])
        assert tokenizer(train(vocab_size=fitting)).vocab_size == fitting
        if size == 5000:
            with pytest.raises(UsageError):
                train(vocab_size=fitting + 1)


@pytest.mark.parametrize("kind", ["sentencepiece", *TRAIN])
@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_refused(kind: str, texts: list[str]) -> None:
    with pytest.raises(UsageError, match="no text to train a tokenizer on"):
        ALL[kind](texts, vocab_size=400)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("failure", [MegatfmError("damaged"), KeyboardInterrupt()])
def test_errors_of_reading_reach_the_caller(kind: str, failure: BaseException) -> None:
    def texts() -> Iterator[str]:
        yield "some text\n"
        raise failure

    with pytest.raises(type(failure)) as caught:
        ALL[kind](texts(), vocab_size=400)
    assert caught.value is failure


@pytest.mark.parametrize("kind", ALL)
def test_half_a_surrogate_pair_is_refused(kind: str) -> None:
    with pytest.raises(MegatfmError, match=r"surrogates not allowed at character \d: it is not Unicode"):
        ALL[kind](["some text", "abc\ud800"], vocab_size=400)
