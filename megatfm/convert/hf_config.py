"""Declarations of config.json keys: every key must be used, restricted to supported values, or ignored."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatfm.errors import UsageError
from megatfm.registry import did_you_mean

Json = dict[str, Any]
Value = TypeVar("Value")

ANY_TYPE: tuple[type, ...] = ()


@dataclass(frozen=True)
class Key:
    """Declaration of a config.json key.

    default: of transformers. kinds: Python types of its values; empty: any. allowed: the values that megatfm supports;
    None: all. is_ignored: does not affect the computation. alias_of: key that this is another name of; both may be
    present if they agree.
    """

    default: Any = None
    kinds: tuple[type, ...] = ANY_TYPE
    allowed: tuple[Any, ...] | None = None
    is_ignored: bool = False
    alias_of: str = ""

    def check(self, name: str, value: Any, *, is_present: bool) -> None:
        """Raise UsageError for a value of another type, or one that megatfm doesn't support."""
        if is_present and self.allowed is None and self.kinds and not _has_type(value, self.kinds):
            raise UsageError(f"config.json: {name} = {_abbreviate_value(value)} is not {_describe_types(self.kinds)}")
        if self.allowed is not None and not any(_is_equal(value, allowed_value) for allowed_value in self.allowed):
            allowed_values = " or ".join(repr(allowed_value) for allowed_value in self.allowed)
            absent = "" if is_present else " (the default, as the key is missing)"
            raise UsageError(
                f"config.json: {name} = {_abbreviate_value(value)} is not supported, only {allowed_values}{absent}"
            )


def _convert_types(kinds: Iterable[type | None]) -> tuple[type, ...]:
    return tuple(type(None) if kind is None else kind for kind in kinds)


def used(**keys: Any) -> dict[str, Key]:
    """Declare keys that `config_from_hf` reads.

    keys: transformers' default, whose type values have; or a tuple of default and types, None for null.
    """
    entries = {name: entry if isinstance(entry, tuple) else (entry, type(entry)) for name, entry in keys.items()}
    return {name: Key(default, _convert_types(kinds)) for name, (default, *kinds) in entries.items()}


def supported_values(**keys: Any) -> dict[str, Key]:
    """Declare keys by the value that megatfm supports, or a tuple of several; the first is transformers' default."""
    allowed = {name: entry if isinstance(entry, tuple) else (entry,) for name, entry in keys.items()}
    return {name: Key(values[0], _convert_types(map(type, values)), values) for name, values in allowed.items()}


def ignored(*names: str, kinds: Iterable[type | None] = ()) -> dict[str, Key]:
    """Declare keys that don't change what a model computes."""
    return dict.fromkeys(names, Key(kinds=_convert_types(kinds), is_ignored=True))


def alias(**keys: str) -> dict[str, Key]:
    """Declare other names of keys: name → key."""
    return {name: Key(alias_of=key) for name, key in keys.items()}


def resolve_hf_config(hf_config: Mapping[str, Any], keys: Mapping[str, Key], name: str) -> Json:
    """Return key → value of a config.json for `config_from_hf`: defaults filled in, ignored keys removed.

    name: of the architecture. Raises UsageError for an undeclared key, and as `Key.check` does.
    """
    for key, value in hf_config.items():
        if key not in keys:
            raise UsageError(
                f"config.json: {key} = {_abbreviate_value(value)}: megatfm knows no such key of a {name}"
                f"{did_you_mean(key, keys)}: if the model computes the same without it, remove it from the file"
            )
    declared_keys = {key: declared for key, declared in keys.items() if not declared.alias_of}
    aliased = {d.alias_of: hf_config[key] for key, d in keys.items() if d.alias_of and key in hf_config}
    present = aliased | {key: hf_config[key] for key in declared_keys if key in hf_config}
    values = {key: present.get(key, declared.default) for key, declared in declared_keys.items()}
    for key, declared in declared_keys.items():
        declared.check(key, values[key], is_present=key in present)
    for key, declared in keys.items():
        if declared.alias_of and key in hf_config and not _is_equal(hf_config[key], values[declared.alias_of]):
            raise UsageError(
                f"config.json: {key} = {_abbreviate_value(hf_config[key])} is another name of {declared.alias_of}, "
                f"which is {_abbreviate_value(values[declared.alias_of])}: keep only {declared.alias_of}"
            )
    return {key: value for key, value in values.items() if not declared_keys[key].is_ignored}


def omit_keys(table: Mapping[str, Value], *keys: str) -> dict[str, Value]:
    """Return a copy of a table without some keys."""
    return {key: value for key, value in table.items() if key not in keys}


def check_table_keys(name: str, table: Mapping[str, Any], known_keys: Iterable[str]) -> None:
    """Raise UsageError if a table within config.json has unknown keys."""
    for key, value in table.items():
        if key not in known_keys:
            raise UsageError(f"config.json: {name}.{key} = {_abbreviate_value(value)} is not supported here: remove it")


OPTIONAL_STR = (str, type(None))
TOKEN_IDS = (int, list, type(None))
"""Types of one token id or several."""

COMMON_KEYS: Mapping[str, Key] = {
    **used(
        architectures=(None, list, None), pad_token_id=(None, int, None), bos_token_id=(None, *TOKEN_IDS),
        eos_token_id=(None, *TOKEN_IDS), decoder_start_token_id=(None, int, None),
    ),
    **supported_values(
        is_encoder_decoder=False, is_decoder=False, add_cross_attention=False, tie_encoder_decoder=False,
        cross_attention_hidden_size=None, pruned_heads=(None, {}), quantization_config=None, per_layer_config=None,
    ),
    **ignored("sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id", kinds=TOKEN_IDS),
    **ignored("output_hidden_states", "output_attentions", "return_dict", "use_cache", kinds=[bool, None]),
    **ignored("chunk_size_feed_forward", kinds=[int]),
    **ignored("id2label", "label2id", "task_specific_params", kinds=[dict, None]),
    **ignored("dtype", "torch_dtype", "problem_type", "tokenizer_class", "prefix", kinds=OPTIONAL_STR),
    # About files and software.
    **ignored(
        "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map", "gradient_checkpointing",
        "xla_device", "torchscript", "use_bfloat16", "tf_legacy_loss", "output_past", "finetuning_task", "num_labels",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "pretraining_tp",
        "unsloth_version", "_num_labels", "classifier_dropout",
    ),
    # Settings of generation, which newer transformers keep in generation_config.json.
    **ignored(
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "eos_token_ids", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores",
        "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
        "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
    ),
}  # fmt: skip
"""Keys that the config.json of any model may have."""


SUMMARY_KEYS = ignored(
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "summary_last_dropout",
)  # fmt: skip
"""Keys about sequence-summary heads."""


def _has_type(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def _is_equal(value: Any, allowed_value: Any) -> bool:
    return bool(value == allowed_value) and isinstance(value, bool) == isinstance(allowed_value, bool)


def _describe_types(kinds: tuple[type, ...]) -> str:
    names_by_type = {
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "a table",
    }
    names = [names_by_type.get(kind, "null") for kind in dict.fromkeys(kinds)]
    return " or ".join(names)


def _abbreviate_value(value: Any) -> str:
    return f"{value!r:.80}"
