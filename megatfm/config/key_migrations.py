"""Config keys and values of earlier versions, and their translation in stored configs.

Checkpoints, run directories and prep.json store configs with every key, and outlive a version. To rename a key, add it
to its section below in the same commit. If a new key's default changes what earlier versions computed, add their value
to `VALUES_BEFORE`. A user's own file is not translated but refused, with the new name. An old name never gets a new
meaning, so a stored config needs no version.

A key is a path such as "optimizer.clip". `section[NAME].key` means the section whose `name` is NAME, and `*` every key
of a table. A path through a list of tables means each of them. Rows of "model." hold in the kinds of blocks as well.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatfm.config.section import unflatten


def list_renames(renames: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return (old key, new key) of renamed keys by the section that has both."""
    return tuple(
        (f"{section}.{old}".lstrip("."), f"{section}.{new}".lstrip("."))
        for section, keys in renames.items()
        for old, new in keys.items()
    )


RENAMED_KEYS = list_renames({
    "": {"schedule": "lr_schedule"},
    "parallel": {
        "schedule": "pp_schedule", "context": "cp_method", "accumulate": "grad_accumulation",
        "comm_memory": "comm_buffers", "prefetch": "fsdp_prefetch", "cuts": "pp_split_points",
    },
    "train": {"init_only": "init_include"},
    "log": {"allocations": "memory_snapshot", "norms_every": "layer_stats_every"},
    "checkpoint": {"local": "local_dir", "read_back": "verify_after_write"},
    "optimizer": {"clip": "max_grad_norm", "moments": "moments_dtype", "newton_schulz": "newton_schulz_dtype"},
    "optimizer[soap]": {"every": "precondition_frequency", "max_dim": "max_precond_dim"},
    "optimizer[adafactor]": {"decay_power": "beta2_decay", "smallest_scale": "eps2", "clip_update": "clip_threshold"},
    "lr_schedule": {"final_ratio": "min_lr_factor"},
    "lr_schedule[wsd]": {"shape": "decay_type"},
    "data": {
        "streams": "read_streams", "mixture_block": "mixture_block_rows", "mixture_changes": "mixture_schedule",
        "cache": "cache_dir", "warmup": "rampup",
    },
    "model": {
        "blocks": "layer_types", "block": "layer_type", "head": "lm_head", "heads": "extra_heads",
        "future_tokens": "n_mtp_heads",
    },
    "model.stages": {"layers": "n_layers", "heads": "n_heads"},
    "model.attention[latent]": {
        "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim",
        "head_dim": "qk_nope_head_dim",
    },
    "model.attention[mla]": {"head_dim": "qk_nope_head_dim"},
    "model.attention[linformer]": {"length": "max_length", "rank": "projected_length"},
    "model.attention.pattern[window]": {"step": "dilation", "first": "initial_tokens"},
    "model.attention.pattern[fixed]": {"summary": "n_summary_tokens"},
    "model.attention.pattern[bigbird]": {
        "block": "block_size", "random": "n_random_blocks", "extra": "n_global_tokens",
    },
    "model.attention.pattern[longformer]": {"tokens": "global_tokens"},
    "model.ffn": {"capacity": "capacity_factor", "places": "expert_capacity"},
    "model.ffn.router": {
        "balance": "aux_loss_coef", "sequence_balance": "seq_aux_loss_coef", "z_loss": "z_loss_coef",
        "normalise": "norm_topk_prob", "n_groups": "n_group", "top_groups": "topk_group",
        "bias_rate": "bias_update_rate",
    },
    "model.ffn.router[noisy_top_k]": {"importance": "importance_loss_coef", "load": "load_loss_coef"},
    "model.ffn.router[deepseek_v2]": {"scale": "routed_scaling_factor"},
    "model.ffn.router[deepseek_v3]": {"scale": "routed_scaling_factor"},
    "model.norm[rms_norm]": {"from_one": "zero_centered"},
    "model.norm": {"first": "first_attention_norm", "final": "final_norm"},
    "objective": {
        "future_weight": "mtp_loss_weight", "mask_share": "mask_replace_prob", "random_share": "random_replace_prob",
    },
    "objective[masked]": {"rate": "mask_rate"},
    "objective[next_sentence]": {"rate": "mask_rate"},
    "objective[sentence_order]": {"rate": "mask_rate"},
    "objective[span_boundary]": {"rate": "mask_rate", "stop": "geometric_p", "max_words": "max_span_words"},
    "objective[replaced_token]": {"rate": "mask_rate"},
    "objective[permutation]": {"every": "tokens_per_prediction"},
    "objective[span_corruption]": {"rate": "noise_density", "mean_span": "mean_noise_span_length"},
    "objective[denoisers]": {
        "regular": "r_denoiser_weight", "extreme": "x_denoiser_weight", "sequential": "s_denoiser_weight",
    },
    "deepspeed": {"hpz": "zero_hpz_partition_size"},
})  # fmt: skip
"""(Old key, new key) of training configs, in the order of their translation: a renamed section before its keys."""
RENAMED_VALUES: tuple[tuple[str, Any, Any], ...] = (
    ("parallel.cp_method", "heads", "ulysses"),
    ("parallel.grad_accumulation", "whole", "unsharded"),
    ("parallel.grad_accumulation", "shards", "sharded"),
    ("parallel.comm_buffers", "group", "process_group"),
    ("parallel.expert_tp", "whole", "by_expert"),
    ("parallel.expert_tp", "channels", "by_channel"),
    ("parallel.reduce_dtype", "full", "param"),
    ("optimizer.moments_dtype", "full", "param"),
    ("optimizer.newton_schulz_dtype", "full", "param"),
    ("model.attention.qk_norm", "whole", "all_heads"),
    ("model.attention.name", "heads", "gqa"),
    ("model.attention.name", "latent", "mla"),
    ("model.attention.name", "disentangled", "deberta"),
    ("model.attention.name", "disentangled_shared", "deberta_v2"),
    ("model.position.name", "disentangled", "deberta"),
    ("model.position.name", "disentangled_buckets", "deberta_v2"),
    ("objective.name", "denoisers", "ul2"),
)
"""(Key, old value, new value), by the key's new name."""
REMOVED_KEYS: tuple[tuple[str, Any], ...] = (
    ("deepspeed.quantized_weights", False),
    ("deepspeed.quantized_gradients", False),
)
"""(Key of an earlier version, value that turned it off). A stored config with another value is refused."""
VALUES_BEFORE: tuple[tuple[str, Any], ...] = ()
"""(Key, value that versions without the key implied), if that is not the default."""
RENAMED_PREP_KEYS = list_renames({
    "": {
        "near_duplicates.similarity": "split.near_duplicates.similarity",
        "near_duplicates.shingle_words": "split.near_duplicates.n_grams", "workers": "tokenizer_threads",
        "part_bytes": "task_bytes", "memory_bytes": "dedup_memory_bytes", "plain_tars": "compress",
        "duplicates": "dedup",
    },
    "read": {
        "source": "builtin", "on_bad": "on_error", "repair_unicode": "fix_unicode", "fields.text": "text_key",
        "fields.url": "url_key", "fields.keep": "metadata_keys",
    },
    "read.tokens": {"end": "eos_id"},
    "split": {"by": "partition_by", "values": "partition_values", "files": "validation_files"},
    "tokenizer": {"modes": "ul2_modes", "pattern": "pretokenizer"},
    "steps[gopher_quality]": {
        "words": "word_tokenizer", "min_words": "min_doc_words", "max_words": "max_doc_words",
        "min_mean_word": "min_avg_word_length", "max_mean_word": "max_avg_word_length",
        "max_symbols": "max_symbol_word_ratio", "max_bullet_lines": "max_bullet_lines_ratio",
        "max_ellipsis_lines": "max_ellipsis_lines_ratio", "min_alphabetic": "min_alpha_words_ratio",
    },
    "steps[gopher_repetition]": {
        "words": "word_tokenizer", "lines": "dup_line_frac", "paragraphs": "dup_para_frac",
        "line_characters": "dup_line_char_frac", "paragraph_characters": "dup_para_char_frac",
        "top_ngrams": "top_n_grams", "repeated_ngrams": "dup_n_grams",
    },
    "steps[fineweb]": {
        "words": "word_tokenizer", "min_punctuated_lines": "line_punct_thr",
        "max_repeated_characters": "char_duplicates_ratio", "max_short_lines": "short_line_thr",
        "short_line": "short_line_length", "max_lines_per_word": "new_line_ratio",
    },
    "steps[c4]": {
        "terminal_punctuation": "filter_no_terminal_punct", "min_line_words": "min_words_per_line",
        "max_word_characters": "max_word_length", "min_sentences": "min_num_sentences",
        "curly_brackets": "filter_curly_bracket",
    },
    "steps[language]": {"keep": "languages", "min_probability": "language_threshold", "characters": "max_characters"},
    "steps[decontaminate]": {"words": "n_grams", "against": "files"},
    "steps[where]": {"is_in": "allowed", "is_not": "denied", "at_least": "min", "at_most": "max"},
    "steps[sample]": {"keep": "rate", "by_path": "rate_by_path"},
    "steps[fasttext]": {"at_least": "min_score", "at_most": "max_score", "field": "save_as"},
    "steps[linear]": {"at_least": "min_score", "at_most": "max_score", "field": "save_as"},
    "steps[classifier]": {"at_least": "min_score", "at_most": "max_score", "field": "save_as", "tokens": "max_tokens"},
    "steps[perplexity]": {"at_least": "min_score", "at_most": "max_score", "field": "save_as", "tokens": "max_tokens"},
    "dedup[lines]": {"loose": "normalize"},
    "dedup[paragraphs]": {"loose": "normalize"},
    "dedup[near]": {"shingle_words": "n_grams", "bands": "num_buckets", "rows": "hashes_per_bucket"},
})  # fmt: skip
"""(Old key, new key) of configs of `megatfm prep`."""
RENAMED_PREP_VALUES: tuple[tuple[str, Any, Any], ...] = (
    ("steps.name", "blocked_urls", "url_filter"),
    ("steps.name", "blocked_words", "c4_badwords"),
    ("steps.name", "redact", "pii"),
    ("steps.name", "where", "metadata_filter"),
    ("steps.name", "linear", "linear_classifier"),
    ("dedup.name", "near", "minhash"),
    ("dedup.name", "substrings", "exact_substrings"),
)
"""(Key, old value, new value), by the key's new name. A file with an old value is refused, too."""
INVERTED_PREP_KEYS = ("plain_tars", "steps[c4].curly_brackets")
"""Old boolean keys whose new keys mean the opposite."""

