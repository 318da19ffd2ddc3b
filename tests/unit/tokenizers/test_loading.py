"""Tokenizers by path or folder, the files to copy, and roles of special tokens."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import BertTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from megatfm.convert import tokenizer_files
from megatfm.errors import UsageError
from megatfm.tasks.chat import load_chat_template
from megatfm.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    find_tokenizer_file,
    load,
    read_tokenizer_files,
    train_byte_bpe,
)
from megatfm.tokenizers.base import filter_special_token_names, find_special_tokens, list_reserved_names


@pytest.fixture
def corpus(tmp_path: Path, model: bytes, tokenizer: Tokenizer) -> Path:
    """Folder with a tokenizer's files, as `megatfm prep` leaves them."""
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.describe()))
    return tmp_path


def test_a_corpus_holds_a_model_and_its_description(corpus: Path, tokenizer: Tokenizer) -> None:
    assert find_tokenizer_file(corpus) == corpus / "tokenizer.model"
    for path in (corpus, str(corpus), corpus / "tokenizer.model", corpus / "tokenizer.json"):
        loaded = load(path)
        assert isinstance(loaded, SentencePieceTokenizer)
        assert loaded.hash == tokenizer.hash
        assert list(read_tokenizer_files(path)) == ["tokenizer.model"]
    (corpus / "tokenizer.model").unlink()
    for read in (load, read_tokenizer_files):
        with pytest.raises(UsageError, match=r"tokenizer.json: this describes a Sent.*: put tokenizer.model beside it"):
            read(corpus / "tokenizer.json")


@pytest.mark.parametrize("name", ["spiece.model", "sentencepiece.bpe.model", "tokenizer.model"])
def test_models_go_by_several_names(tmp_path: Path, model: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(model)
    assert find_tokenizer_file(tmp_path) == tmp_path / name
    assert list(read_tokenizer_files(tmp_path)) == ["tokenizer.model"]


def test_a_file_is_recognised_by_its_content(tmp_path: Path, model: bytes, texts: list[str]) -> None:
    (tmp_path / "a").write_bytes(model)
    (tmp_path / "b").write_bytes(train_byte_bpe(texts, vocab_size=400))
    assert isinstance(load(tmp_path / "a"), SentencePieceTokenizer)
    assert isinstance(load(tmp_path / "b"), HuggingFaceTokenizer)


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"\n", b"\xef\xbb\xbf \r\n\t"])
def test_a_json_may_begin_with_blanks_and_a_mark(tmp_path: Path, before: bytes, texts: list[str]) -> None:
    plain = train_byte_bpe(texts, vocab_size=400)
    (tmp_path / "tokenizer.json").write_bytes(plain)
    hash, copied = load(tmp_path).hash, read_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(before + plain)
    assert load(tmp_path).hash == hash
    assert read_tokenizer_files(tmp_path) == copied
    (tmp_path / "tokenizer.json").write_bytes(before)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load(tmp_path)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(UsageError, match=r"no regular file|no tokenizer.model or tokenizer.json here"):
            load(path)


def test_a_folder_of_both_is_read_with_its_special_tokens(folders: dict[str, Path], model: bytes) -> None:
    """T5's model alone has no sentinels."""
    folder = folders["t5"]
    (folder / "spiece.model").write_bytes(model)
    assert len(load(folder).sentinels) == 100
    (folder / "spiece.model").unlink()


