"""Training of tokenizer.json files: deterministic, silent, as their libraries do it, errors that say what to do."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import tokenizers

from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import HuggingFaceTokenizer, train_byte_bpe, train_wordpiece
from tests.support.tokenizer_cases import check_fitting_size

TRAIN: dict[str, Callable[..., bytes]] = {
    "byte-bpe": train_byte_bpe,
    "llama3": partial(train_byte_bpe, pattern="llama3"),
    "wordpiece": train_wordpiece,
    "cased": partial(train_wordpiece, lowercase=False),
}
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


@pytest.mark.parametrize("kind", TRAIN)
def test_training_a_json_tokenizer_is_silent(
    texts: list[str], kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    TRAIN[kind](texts[:1], vocab_size=500)
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
        reference = transformers.BertTokenizer(
            vocab=json.loads(file)["model"]["vocab"], do_lower_case=lowercase
        )
        for text in (*texts, "Größe, naïve [MASK] 東京 İ don't 🗼"):
            ids = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert tokenizer.encode(text).tolist() == ids
            assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_wordpiece_learns_whole_words_and_what_continues_them(texts: list[str]) -> None:
    for lowercase in (True, False):
        vocab = json.loads(train_wordpiece(texts, vocab_size=900, lowercase=lowercase))["model"]["vocab"]
        assert sorted(vocab.values()) == list(range(900))
        assert {"the", "def", "##ing", "self", "(", "_", "京", "##e"} <= set(vocab)
        assert (
            any(piece != piece.lower() and "<" not in piece and "[" not in piece for piece in vocab)
            != lowercase
        )
        assert "##(" not in vocab, "signs are words of their own"


def test_rare_characters_take_no_piece() -> None:
    text = "many plain words " * 5000 + "\u4e00\u4e01\u4e02"
    vocab = json.loads(train_wordpiece([text], vocab_size=77))["model"]["vocab"]
    assert "m" in vocab
    assert "\u4e00" not in vocab


@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.parametrize(
    ("text", "size", "message", "is_largest"),
    [
        ("too little text for so many pieces\n", 5000, "too large for this little text", True),
        ("the reserved ids alone need some pieces\n", 20, "too small for the characters", False),
    ],
    ids=["too large", "too small"],
)
def test_a_vocabulary_that_does_not_fit_names_one_that_does(
    kind: str, text: str, size: int, message: str, is_largest: bool
) -> None:
    check_fitting_size(TRAIN[kind], HuggingFaceTokenizer, text, size, message, is_largest=is_largest)


@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_no_text_is_refused(kind: str, texts: list[str]) -> None:
    with pytest.raises(UsageError, match="no text to train a tokenizer on"):
        TRAIN[kind](texts, vocab_size=400)


@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.parametrize("failure", [MegatfmError("damaged"), KeyboardInterrupt()])
def test_what_goes_wrong_while_reading_is_raised_as_it_is(kind: str, failure: BaseException) -> None:
    def texts() -> Iterator[str]:
        yield "some text\n"
        raise failure

    with pytest.raises(type(failure)) as caught:
        TRAIN[kind](texts(), vocab_size=400)
    assert caught.value is failure


@pytest.mark.parametrize("kind", TRAIN)
def test_half_a_surrogate_pair_is_refused(kind: str) -> None:
    with pytest.raises(MegatfmError, match="character 3: it is not Unicode"):
        TRAIN[kind](["some text", "abc\ud800"], vocab_size=400)