BLOCK_KINDS = ("model.block.*", "model.layer_type.*")
"""Sections of [model] for some blocks, under their old and new name."""

Renames = Sequence[tuple[str, str]]


def migrate(
    values: Any,
    renamed: Renames | None = None,
    new_values: Sequence[tuple[str, Any, Any]] | None = None,
    replacements: Sequence[tuple[str, Any]] | None = None,
) -> Any:
    """Return a stored training config with today's keys and values; anything but a table is returned unchanged.

    renamed, new_values, replacements: in place of RENAMED_KEYS, RENAMED_VALUES and VALUES_BEFORE.
    """
    if not isinstance(values, Mapping):
        return values
    tables = copy.deepcopy(dict(values))
    for kinds in BLOCK_KINDS:
        for section in _iter_tables(tables, kinds.split(".")):  # whose keys may be dotted, if Python set them
            nested = unflatten(section)
            section.clear()
            section.update(nested)
    for old, new in _expand_to_block_kinds(RENAMED_KEYS if renamed is None else renamed):
        _rename(tables, old.split("."), new.split("."))
    for key, old_value, new_value in RENAMED_VALUES if new_values is None else new_values:
        for path, _ in _expand_to_block_kinds([(key, key)]):
            *parents, last = path.split(".")
            for table in _iter_tables(tables, parents):
                if last in table and table[last] == old_value:
                    table[last] = new_value
    for key, off_value in REMOVED_KEYS if renamed is None else ():
        *parents, last = key.split(".")
        for table in _iter_tables(tables, parents):
            if table.get(last) == off_value:
                table.pop(last, None)
    for key, value in VALUES_BEFORE if replacements is None else replacements:
        *parents, last = key.split(".")
        for table in _iter_tables(tables, parents):
            table.setdefault(last, value)
    _tag_all_tokens(tables)
    return tables


