"""The tokenizer's files beside the weights in both formats, and what else travels along with a converted model.

Configs of ours can't hold a model's token ids, dropout rates and generation_config.json: a checkpoint keeps them, and
they are written back on export.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from megatfm import tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import Config
from megatfm.convert.hf_checkpoint import read_json
from megatfm.convert.hf_config import Json
from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
COMPANION_FILES = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files of transformers that say more of a tokenizer; they travel along."""


def to_hf(
    checkpoint: Path, config: Config, folder: Path, tokenizer_file: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Copy the tokenizer of a run, or of a checkpoint's config; returns notes, and keys of config.json.

    wanted: the hash of the tokenizer that the model was trained with, if there was one. Raises UsageError for another.
    """
    run = checkpoint.absolute().parent.parent
    place = tokenizers.find_tokenizer_file(run) or (
        Path(config.data.tokenizer) if config.data.tokenizer else None
    )
    if place is None or not place.is_file():
        return [f"no tokenizer: there is none in {run}, nor at {place or 'data.tokenizer'}"], {}
    tokenizer = tokenizers.load(place)
    if tokenizer_file is None:
        return [f"no tokenizer: {checkpoint.name} was saved without one; {place} may be another"], {}
    if tokenizer.hash != tokenizer_file:
        raise UsageError(
            f"{place}: not the tokenizer that {checkpoint.name} was trained with, so that ids would mean other text: "
            f"put that one into {run}"
        )
    copy_tokenizer(place, folder)
    notes = (
        []
        if (folder / TOKENIZER_CONFIG).is_file()
        else _write_tokenizer_config(tokenizer, folder, config.model.family)
    )
    if config.model.embedding.n_segments > 1 and config.task is not None:
        _have_segments_returned(folder / TOKENIZER_CONFIG)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    if config.model.family == "encoder_decoder":
        ids["decoder_start_token_id"] = tokenizer.pad
    return notes, ids


def to_megatfm(source: Path, folder: Path) -> tuple[str | None, list[str]]:
    """Copy the tokenizer of a folder in the Hugging Face format; returns its file's name, and notes."""
    place = tokenizer_path(source)
    try:
        tokenizers.load(place)
    except MegatfmError as error:
        return None, [f"no tokenizer: {error}"]
    return copy_tokenizer(place, folder), []


def tokenizer_path(source: Path) -> Path:
    """Path for `tokenizers.load` in a folder in the Hugging Face format: a file, or the folder."""
    return tokenizers.find_tokenizer_file(source) or _bare_sentencepiece(source) or source


def _bare_sentencepiece(source: Path) -> Path | None:
    """A SentencePiece model to which the files beside it add no token, such as one that `to_hf` left."""
    place, config_file = source / "tokenizer.model", source / TOKENIZER_CONFIG
    if not place.is_file() or (source / "added_tokens.json").is_file():
        return None
    added_tokens = config_file.is_file() and read_json(config_file).get("added_tokens_decoder")
    return None if added_tokens else place


def copy_tokenizer(place: Path, target: Path) -> str:
    """Write what belongs to the tokenizer at `place`; returns the name of its file."""
    files = tokenizers.tokenizer_files(place)
    if place.name == "tokenizer.json":
        files |= {
            name: (place.parent / name).read_bytes()
            for name in COMPANION_FILES
            if (place.parent / name).is_file()
        }
    for name, content in files.items():
        file_io.write_file(target / name, [memoryview(content)])
    return "tokenizer.json" if "tokenizer.json" in files else "tokenizer.model"


def _write_tokenizer_config(tokenizer: Tokenizer, folder: Path, family: str) -> list[str]:
    """Write the files from which transformers reads the same tokenizer, if it has a class for it; returns notes."""
    tokenizer_config: dict[str, Any] = {
        f"{role}_token": tokenizer.id_to_piece(token)
        for role in ("bos", "eos", "unk", "pad", "mask", "cls", "sep")
        if (token := getattr(tokenizer, role)) is not None
    }
    notes = []
    if tokenizer.kind == "sentencepiece":
        tokenizer_config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False}
    elif (folder / "tokenizer.json").is_file():
        tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if family == "decoder":  # in training, texts stood behind a `bos`
            tokenizer_config["add_bos_token"] = True
    else:
        notes = [
            "the tokenizer is copied as it is: transformers has no class for a unigram model that keeps all spaces"
        ]
    tokenizer_config["clean_up_tokenization_spaces"] = False
    file_io.write_file(
        folder / TOKENIZER_CONFIG, [memoryview((json.dumps(tokenizer_config, indent=2) + "\n").encode())]
    )
    return notes


