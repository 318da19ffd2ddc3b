"""Find the files of a tokenizer, and load them; formats older than tokenizer.json are converted.

These are BERT's vocab.txt, and vocab.json with merges.txt of GPT-2 and RoBERTa.
"""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megatfm.errors import UsageError
from megatfm.tokenizers.base import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    Tokenizer,
    merge_special_tokens_map,
    parse_tokenizer_config,
)
from megatfm.tokenizers.hugging_face import HuggingFaceTokenizer
from megatfm.tokenizers.sentence_piece import SentencePieceTokenizer

SP_MODEL, TOKENIZER_JSON, VOCAB_TXT = "tokenizer.model", "tokenizer.json", "vocab.txt"
VOCAB_JSON, MERGES_TXT = "vocab.json", "merges.txt"
CHAT_TEMPLATE = "chat_template.jinja"
"""The chat template beside a tokenizer.json, as transformers names it."""
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder beside a tokenizer.json for its chat templates of other names, as transformers writes it."""
TOKENIZER_FILENAMES = (SP_MODEL, TOKENIZER_JSON, TOKENIZER_CONFIG)
"""Names of the tokenizer files that megatfm writes."""

SP_MODELS = (SP_MODEL, "spiece.model", "sentencepiece.bpe.model")
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
CONVERT_HINT = "transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) makes a tokenizer.json"


def load(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file, a `tokenizer.json` or a SentencePiece model, or from a folder with one.

    A `tokenizer.json` that describes the SentencePiece model beside it stands for that model. Raises UsageError if
    there is none, or the file is something else.
    """
    file = _resolve(path)
    data = _skip_blanks(file, _read(file))
    if converted := _convert_legacy(file, data):
        return HuggingFaceTokenizer(converted, None, str(file))
    if data[:1] != b"{":
        return SentencePieceTokenizer(data, str(file))
    return HuggingFaceTokenizer(data, read_tokenizer_config(file), str(file))


def _resolve(path: str | Path) -> Path:
    """Return the file of a tokenizer: itself, or the one that `find_tokenizer_file` finds in a folder or beside a
    description."""
    file = Path(path)
    if file.is_dir():
        if found := find_tokenizer_file(file):
            return found
        raise UsageError(f"{path}: {_explain_not_found(file)}")
    if file.name != TOKENIZER_JSON or _is_hugging_face(_read(file)):
        return file
    if found := find_tokenizer_file(file.parent):
        return found
    raise UsageError(f"{file}: this describes a SentencePiece model: put {SP_MODEL} beside it, or give that file")


def find_tokenizer_file(folder: str | Path) -> Path | None:
    """Return the tokenizer's file in a prepared corpus, a run or a Hugging Face folder; None if there is none.

    A `tokenizer.json` of the tokenizers library wins: it has more special tokens than a `.model` beside it.
    """
    tokenizer_json = Path(folder, TOKENIZER_JSON)
    if tokenizer_json.is_file() and _is_hugging_face(_read(tokenizer_json)):
        return tokenizer_json
    models = [path for path in (Path(folder, name) for name in SP_MODELS) if path.is_file()]
    if models and tokenizer_json.is_file():
        return models[0]
    if not models and Path(folder, VOCAB_TXT).is_file():
        return Path(folder, VOCAB_TXT)
    if not models and all(Path(folder, name).is_file() for name in (VOCAB_JSON, MERGES_TXT)):
        return Path(folder, VOCAB_JSON)
    # A config without tokenizer.json adds tokens that the model alone lacks.
    return models[0] if models and not Path(folder, TOKENIZER_CONFIG).is_file() else None


def read_tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Return name → content of the files from which `load` gives the same tokenizer elsewhere, and its chat templates.

    A name may have a folder. Write them in this order: `find_tokenizer_file` finds nothing until the last one is there.
    """
    file = _resolve(path)
    data = _skip_blanks(file, _read(file))
    if converted := _convert_legacy(file, data):
        return {TOKENIZER_JSON: converted}
    if data[:1] != b"{":
        return {SP_MODEL: data}
    config = read_tokenizer_config(file)
    templates = {name: _read(file.parent / name) for name in list_chat_templates(file.parent)}
    return {**templates, **({} if config is None else {TOKENIZER_CONFIG: config}), TOKENIZER_JSON: data}


def list_chat_templates(folder: str | Path) -> list[str]:
    """Return the names of the files in a tokenizer's folder that hold its chat templates."""
    files = [Path(folder, CHAT_TEMPLATE), *sorted(Path(folder, CHAT_TEMPLATES_FOLDER).glob("*.jinja"))]
    return [file.relative_to(folder).as_posix() for file in files if file.is_file()]


def _skip_blanks(file: Path, data: bytes) -> bytes:
    """Return a JSON file's content from its brace on. Some editors put a byte order mark before it."""
    if file.suffix != ".json":
        return data
    stripped = data.removeprefix(codecs.BOM_UTF8).lstrip()
    return stripped if stripped[:1] == b"{" else data


