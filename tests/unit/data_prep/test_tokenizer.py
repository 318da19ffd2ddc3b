"""Tokenizers that prep trains or takes, and the fast encoder, which gives the tokenizer's own ids."""

import io
import json
import random
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megatfm import data_prep, tokenizers
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig, TokenizerConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.execution.config_identity import identify_config
from megatfm.data_prep.execution.progress import PrepSummary
from megatfm.data_prep.fast_encode import CachedWordEncoder, FastEncoder, _Gigatoken
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import SentencePieceTokenizer, Tokenizer
from tests.support.prep_files import file_hashes, make_prep_config, stop_before_commit, write_file

Make = Callable[..., PrepConfig]
FILES = {
    "sentencepiece-bpe": {"tokenizer.model", "tokenizer.json"},
    "sentencepiece-unigram": {"tokenizer.model", "tokenizer.json"},
    "byte-bpe": {"tokenizer.json", "tokenizer_config.json"},
    "wordpiece": {"tokenizer.json", "tokenizer_config.json"},
}


@pytest.fixture(scope="module")
def prepare_kind(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], PrepSummary]:
    """`prepare_kind("byte-bpe")`: the corpus with a tokenizer of this kind, to be read and copied only."""

    @cache
    def prepare(kind: str) -> PrepSummary:
        return data_prep.run(make_prep_config(tmp_path_factory.mktemp("kind"), corpus, tokenizer={"kind": kind}))

    return prepare


@pytest.fixture
def byte_bpe(prepare_kind: Callable[[str], PrepSummary], tmp_path: Path) -> Path:
    """A corpus with a tokenizer of Hugging Face, in a folder of its own."""
    return shutil.copytree(prepare_kind("byte-bpe").out, tmp_path / "byte-bpe")


