"""Each kind of tokenizer that prep can train, and those it can take: files, hashes, corpora made with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatfm import data_prep, tokenizers
from megatfm.config import load
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.execution.config_identity import config_identity
from megatfm.errors import UsageError
from tests.support.prep_files import file_hashes

Make = Callable[..., PrepConfig]
FILES = {
    "sentencepiece-bpe": {"tokenizer.model", "tokenizer.json"},
    "sentencepiece-unigram": {"tokenizer.model", "tokenizer.json"},
    "byte-bpe": {"tokenizer.json", "tokenizer_config.json"},
    "wordpiece": {"tokenizer.json", "tokenizer_config.json"},
}


@pytest.mark.parametrize("kind", FILES)
def test_a_corpus_of_each_kind(config: Make, corpus: Path, kind: str) -> None:
    """Corpus, file, hash and facts belong together; the texts come back where the kind is lossless."""
    summary = data_prep.run(config(tokenizer={"kind": kind}))
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
    (summary.out / "tokenizer.json").unlink()
    with pytest.raises(Exception, match=r"tokenizer.json: is missing from a finished prep"):
        data_prep.run(config(tokenizer={"kind": kind}))


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
def test_transformers_opens_the_folder(config: Make, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    out = data_prep.run(config(tokenizer={"kind": kind})).out
    actual, reference = tokenizers.load(out), transformers.AutoTokenizer.from_pretrained(out)
    for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep"):
        assert getattr(reference, f"{role}_token_id") == getattr(actual, role), role
    text = "def naïve(x):\n\treturn x"
    assert reference(text, add_special_tokens=False)["input_ids"] == actual.encode(text).tolist()


def test_options_reach_the_training(config: Make) -> None:
    hashes = {
        data_prep.run(config(out=f"{number}", tokenizer=settings)).result["tokenizer"]["blake3"]
        for number, settings in enumerate(
            (
                {"kind": "byte-bpe"},
                {"kind": "byte-bpe", "pretokenizer": "llama3"},
                {"kind": "byte-bpe", "ul2_modes": False},
                {"kind": "wordpiece"},
                {"kind": "wordpiece", "lowercase": False},
                {"ul2_modes": True},
            )
        )
    }
    assert len(hashes) == 6


def test_a_tokenizer_can_be_brought_along(config: Make, tmp_path: Path) -> None:
    """Named by its file, its folder, or from another place: the same corpus. Nothing is trained."""
    first = data_prep.run(config(tokenizer={"kind": "byte-bpe"})).out
    (tmp_path / "elsewhere").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "elsewhere" / name).write_bytes((first / name).read_bytes())
    result = [
        data_prep.run(brought(config, out, place))
        for out, place in (("a", first), ("b", tmp_path / "elsewhere" / "tokenizer.json"))
    ]
    assert file_hashes(result[0].out) == file_hashes(result[1].out)
    shards = {name: value for name, value in file_hashes(first).items() if ".zst" in name}
    assert shards.items() <= file_hashes(result[0].out).items()
    assert data_prep.run(brought(config, "a", tmp_path / "elsewhere")).already_done


def test_a_model_that_is_brought_along_is_described(config: Make) -> None:
    first = data_prep.run(config()).out
    result = data_prep.run(brought(config, "again", first / "tokenizer.model")).out
    for name in ("tokenizer.model", "tokenizer.json"):
        assert (result / name).read_bytes() == (first / name).read_bytes()


def test_another_tokenizer_under_the_same_name_is_another_corpus(config: Make, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    for number, modes in enumerate((True, False)):
        out = data_prep.run(config(out=f"{number}", tokenizer={"kind": "byte-bpe", "ul2_modes": modes})).out
        mine.write_bytes((out / "tokenizer.json").read_bytes())
        if number == 0:
            data_prep.run(brought(config, "kept", mine))
    with pytest.raises(UsageError, match=r"another config \(tokenizer.file was '[0-9a-f]{64}', is '"):
        data_prep.run(brought(config, "kept", mine))


def brought(config: Make, out: str, place: Path) -> PrepConfig:
    settings: dict[str, Any] = {"file": str(place), "vocab_size": 4096, "sentinels": 32}
    return config(out=out, tokenizer=settings)


def test_settings_that_came_later_leave_old_corpora_as_they_are() -> None:
    """What was prepared before there were kinds is still taken for finished."""
    values = config_identity(load(PrepConfig, "quickstart-data"))["tokenizer"]
    assert values == {"vocab_size": 4096, "sentinels": 32, "train_bytes": 2**27}
    values = config_identity(
        load(PrepConfig, "quickstart-data", ["tokenizer.kind=wordpiece", "tokenizer.lowercase=false"])
    )
    assert values["tokenizer"]["kind"] == "wordpiece"
    assert values["tokenizer"]["lowercase"] is False


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["tokenizer.file=x", "tokenizer.vocab_size=900"],
            "is used as it is: leave out tokenizer.vocab_size, or file",
        ),
        (
            ["tokenizer.pretokenizer=llama3"],
            "pretokenizer is an option of kind = 'byte-bpe', not of 'sentencepiece-bpe'",
        ),
        (
            ["tokenizer.kind=byte-bpe", "tokenizer.lowercase=false"],
            "lowercase is an option of kind = 'wordpiece'",
        ),
        (["tokenizer.kind=bpe"], "tokenizer.kind = 'bpe': input should be 'sentencepiece-bpe', "),
    ],
)
def test_settings_that_do_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(PrepConfig, "quickstart-data", overrides)
    assert message in str(caught.value)
