"""Special tokens that the files beside a tokenizer.json name, read as transformers reads them."""

import json
from collections.abc import Mapping
from typing import Any

from megatfm.errors import UsageError

CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Keys of further special tokens, a list or a table of names; the first one that has any is read."""


def parse_tokenizer_config(content: bytes | None, name: str, file: str = CONFIG) -> dict[str, Any]:
    """Return the values of a tokenizer_config.json; none without one. name: of the tokenizer. Raises UsageError."""
    try:
        values = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{name}: the {file} beside it is not valid: mend it or remove it")
    return values


def merge_special_tokens_map(config: bytes | None, names: bytes | None, name: str) -> bytes | None:
    """Return a tokenizer_config.json with the tokens of an older special_tokens_map.json, which go before its own.

    A config that lists `added_tokens_decoder` is complete. name: of the tokenizer. Raises UsageError.
    """
    if names is None:
        return config
    values = parse_tokenizer_config(config, name)
    named = parse_tokenizer_config(names, name, SPECIAL_TOKENS_MAP)
    changed = {key: value for key, value in named.items() if _get_text(value) != _get_text(values.get(key))}
    if "added_tokens_decoder" in values or not changed:
        return config
    return json.dumps(values | {key: _get_text(value) for key, value in changed.items()}, indent=2).encode() + b"\n"


def name_special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return key → text of the tokens that a tokenizer_config.json names: eos_token, or a model's own image_token."""
    extra = _find_extra_tokens(values)
    named = {key: value for key, value in values.items() if key.endswith("_token")}
    texts = {key: _get_text(value) for key, value in (named | (extra if isinstance(extra, dict) else {})).items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def list_extra_tokens(values: Mapping[str, Any]) -> list[str]:
    """Return the further special tokens of a tokenizer_config.json, which have no name."""
    extra = _get_text(_find_extra_tokens(values))
    return [text for text in extra if isinstance(text, str)] if isinstance(extra, list) else []


def _find_extra_tokens(values: Mapping[str, Any]) -> Any:
    return next((values[key] for key in EXTRA_TOKENS if values.get(key)), None)


def _get_text(token: Any) -> Any:
    """Return the text of a token, which may be a table with options, or of the tokens of a list."""
    if isinstance(token, list):
        return [_get_text(part) for part in token]
    return token.get("content", token) if isinstance(token, dict) else token