@pytest.mark.parametrize("kind", FILES)
def test_a_corpus_of_each_kind(
    config: Make, corpus: Path, prepare_kind: Callable[[str], PrepSummary], tmp_path: Path, kind: str
) -> None:
    summary = prepare_kind(kind)
    out = shutil.copytree(summary.out, tmp_path / "out")
    result = {path.name for path in summary.out.iterdir()}
    assert result == {*FILES[kind], "train", "validation", "prep.json", "report.html"}
    tokenizer = tokenizers.load(summary.out)
    facts = summary.result["tokenizer"]
    assert facts == json.loads(json.dumps(tokenizer.describe()))
    assert len(tokenizer.sentinels) == 4
    assert bool(tokenizer.modes) == (kind != "sentencepiece-bpe")
    noted = any("is not lossless" in note for note in summary.result["notes"])
    assert noted == (kind == "wordpiece") != tokenizer.lossless
    libraries = summary.result["libraries"]
    assert ("tokenizers" in libraries) == (kind in ("byte-bpe", "wordpiece"))
    held_out = Corpus.open(summary.out / "validation")
    held_out.check_tokenizer(tokenizer.hash)
    for sample in held_out.read_block_samples(0):
        if sample.source == "mojibake.txt":  # was mended on the way
            continue
        text = (corpus / sample.source.replace("%23", "#")).read_text(encoding="utf-8")
        assert sample.tokens.tolist() == tokenizer.encode(text).tolist()
        if tokenizer.lossless:
            assert tokenizer.decode(sample.tokens) == text
    assert data_prep.run(config(tokenizer={"kind": kind})).already_done
    (out / "tokenizer.json").unlink()
    with pytest.raises(Exception, match=r"tokenizer.json: is missing from a finished prep"):
        data_prep.run(config(tokenizer={"kind": kind}))


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
def test_transformers_opens_the_folder(prepare_kind: Callable[[str], PrepSummary], kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    out = prepare_kind(kind).out
    actual, reference = tokenizers.load(out), transformers.AutoTokenizer.from_pretrained(out)
    for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep"):
        assert getattr(reference, f"{role}_token_id") == getattr(actual, role), role
    text = "def naïve(x):\n\treturn x"
    assert reference(text, add_special_tokens=False)["input_ids"] == actual.encode(text).tolist()


def test_options_reach_the_training(texts: Sequence[str]) -> None:
    options: tuple[dict[str, Any], ...] = (
        *({"kind": "byte-bpe", **more} for more in ({}, {"pretokenizer": "llama3"}, {"ul2_modes": False})),
        *({"kind": "wordpiece", **more} for more in ({}, {"lowercase": False})),
        *({"kind": "sentencepiece-bpe", **more} for more in ({}, {"ul2_modes": True})),
    )
    files = [make_tokenizer_files(TokenizerConfig(vocab_size=700, **item), texts[:3]) for item in options]
    assert len({item.get("tokenizer.model", item["tokenizer.json"]) for item in files}) == len(options)


def test_a_tokenizer_can_be_brought_along(config: Make, byte_bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(byte_bpe / name, tmp_path / "elsewhere")
    result = file_hashes(data_prep.run(brought(config, "a", byte_bpe)).out)
    again = data_prep.run(brought(config, "b", tmp_path / "elsewhere" / "tokenizer.json"))
    assert file_hashes(again.out) == result
    shards = {name: value for name, value in file_hashes(byte_bpe).items() if ".zst" in name}
    assert shards.items() <= result.items()
    assert data_prep.run(brought(config, "a", tmp_path / "elsewhere")).already_done


def test_a_model_that_is_brought_along_is_described(config: Make, prepared: PrepSummary) -> None:
    result = data_prep.run(brought(config, "again", prepared.out / "tokenizer.model")).out
    for name in ("tokenizer.model", "tokenizer.json"):
        assert (result / name).read_bytes() == (prepared.out / name).read_bytes()


def test_chat_templates_of_a_tokenizer_belong_to_the_corpus(config: Make, byte_bpe: Path) -> None:
    templates = ["chat_template.jinja", "additional_chat_templates/rag.jinja"]
    for name in templates:
        write_file(byte_bpe / name, name.encode())
    with stop_before_commit("finish"):
        data_prep.run(brought(config, "again", byte_bpe))
    out = data_prep.run(brought(config, "again", byte_bpe)).out  # goes on beside the templates
    assert [(out / name).read_text() for name in templates] == templates
    data_prep.run(config(out="again", tokenizer={"kind": "byte-bpe"}, overwrite=True))
    assert tokenizers.list_chat_templates(out) == []
    assert not (out / "additional_chat_templates").exists()


def test_another_tokenizer_under_the_same_name_is_another_corpus(config: Make, byte_bpe: Path, tmp_path: Path) -> None:
    tokenizer_file = Path(shutil.copy(byte_bpe / "tokenizer.json", tmp_path / "mine.json"))
    data_prep.run(brought(config, "kept", tokenizer_file))
    tokenizer_file.write_text(tokenizer_file.read_text() + "\n")
    with pytest.raises(UsageError, match=r"another config \(tokenizer.file was '[0-9a-f]{64}', is '"):
        data_prep.run(brought(config, "kept", tokenizer_file))


def brought(config: Make, out: str, place: Path) -> PrepConfig:
    settings: dict[str, Any] = {"file": str(place), "vocab_size": 4096, "sentinels": 32}
    return config(out=out, tokenizer=settings)


def test_settings_that_came_later_leave_old_corpora_as_they_are() -> None:
    """Folders prepared before there were kinds still count as finished."""
    values = identify_config(load_section(PrepConfig, "quickstart-data"))["tokenizer"]
    assert values == {"vocab_size": 4096, "sentinels": 32, "train_bytes": 2**27}
    values = identify_config(
        load_section(PrepConfig, "quickstart-data", ["tokenizer.kind=wordpiece", "tokenizer.lowercase=false"])
    )
    assert values["tokenizer"]["kind"] == "wordpiece"
    assert values["tokenizer"]["lowercase"] is False


@pytest.mark.parametrize(("overrides", "message"), [
    (["tokenizer.file=x", "tokenizer.vocab_size=900"], "is used as it is: leave out tokenizer.vocab_size, or file"),
    (["tokenizer.pretokenizer=llama3"], "pretokenizer is an option of kind = 'byte-bpe', not of 'sentencepiece-bpe'"),
    (["tokenizer.kind=byte-bpe", "tokenizer.lowercase=false"], "lowercase is an option of kind = 'wordpiece'"),
    (["tokenizer.kind=bpe"], "tokenizer.kind = 'bpe': input should be 'sentencepiece-bpe', "),
])  # fmt: skip
def test_settings_that_do_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_section(PrepConfig, "quickstart-data", overrides)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------- the fast encoder


KINDS = [
    {"kind": "byte-bpe"},
    {"kind": "byte-bpe", "pretokenizer": "llama3"},
    {"kind": "sentencepiece-bpe"},
    {"kind": "sentencepiece-unigram"},
    {"kind": "wordpiece"},
]
ALPHABET = [
    *"aebTz09 .,'_-()=#\n\t",
    *(
        "  ", "    ", "\n\n", "\n    ", "\r\n", " \n", "the ", " of", "ing", "self.", "'s", "don't", "1234", "</s>",
        "<pad>",
    ),
    *("<extra_0>", "é", "e\u0301", "ß", "İ", "東京", "한국", "😀", "👩\u200d👧", "\u2581", "\u2581x", "\xa0", "\u3000",
      "\u2028", "\x00", "\ufffd"),
]  # fmt: skip


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sources of the standard library, and random strings of what is known to be hard."""
    folder = Path(sysconfig.get_path("stdlib"))
    real = [path.read_text() for name in ("json", "email", "http") for path in sorted((folder / name).glob("*.py"))[:8]]
    rng = random.Random(0)
    return [*real, "", " ", *("".join(rng.choices(ALPHABET, k=rng.randrange(1, 60))) for _ in range(1500))]


@pytest.fixture(scope="module", params=KINDS, ids=lambda item: "-".join(item.values()))
def tokenizer_files(
    request: pytest.FixtureRequest, texts: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Path, str]:
    folder = tmp_path_factory.mktemp("tokenizer")
    config = TokenizerConfig(vocab_size=600, **request.param)
    files = make_tokenizer_files(config, (text for text in texts[:12]))
    return write_tokenizer(folder, files), folder, config.kind


@pytest.fixture(scope="module")
def words(texts: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, CachedWordEncoder]:
    files = make_tokenizer_files(TokenizerConfig(vocab_size=600), (text + "\r\n\r\n\f\n" for text in texts[:12]))
    reference = write_tokenizer(tmp_path_factory.mktemp("words"), files)
    assert isinstance(reference, SentencePieceTokenizer)
    return reference, CachedWordEncoder(reference)


def test_the_ids_are_the_same(tokenizer_files: tuple[Tokenizer, Path, str], texts: list[str]) -> None:
    reference, folder, kind = tokenizer_files
    fast = FastEncoder(reference, folder)
    assert (fast._fast is not None) == (kind in ("byte-bpe", "sentencepiece-bpe"))
    expected = reference.encode_batch(texts, 1)
    for _ in range(2):  # with nothing in memory, and with all
        for text, actual, wanted_result in zip(texts, fast.encode_batch(texts, 1), expected, strict=True):
            assert np.array_equal(actual, wanted_result), repr(text)
            assert actual.dtype == np.int32
    assert fast.encode_batch([], 1) == []


def test_words_are_cut_only_between_pieces(tmp_path: Path) -> None:
    """A model whose pieces reach over spaces, as ours never do."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["out of the box of the cat of the house"] * 50), model_writer=model, model_type="bpe",
        vocab_size=300, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, split_by_whitespace=False, pad_id=3, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    reference = tokenizers.load(tmp_path / "tokenizer.model")
    assert reference.lossless
    assert "of\u2581the" in "".join(map(reference.id_to_piece, range(reference.vocab_size)))
    fast = FastEncoder(reference, tmp_path)
    assert isinstance(fast._fast, CachedWordEncoder)
    rng = random.Random(0)
    texts = ["".join(rng.choices([*"outfhebx  ", "of the ", "é", "\n"], k=40)) for _ in range(300)]
    for actual, expected in zip(fast.encode_batch(texts, 1), reference.encode_batch(texts, 1), strict=True):
        assert np.array_equal(actual, expected)


@given(
    texts=st.lists(
        st.lists(
            st.one_of(st.sampled_from(ALPHABET), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)),
            max_size=30,
        ).map("".join),
        max_size=4,
    )
)
@settings(max_examples=150, deadline=None)
def test_the_words_of_hostile_texts(words: tuple[Tokenizer, CachedWordEncoder], texts: list[str]) -> None:
    reference, memory = words
    for actual, expected in zip(memory(texts, 1), reference.encode_batch(texts, 1), strict=True):
        assert np.array_equal(actual, expected)


def test_added_tokens_that_are_no_special_ones(tmp_path: Path) -> None:
    """Added tokens are found in text before all else, which gigatoken is not asked to do."""
    config = TokenizerConfig(kind="byte-bpe", vocab_size=270, sentinels=2, ul2_modes=False)
    files = make_tokenizer_files(config, ["some text " * 50])
    values = json.loads(files["tokenizer.json"])
    added = dict(values["added_tokens"][-1], id=270, content="tool", special=False)
    files["tokenizer.json"] = json.dumps({**values, "added_tokens": [*values["added_tokens"], added]}).encode()
    reference = write_tokenizer(tmp_path, files)
    fast = FastEncoder(reference, tmp_path)
    texts = ["a tool here", "a text here", "toolbox"]
    expected = reference.encode_batch(texts, 1)
    assert 270 in expected[0]
    for actual, wanted_result in zip(fast.encode_batch(texts, 1), expected, strict=True):
        assert np.array_equal(actual, wanted_result)


@pytest.mark.parametrize("tokenizer_files", [KINDS[0], KINDS[2]], indirect=True, ids=("byte-bpe", "sentencepiece-bpe"))
def test_a_difference_is_found(
    tokenizer_files: tuple[Tokenizer, Path, str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, folder, _ = tokenizer_files
    fast = FastEncoder(reference, folder)
    assert fast._fast is not None
    right = type(fast._fast).__call__
    monkeypatch.setattr(
        type(fast._fast), "__call__", lambda self, texts, threads: [ids[:-1] for ids in right(self, texts, threads)]
    )
    name = "gigatoken" if isinstance(fast._fast, _Gigatoken) else "the cache of words"
    with pytest.raises(MegatfmError, match=f"^{name} gave other ids than the tokenizer"):
        fast.encode_batch(texts[:5], 1)


def test_the_memory_of_words_is_bounded(
    words: tuple[Tokenizer, CachedWordEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatfm.data_prep.fast_encode.MAX_CACHED_WORDS", 50)
    reference, memory = words
    for number in range(20):
        text = " ".join(f"w{number}x{index}" for index in range(20)) + "y" * 100
        (ids,) = memory([text], 1)
        assert np.array_equal(ids, reference.encode_batch([text], 1)[0])
        assert len(memory._cache) <= 50 + 20
        assert max(map(len, memory._cache)) <= 64
