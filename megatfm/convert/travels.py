"""What goes along with a converted model that our config has no place for, so that it is there on the way back."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from megatfm.checkpoint import disk
from megatfm.convert.folder import read_json
from megatfm.tokenizers import Tokenizer

GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
RATES = re.compile(r"(pdrop|dropout|dropout_prob)$")
BOS = "add_bos_token"


def of_config(theirs: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Special ids and dropout rates of a config.json, where `written`, our own export of it, says another."""
    return {
        key: value
        for key, value in theirs.items()
        if (key in IDS or RATES.search(key)) and (key not in written or written[key] != value)
    }


def copy_generation(source: Path, target: Path) -> None:
    """Copy generation_config.json, if there is one and it is JSON."""
    if (source / GENERATION).is_file():
        content = json.dumps(read_json(source / GENERATION), indent=2) + "\n"
        disk.write_file(target / GENERATION, [memoryview(content.encode())])


def stop_of(source: Path, theirs: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """The id that ends a text: what the model says; of several, the tokenizer's own if it is among them."""
    file = source / GENERATION
    said = (read_json(file) if file.is_file() else {}).get("eos_token_id", theirs.get("eos_token_id"))
    stops = [said] if isinstance(said, int) else said if isinstance(said, list) else []
    return tokenizer.eos if tokenizer.eos in stops else next(iter(stops), None)


def begin_of(source: Path, place: Path, tokenizer: Tokenizer) -> list[int]:
    """What the model's own tokenizer puts before a text; nothing for GPT-2, a BOS for Llama."""
    file = source / "tokenizer_config.json"
    about = read_json(file) if file.is_file() else {}
    if place.suffix == ".json":
        library = Library.from_file(str(place))
        whole, bare = (library.encode("a", add_special_tokens=special).ids for special in (True, False))
        ends = range(len(whole) - len(bare) + 1)
        begins = next((whole[:i] for i in ends if whole[i : i + len(bare)] == bare), [])
        if BOS not in about:
            return begins
    elif BOS not in about:
        about = {BOS: str(about.get("tokenizer_class", "Llama")).startswith("Llama")}
    return [tokenizer.bos] if about[BOS] else []
