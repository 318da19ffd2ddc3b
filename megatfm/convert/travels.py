"""What goes along with a converted model that our config has no place for, so that it is there on the way back."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from megatfm.convert.config_keys import Json
from megatfm.convert.folder import read_json
from megatfm.tokenizers import Tokenizer

GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
DROPOUT_KEY = re.compile(r"(pdrop|dropout|dropout_prob)$")
ADD_BOS_KEY = "add_bos_token"


def record_origin(source: Path, name: str, theirs: Json, written: Json) -> Json:
    """What a checkpoint keeps of the folder that its model came from, also through training on.

    config: special ids and dropout rates of config.json where `written`, our own export, says another; generation:
    what generation_config.json holds, if there is one. Raises MegatfmError.
    """
    differing = {
        key: {"theirs": value, "ours": written.get(key)}
        for key, value in theirs.items()
        if (key in IDS or DROPOUT_KEY.search(key)) and (key not in written or written[key] != value)
    }
    file = source / GENERATION
    return {
        "name": name,
        "config": differing,
        **({"generation": read_json(file)} if file.is_file() else {}),
    }


def restore_origin(origin: Mapping[str, Any], written: Mapping[str, Any]) -> Json:
    """Of config.json what `origin_of` kept, but for what our config has said otherwise since: that is `written`."""
    kept = origin.get("config", {})
    return {key: each["theirs"] for key, each in kept.items() if written.get(key) == each["ours"]}


def eos_token_id_of(source: Path, theirs: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """All ids that end a text, as the model says; the tokenizer's own is the first if it is among them."""
    file = source / GENERATION
    ids = (read_json(file) if file.is_file() else {}).get("eos_token_id", theirs.get("eos_token_id"))
    stops = [id for id in (ids if isinstance(ids, list) else [ids]) if type(id) is int]
    return sorted(dict.fromkeys(stops), key=lambda id: id != tokenizer.eos)


def bos_prefix_ids(source: Path, files: Mapping[str, bytes], tokenizer: Tokenizer) -> list[int]:
    """What the model's own tokenizer, of these files, puts before a text; nothing for GPT-2, a BOS for Llama."""
    file = source / "tokenizer_config.json"
    about = read_json(file) if file.is_file() else {}
    if (content := files.get("tokenizer.json")) is not None:
        library = Library.from_str(content.decode())
        whole, bare = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
        ends = range(len(whole) - len(bare) + 1)
        begins = next((whole[:i] for i in ends if whole[i : i + len(bare)] == bare), [])
        if ADD_BOS_KEY not in about:
            return begins
    elif ADD_BOS_KEY not in about:
        about = {ADD_BOS_KEY: str(about.get("tokenizer_class", "Llama")).startswith("Llama")}
    return [tokenizer.bos] if about[ADD_BOS_KEY] else []
