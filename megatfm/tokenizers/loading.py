"""Find the files of a tokenizer, and open them by the class that reads them."""

import codecs
import json
from pathlib import Path

from megatfm.errors import UsageError
from megatfm.tokenizers.base import Tokenizer
from megatfm.tokenizers.hugging_face import CONFIG, HuggingFaceTokenizer, byte_bpe_json, wordpiece_json
from megatfm.tokenizers.sentence_piece import SentencePieceTokenizer

SP_MODEL, TOKENIZER_JSON, VOCAB_TXT = "tokenizer.model", "tokenizer.json", "vocab.txt"
VOCAB_JSON, MERGES_TXT = "vocab.json", "merges.txt"
CHAT_TEMPLATE = "chat_template.jinja"
"""Beside a tokenizer.json, where transformers keeps how conversations are rendered."""
TOKENIZER_FILENAMES = (SP_MODEL, TOKENIZER_JSON, CONFIG)
"""Names of a tokenizer's files where megatfm writes them."""

SP_MODELS = (SP_MODEL, "spiece.model", "sentencepiece.bpe.model")


def load(path: str | Path) -> Tokenizer:
    """The tokenizer in a file, a `tokenizer.json` or a SentencePiece model, or in a folder that holds one.

    Raises UsageError if there is none or it is something else.
    """
    place = Path(path)
    if place.is_dir():
        file = find_tokenizer_file(place)
        if file is None:
            raise UsageError(f"{path}: {_not_found_message(place)}")
        place = file
    data = _without_blanks(place, _read(place))
    if converted := _convert_legacy(place, data):
        return HuggingFaceTokenizer(converted, None, str(place))
    if data[:1] != b"{":
        return SentencePieceTokenizer(data, str(place))
    if not _is_hugging_face(data):
        raise UsageError(
            f"{place}: this is prep's description of a tokenizer, not the tokenizer: give {SP_MODEL} beside it"
        )
    return HuggingFaceTokenizer(data, _read_config_for(place), str(place))


def find_tokenizer_file(folder: str | Path) -> Path | None:
    """The tokenizer's file in a prepared corpus, a run or a Hugging Face folder, or None.

    A `tokenizer.json` comes first if it is one of the tokenizers library: beside a `.model` it has more special tokens.
    """
    tokenizer_json = Path(folder, TOKENIZER_JSON)
    if tokenizer_json.is_file() and _is_hugging_face(_read(tokenizer_json)):
        return tokenizer_json
    models = [path for path in (Path(folder, name) for name in SP_MODELS) if path.is_file()]
    if not models and Path(folder, VOCAB_TXT).is_file():
        return Path(folder, VOCAB_TXT)
    if not models and all(Path(folder, name).is_file() for name in (VOCAB_JSON, MERGES_TXT)):
        return Path(folder, VOCAB_JSON)
    # A configuration without tokenizer.json adds tokens that the model alone has not.
    return models[0] if models and not Path(folder, CONFIG).is_file() else None


def tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Name → content of all that has to lie together for `load` to give the same tokenizer elsewhere.

    To be written in this order: while the last is missing, `find_tokenizer_file` finds nothing.
    """
    place = Path(path)
    place = (find_tokenizer_file(place) or place) if place.is_dir() else place
    data = _without_blanks(place, _read(place))
    if converted := _convert_legacy(place, data):
        return {TOKENIZER_JSON: converted}
    if data[:1] != b"{":
        return {SP_MODEL: data}
    config = _read_config_for(place)
    template = place.with_name(CHAT_TEMPLATE)
    template_file = {CHAT_TEMPLATE: _read(template)} if config is not None and template.is_file() else {}
    return (
        {TOKENIZER_JSON: data} if config is None else {**template_file, CONFIG: config, TOKENIZER_JSON: data}
    )


def _without_blanks(place: Path, data: bytes) -> bytes:
    """Return a JSON file from its brace on: editors put a byte order mark before it."""
    if place.suffix != ".json":
        return data
    stripped = data.removeprefix(codecs.BOM_UTF8).lstrip()
    return stripped if stripped[:1] == b"{" else data


def _convert_legacy(place: Path, data: bytes) -> bytes | None:
    """Return the tokenizer.json that a vocab.txt or vocab.json stands for; None for other files."""
    if place.name == VOCAB_TXT:
        return wordpiece_json(data, _read_config(place), str(place))
    if place.name == VOCAB_JSON:
        return byte_bpe_json(data, _read(place.with_name(MERGES_TXT)), _read_config(place), str(place))
    return None


def _read_config_for(place: Path) -> bytes | None:
    return _read_config(place) if place.name == TOKENIZER_JSON else None


def _read_config(place: Path) -> bytes | None:
    config = place.with_name(CONFIG)
    return _read(config) if config.is_file() else None


def _is_hugging_face(data: bytes) -> bool:
    """Whether this is the tokenizers library's tokenizer.json, not the facts that prep leaves beside a model."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return True  # the library's reader says best what is wrong
    return not (isinstance(values, dict) and "blake3" in values and "model" not in values)


def _not_found_message(folder: Path) -> str:
    if any(Path(folder, name).is_file() for name in (*SP_MODELS, "vocab.json")):
        return (
            f"no {TOKENIZER_JSON} here: transformers makes it: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER); "
            "or give a .model file itself"
        )
    return f"no {SP_MODEL} or {TOKENIZER_JSON} here: make a tokenizer with `megatfm prep`"


def _read(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
        raise UsageError(f"{path}: no regular file, and so no tokenizer: make one with `megatfm prep`")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: can't read the tokenizer ({error.strerror}): make one with `megatfm prep`"
        ) from error