def _have_segments_returned(about_file: Path) -> None:
    """Have transformers' tokenizer return segments, without which its models take all tokens for the first's."""
    if not about_file.is_file():
        return
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer_config = {"model_input_names": names} | read_json(about_file)
    about_file.unlink()
    file_io.write_file(about_file, [memoryview((json.dumps(tokenizer_config, indent=2) + "\n").encode())])


GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
DROPOUT_KEY = re.compile(r"(pdrop|dropout|dropout_prob)$")
LABELS = ("id2label", "label2id")
TEXT_CONFIG = "text_config"
"""Section of config.json for the text tower of a model of images and text, with special ids of its own."""
ADD_BOS_KEY = "add_bos_token"


def record_origin(source: Path, name: str, hf_config: Json, written_config: Json) -> Json:
    """Return the parts of a Hugging Face folder that a checkpoint keeps, also through further training.

    config: special ids, names of labels and dropout rates of config.json that differ in `written_config`, our own
    export; generation: the content of generation_config.json, if there is one. Raises MegatfmError.
    """
    differing = {
        key: {"theirs": value, "ours": written_config.get(key)}
        for key, value in hf_config.items()
        if (key in IDS or key in LABELS or DROPOUT_KEY.search(key))
        and (key not in written_config or written_config[key] != value)
    }
    of_text, here = (config.get(TEXT_CONFIG) or {} for config in (hf_config, written_config))
    differing |= {
        f"{TEXT_CONFIG}.{key}": {"theirs": value, "ours": here.get(key)}
        for key, value in of_text.items()
        if key in IDS and here.get(key) != value
    }
    file = source / GENERATION
    return {
        "name": name,
        "config": differing,
        **({"generation": read_json(file)} if file.is_file() else {}),
    }


def restore_origin(origin: Mapping[str, Any], written_config: Mapping[str, Any]) -> Json:
    """Return the values that `record_origin` kept, without those that changed since in `written_config`, our config."""
    origin_config = origin.get("config", {})
    text_config = written_config.get(TEXT_CONFIG) or {}
    written = {**written_config, **{f"{TEXT_CONFIG}.{key}": value for key, value in text_config.items()}}
    return {
        key: values["theirs"] for key, values in origin_config.items() if written.get(key) == values["ours"]
    }


def with_text_ids(hf_config: Mapping[str, Any]) -> Json:
    """A config.json-to-be whose special ids are in its section of the text tower, if it has one."""
    if TEXT_CONFIG not in hf_config:
        return dict(hf_config)
    prefix = f"{TEXT_CONFIG}."
    ids = {key: value for key, value in hf_config.items() if key in IDS}
    restored = {key.removeprefix(prefix): v for key, v in hf_config.items() if key.startswith(prefix)}
    without_ids = {key: v for key, v in hf_config.items() if key not in ids and not key.startswith(prefix)}
    return {**without_ids, TEXT_CONFIG: {**hf_config[TEXT_CONFIG], **ids, **restored}}


def eos_token_id_of(source: Path, hf_config: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """All ids that end a text, as the model says; the tokenizer's own is the first if it is among them."""
    file = source / GENERATION
    ids = (read_json(file) if file.is_file() else {}).get("eos_token_id", hf_config.get("eos_token_id"))
    stops = [id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int]
    return sorted(dict.fromkeys(stops), key=lambda id: id != tokenizer.eos)


def bos_prefix_ids(source: Path, files: Mapping[str, bytes], tokenizer: Tokenizer) -> list[int]:
    """Ids that the model's own tokenizer puts before a text: none for GPT-2, a BOS for Llama."""
    file = source / "tokenizer_config.json"
    tokenizer_config = read_json(file) if file.is_file() else {}
    if (content := files.get("tokenizer.json")) is not None:
        library = Library.from_str(content.decode())
        with_special, bare = (
            library.encode("a", add_special_tokens=special).ids for special in (True, False)
        )
        ends = range(len(with_special) - len(bare) + 1)
        begins = next((with_special[:i] for i in ends if with_special[i : i + len(bare)] == bare), [])
        if ADD_BOS_KEY not in tokenizer_config:
            return begins
    elif ADD_BOS_KEY not in tokenizer_config:
        tokenizer_config = {
            ADD_BOS_KEY: str(tokenizer_config.get("tokenizer_class", "Llama")).startswith("Llama")
        }
    return [tokenizer.bos] if tokenizer_config[ADD_BOS_KEY] else []