@pytest.mark.parametrize("family", ["gpt2", "roberta", "bert", "t5", "llama2"])
def test_a_copy_is_the_same_tokenizer(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    """Written in the order that is given; while one is missing there is no tokenizer."""
    before = load(folders[family])
    for name, content in read_tokenizer_files(folders[family] / "tokenizer.json").items():
        assert find_tokenizer_file(tmp_path) is None
        (tmp_path / name).write_bytes(content)
    after = load(tmp_path)
    assert (after.hash, after.special) == (before.hash, before.special)


@pytest.mark.parametrize("has_config", [True, False])
def test_chat_templates_are_copied_with_a_tokenizer(tmp_path: Path, has_config: bool, texts: list[str]) -> None:
    """Their files have the names that transformers writes."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    templates = {"default": "{{ 'a' }}", "rag": "{{ 'b' }}", "tool_use": "{{ 'c' }}"}
    (source / "tokenizer.json").parent.mkdir()
    (source / "tokenizer.json").write_bytes(train_byte_bpe(texts, vocab_size=400))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), chat_template=templates)
    tokenizer.save_pretrained(source)
    if not has_config:
        (source / "tokenizer_config.json").unlink()
    for name, content in read_tokenizer_files(source).items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    options = {} if has_config else {"tokenizer_file": str(copy / "tokenizer.json")}
    assert PreTrainedTokenizerFast.from_pretrained(copy, **options).chat_template == templates
    for name, template in templates.items():
        assert load_chat_template(copy, load(copy), None, name=name).source == template


def test_a_task_s_template_takes_the_place_of_the_tokenizer_s(tmp_path: Path, texts: list[str]) -> None:
    """In an exported folder, which has the tokenizer's files already."""
    source, exported = tmp_path / "source", tmp_path / "exported"
    source.mkdir()
    exported.mkdir()
    (source / "tokenizer.json").write_bytes(train_byte_bpe(texts, vocab_size=400))
    (source / "chat_template.jinja").write_text("{{ 'of the tokenizer' }}")
    (source / "tokenizer_config.json").write_text("{}")
    (tmp_path / "mine.jinja").write_text("{{ 'of the task' }}")
    assert tokenizer_files.copy_tokenizer(source / "tokenizer.json", exported) == "tokenizer.json"
    assert tokenizer_files._copy_chat_template(tmp_path / "mine.jinja", exported) == []
    assert (exported / "chat_template.jinja").read_text() == "{{ 'of the task' }}"


def test_a_config_without_its_tokens_is_not_overlooked(tmp_path: Path, model: bytes) -> None:
    """A slow tokenizer's folder: its config adds tokens which the model lacks."""
    (tmp_path / "spiece.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 100}')
    assert find_tokenizer_file(tmp_path) is None
    with pytest.raises(UsageError, match=r"no tokenizer\.json here: .*save_pretrained"):
        load(tmp_path)
    assert load(tmp_path / "spiece.model").sentinels


def test_folders_of_old_versions_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no tokenizer\.json here: .*save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize("lower", [True, False])
def test_a_vocab_txt_alone_is_bert_s(tmp_path: Path, lower: bool) -> None:
    """Ids are transformers'."""
    pieces = [
        "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "Größe", "gro", "##ße", "東", ",", "a",
    ]  # fmt: skip
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    if not lower:
        (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    reference = BertTokenizer.from_pretrained(tmp_path)
    actual = load(tmp_path)
    for text in ("unaffable, a", "Größe größe", "東a,UNAFF", "weird [MASK]"[:5]):
        assert actual.encode(text).tolist() == reference(text, add_special_tokens=False)["input_ids"], text
    special = actual.special
    assert (special.pad, special.unk, special.cls, special.sep, special.mask) == (0, 1, 2, 3, 4)
    assert load_files(tmp_path, tmp_path / "copy").hash == actual.hash
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(UsageError, match=r"vocab\.txt: no WordPiece: it has no \[PAD\]"):
        load(tmp_path)
    (tmp_path / "vocab.txt").write_bytes("a\nb\n".encode("utf-16"))
    with pytest.raises(UsageError, match=r"vocab\.txt: not a vocabulary, a piece a line in UTF-8"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"vocab\.txt: the tokenizer_config\.json beside it is not valid"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
@pytest.mark.parametrize("leading", [False, True])
def test_a_vocab_json_with_its_merges_is_gpt2_s_or_roberta_s(
    folders: dict[str, Path], tmp_path: Path, family: str, leading: bool
) -> None:
    """Ids are transformers'."""
    model = json.loads((folders[family] / "tokenizer.json").read_text())
    pieces = {**model["model"]["vocab"], **{item["content"]: item["id"] for item in model["added_tokens"]}}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(pieces))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": leading}))
    kind = GPT2Tokenizer if family == "gpt2" else RobertaTokenizer
    reference, actual = kind.from_pretrained(tmp_path), load(tmp_path)
    for text in ("the cat's hat, 12 of them", " Größe  東\n\tx", "", "a b"):
        assert actual.encode(text).tolist() == reference(text, add_special_tokens=False)["input_ids"], text
    assert actual.special.eos == reference.eos_token_id
    assert actual.special.mask == reference.mask_token_id
    if family == "roberta":  # GPT-2's has none
        assert actual.special.pad == reference.pad_token_id
    assert load_files(tmp_path, tmp_path / "copy").hash == actual.hash
    (tmp_path / "vocab.json").write_text(json.dumps({"a</w>": 0, "<|endoftext|>": 1}))
    with pytest.raises(UsageError, match=r"vocab\.json: not the vocabulary and merges of a BPE"):
        load(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UsageError, match=r"vocab\.json: neither GPT-2's nor RoBERTa's byte-level BPE: .*AutoTokenizer"):
        load(tmp_path)


@pytest.mark.parametrize(("config", "reason"), [
    ("[1]", "is not valid: mend it or remove it"),
    ("[" * 100_000, "is not valid: mend it or remove it"),
    ("{", "is not valid: mend it or remove it"),
    ('{"do_lower_case": "yes", "add_prefix_space": "yes"}', "= 'yes': write true or false"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json"])
def test_a_damaged_config_beside_a_vocabulary_is_one_line(name: str, config: str, reason: str, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate([*alphabet, "<|endoftext|>"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": null}')
    assert load(tmp_path / name).encode("a").size == 1
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UsageError, match=rf"{name}: the tokenizer_config\.json beside it .*{reason}"):
        load(tmp_path / name)


def load_files(place: Path, copy: Path) -> Tokenizer:
    copy.mkdir()
    for name, content in read_tokenizer_files(place).items():
        (copy / name).write_bytes(content)
    return load(copy)


def test_missing_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    assert find_tokenizer_file(tmp_path) is None
    with pytest.raises(UsageError, match=r"no tokenizer.model or tokenizer.json here: .*megatfm prep"):
        load(tmp_path)
    with pytest.raises(UsageError, match=r"x\.json: can't read the tokenizer \(No such file"):
        load(tmp_path / "x.json")
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "train").mkdir()
    with pytest.raises(UsageError, match=rf"no tokenizer.* here, but in the folder above: give {tmp_path}$"):
        load(tmp_path / "train")


def ids(text: str) -> dict[str, int]:
    return {name: token for token, name in enumerate(text.split())}


@pytest.mark.parametrize(("tokens", "expected"), [
    ("<s> </s> <pad> <unk>", {"bos": 0, "eos": 1, "pad": 2, "unk": 3}),
    ("[PAD] [UNK] [CLS] [SEP] [MASK]", {"bos": 2, "eos": 3, "pad": 0, "cls": 2, "sep": 3, "mask": 4}),
    ("<|endoftext|>", {"bos": 0, "eos": 0, "pad": 0, "unk": None}),
    ("<pad> </s> <unk>", {"bos": 1, "eos": 1, "pad": 0, "unk": 2}),  # T5
    (
        "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|>",
        {"bos": 0, "eos": 1, "pad": 1, "unused": (2,)},  # Llama 3
    ),
    ("<pad> <eos> <bos> <unk>", {"bos": 2, "eos": 1, "pad": 0}),  # Gemma
    ("</s> <extra_id_2> <extra_id_1> <extra_id_0>", {"sentinels": (3, 2, 1), "unused": ()}),
    ("</s> ▁<extra_id_1> ▁<extra_id_0>", {"sentinels": (2, 1)}),  # mT5
    ("</s> <extra_0> <extra_2>", {"sentinels": (1,), "unused": (2,)}),  # without 1, 2 can't be reached
    ("</s> [S2S] [NLU] [NLG]", {"modes": {"R": 2, "S": 1, "X": 3}}),  # UL2
    ("</s> <R> <S> <X>", {"modes": {"R": 1, "S": 2, "X": 3}}),
    ("</s> [R] [X]", {"modes": {}, "unused": (1, 2)}),
])  # fmt: skip
def test_roles_by_name(tokens: str, expected: dict[str, object]) -> None:
    special_tokens = find_special_tokens(ids(tokens), {}, "x")
    assert {name: getattr(special_tokens, name) for name in expected} == expected
    assert special_tokens.reserved == set(range(len(tokens.split())))


def test_special_tokens_of_the_file_go_before_usual_names() -> None:
    special_tokens = find_special_tokens(ids("<s> </s> <stop> <blank>"), {"eos": "<stop>", "mask": "<blank>"}, "x")
    assert (special_tokens.bos, special_tokens.eos, special_tokens.mask, special_tokens.unused) == (0, 2, 3, (1,))


def test_a_token_that_ends_texts_is_not_unknown() -> None:
    assert find_special_tokens(ids("<|endoftext|>"), {"unk": "<|endoftext|>", "eos": "<|endoftext|>"}, "x").unk is None


@pytest.mark.parametrize("tokens", ["", "<unk> <pad> <mask>"])
def test_nothing_to_end_a_text_with_is_an_error(tokens: str) -> None:
    with pytest.raises(UsageError, match="x: no special token that could end a text"):
        find_special_tokens(ids(tokens), {}, "x")


def test_names_of_our_own() -> None:
    actual = "<s> </s> <pad> <mask> <cls> <sep> <extra_0> <extra_1> <R> <S> <X>"
    assert " ".join(list_reserved_names(2, True)) == actual
    assert list_reserved_names(0, False, without=("bos", "eos", "pad")) == ["<mask>", "<cls>", "<sep>"]
    special_tokens = find_special_tokens({name: n for n, name in enumerate(list_reserved_names(2, True))}, {}, "x")
    assert special_tokens.unused == ()


def test_candidates_are_what_could_be_reserved() -> None:
    assert filter_special_token_names(["a", "<s>", "<extra_id_7>", "▁<extra_3>", "<extra_>", "[NLU]", "<0x00>"]) == [
        "<s>",
        "<extra_id_7>",
        "▁<extra_3>",
        "[NLU]",
    ]