def _convert_legacy(file: Path, data: bytes) -> bytes | None:
    """Return the tokenizer.json equivalent to a vocab.txt or vocab.json; None for other files."""
    if file.name == VOCAB_TXT:
        return _convert_wordpiece(data, _read_config(file), str(file))
    if file.name == VOCAB_JSON:
        return _convert_byte_bpe(data, _read(file.with_name(MERGES_TXT)), _read_config(file), str(file))
    return None


def _convert_wordpiece(vocabulary: bytes, config: bytes | None, name: str) -> bytes:
    """Return the tokenizer.json that transformers makes of a vocab.txt. config: the tokenizer_config.json beside it.

    Raises UsageError if the file is no WordPiece vocabulary.
    """
    options = _read_options(config, name, ("do_lower_case", "strip_accents", "tokenize_chinese_chars"))
    try:
        pieces = vocabulary.decode("utf-8").split("\n")
    except ValueError as error:
        raise UsageError(f"{name}: not a vocabulary, a piece a line in UTF-8: {error}") from None
    ids = {piece.rstrip("\r"): index for index, piece in enumerate(pieces) if piece.strip()}
    if missing := [piece for piece in WORDPIECE_SPECIAL if piece not in ids]:
        raise UsageError(f"{name}: no WordPiece: it has no {missing[0]}: {CONVERT_HINT}")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=options.get("do_lower_case", True),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIAL))
    return tokenizer.to_str(pretty=True).encode()


def _convert_byte_bpe(vocabulary: bytes, merges: bytes, config: bytes | None, name: str) -> bytes:
    """Return the tokenizer.json that transformers makes of GPT-2's or RoBERTa's vocab.json and merges.txt.

    config: the tokenizer_config.json beside them. Raises UsageError for other files.
    """
    prefix_space = _read_options(config, name, ("add_prefix_space",)).get("add_prefix_space", False)
    try:
        ids = json.loads(vocabulary)
        lines = [line for line in merges.decode("utf-8").split("\n") if line and not line.startswith("#version")]
        pairs = [(first, second) for first, second in (line.rstrip("\r").split(" ") for line in lines)]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs, fuse_unk=False))
    except Exception as error:  # the library raises a bare Exception if vocabulary and merges don't fit
        raise UsageError(f"{name}: not the vocabulary and merges of a BPE: {error}") from None
    is_roberta = all(piece in ids for piece in ROBERTA_SPECIAL)
    has_bytes = set(pre_tokenizers.ByteLevel.alphabet()) <= ids.keys()
    if not has_bytes or not (is_roberta or END_OF_TEXT in ids):
        raise UsageError(f"{name}: neither GPT-2's nor RoBERTa's byte-level BPE: {CONVERT_HINT}")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ROBERTA_SPECIAL) if is_roberta else [END_OF_TEXT])
    if is_roberta:
        ends = ("</s>", ids["</s>"]), ("<s>", ids["<s>"])
        tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=prefix_space)
    return tokenizer.to_str(pretty=True).encode()


def _read_options(config: bytes | None, name: str, keys: Sequence[str]) -> dict[str, bool]:
    """Return the switches that a tokenizer_config.json sets. name: of the file beside it. Raises UsageError."""
    values = parse_tokenizer_config(config, name)
    options = {key: values[key] for key in keys if values.get(key) is not None}
    for key, value in options.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}: the {TOKENIZER_CONFIG} beside it has {key} = {value!r:.80}: write true or false")
    return options


def read_tokenizer_config(file: Path) -> bytes | None:
    """Return the tokenizer_config.json of a tokenizer.json, with the tokens that special_tokens_map.json names.

    None if there is none, and for another file. Raises UsageError for a damaged one.
    """
    if file.name != TOKENIZER_JSON:
        return None
    names = file.with_name(SPECIAL_TOKENS_MAP)
    return merge_special_tokens_map(_read_config(file), _read(names) if names.is_file() else None, str(file))


def _read_config(file: Path) -> bytes | None:
    config = file.with_name(TOKENIZER_CONFIG)
    return _read(config) if config.is_file() else None


def _is_hugging_face(data: bytes) -> bool:
    """Return whether this is a tokenizer.json by itself, not a description of the SentencePiece model beside it.

    A description has the model's hash: prep's has no model, that of an exported folder has the same pieces.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return True  # the library's reader has the better error
    model = values.get("model", values) if isinstance(values, dict) else None
    return not (isinstance(model, dict) and "blake3" in model)


def _explain_not_found(folder: Path) -> str:
    if any(Path(folder, name).is_file() for name in (*SP_MODELS, "vocab.json")):
        return (
            f"no {TOKENIZER_JSON} here: transformers makes it: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER); "
            "or give a .model file itself"
        )
    missing = f"no {SP_MODEL} or {TOKENIZER_JSON} here"
    if find_tokenizer_file(folder.parent):
        return f"{missing}, but in the folder above: give {folder.parent}"
    return f"{missing}: make a tokenizer with `megatfm prep`"


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
        raise UsageError(f"{path}: is no regular file: give a tokenizer.json, a tokenizer.model or a folder with one")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: can't read the tokenizer ({error.strerror}): make one with `megatfm prep`, or give a file or "
            "folder that is there; no name of a hub is looked up"
        ) from error