def _tag_all_tokens(tables: Mapping[str, Any]) -> None:
    """Set token = "all" in the head of a tagging task, which older versions stored as "first"."""
    task, model = tables.get("task"), tables.get("model")
    if isinstance(task, Mapping) and isinstance(model, Mapping) and task.get("form") == "tagging":
        for head in (model.get("extra_heads") or {}).values():
            if isinstance(head, dict) and head.get("name") == "text_classifier":
                head["token"] = "all"


def migrate_prep(values: Any) -> Any:
    """Return the config of a prep.json with today's keys and values."""
    if not isinstance(values, Mapping):
        return values
    tables = copy.deepcopy(dict(values))
    for key in INVERTED_PREP_KEYS:
        *parents, last = key.split(".")
        for table in _iter_tables(tables, parents):
            if isinstance(table.get(last), bool):
                table[last] = not table[last]
    tables = migrate(tables, RENAMED_PREP_KEYS, RENAMED_PREP_VALUES, ())
    for parent, section in ((tables, "near_duplicates"), (tables.get("read"), "fields")):
        if isinstance(parent, dict) and parent.get(section) == {}:  # all of its keys were renamed
            del parent[section]
    return tables


def find_renamed_prep_words(values: Any) -> list[str]:
    """Return a message for each old key or value of a config of `megatfm prep`, with the new one."""
    if not isinstance(values, Mapping):
        return []
    messages, tables = [], copy.deepcopy(dict(values))
    for old, new in RENAMED_PREP_KEYS:
        if not find_renamed_keys(tables, [(old, new)]):
            continue
        opposite = " (which says the opposite)" if old in INVERTED_PREP_KEYS else ""
        messages.append(f"{_strip_variants(old)} is {_strip_variants(new)} now{opposite}")
        _rename(tables, old.split("."), new.split("."))
    for key, old_value, new_value in RENAMED_PREP_VALUES:
        *parents, last = key.split(".")
        if any(table.get(last) == old_value for table in _iter_tables(tables, parents)):
            messages.append(f"{key} = {old_value!r} is {new_value!r} now")
    return messages


