"""Training: deterministic, silent, nothing skipped, pieces that help code, errors that say what to do."""

from functools import partial
from typing import Literal

import pytest
import sentencepiece

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import SentencePieceTokenizer, Tokenizer, train_sentencepiece
from megatfm.tokenizers.training import _SEGMENT
from tests.support.tokenizer_cases import check_fitting_size

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


@pytest.mark.parametrize("model_type", TYPES)
def test_training_sentencepiece_is_silent(
    texts: list[str], capfd: pytest.CaptureFixture[str], model_type: Type
) -> None:
    train_sentencepiece(texts[:1], vocab_size=500, model_type=model_type)
    assert capfd.readouterr() == ("", "")


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
    """As those of BPE do: a word or a run of signs with the space before it, or a break with its indentation."""
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
    monkeypatch.setattr("megatfm.tokenizers.training._with_spaces", lambda model: model)
    expected = proto.FromString(train_sentencepiece(texts, vocab_size=900, sentinels=8))
    assert changed != expected
    for piece in expected.pieces:
        piece.piece = piece.piece.replace("\ue009", "\t").replace("\ue020", "\u2581")
    assert changed == expected


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    ("text", "size", "message", "is_largest"),
    [
        ("too little text for so many pieces\n", 5000, "too large for this little text", True),
        ("the bytes alone need 256 pieces\n", 100, "too small for the characters", False),
    ],
    ids=["too large", "too small"],
)
def test_a_vocabulary_that_does_not_fit_names_one_that_does(
    model_type: Type, text: str, size: int, message: str, is_largest: bool
) -> None:
    train = partial(train_sentencepiece, model_type=model_type)
    check_fitting_size(train, SentencePieceTokenizer, text, size, message, is_largest=is_largest)


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError):
        train_sentencepiece(texts, vocab_size=400)


@pytest.mark.parametrize("failure", [MegatfmError("damaged"), KeyboardInterrupt()])
def test_what_goes_wrong_while_reading_is_raised_as_it_is(failure: BaseException) -> None:
    def texts():
        yield "some text\n"
        raise failure

    with pytest.raises(type(failure)) as caught:
        train_sentencepiece(texts(), vocab_size=400)
    assert caught.value is failure


def pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_piece(token) for token in range(tokenizer.vocab_size)]