def find_renamed_keys(values: Any, renamed: Renames | None = None) -> list[tuple[str, str]]:
    """Return (old key, new key) of the old keys that a config has."""
    renamed_keys = []
    for old, new in _expand_to_block_kinds(RENAMED_KEYS if renamed is None else renamed):
        *parents, last = old.split(".")
        if any(last in table for table in _iter_tables(values, parents)):
            renamed_keys.append((_strip_variants(old), _strip_variants(new)))
    return renamed_keys


def _expand_to_block_kinds(renamed: Renames) -> Iterator[tuple[str, str]]:
    """Yield the rows, and those of [model] also for each section of a kind of block."""
    for old, new in renamed:
        yield old, new
        if old.startswith("model.") and new.startswith("model."):
            for kind in BLOCK_KINDS:
                yield f"{kind}{old.removeprefix('model')}", f"{kind}{new.removeprefix('model')}"


def _rename(tables: dict[str, Any], old: list[str], new: list[str]) -> None:
    """Move the value of an old path to the new one, below the deepest table that both paths share."""
    names = [(a.partition("[")[0], b.partition("[")[0]) for a, b in zip(old[:-1], new[:-1], strict=False)]
    shared = next((depth for depth, (a, b) in enumerate(names) if a != b), len(names))
    for root in _iter_tables(tables, old[:shared]):
        *parents, last = old[shared:]
        *new_parents, name = (part.partition("[")[0] for part in new[shared:])
        for table in _iter_tables(root, parents):
            if last not in table:
                continue
            target = root
            for parent in new_parents:
                target = target.setdefault(parent, {}) if isinstance(target, dict) else target
            if isinstance(target, dict):  # else validation refuses the value in the section's place
                target.setdefault(name, table.pop(last))


def _iter_tables(values: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield every table at a path."""
    if isinstance(values, list | tuple):
        for element in values:
            yield from _iter_tables(element, path)
    elif not isinstance(values, dict):
        return
    elif not path:
        yield values
    elif path[0] == "*":
        for value in list(values.values()):
            yield from _iter_tables(value, path[1:])
    else:
        key, _, variant = path[0].partition("[")
        for table in _iter_tables(values.get(key), ()):
            if not variant or table.get("name") == variant.rstrip("]"):
                yield from _iter_tables(table, path[1:])


def _strip_variants(path: str) -> str:
    """Return a path as users write it."""
    return ".".join(part.partition("[")[0].replace("*", "KIND") for part in path.split("."))
