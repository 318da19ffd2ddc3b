"""Config keys and values of earlier versions, and their translation in stored configs.

Checkpoints, run directories and prep.json store configs with every key, and outlive a version. To rename a key, add a
row here in the same commit. If a new key's default changes what earlier versions computed, add their value to
`VALUES_BEFORE`. A user's own file is not translated but refused, with the new name. An old name never gets a new
meaning, so a stored config needs no version.

A key is a path such as "optimizer.clip". `section[NAME].key` means the section whose `name` is NAME, and `*` every key
of a table. A path through a list of tables means each of them. Rows of "model." hold in the kinds of blocks as well.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RENAMED_KEYS: tuple[tuple[str, str], ...] = (
    ("schedule", "lr_schedule"),
    ("parallel.schedule", "parallel.pp_schedule"),
    ("parallel.context", "parallel.cp_method"),
    ("parallel.accumulate", "parallel.grad_accumulation"),
    ("parallel.comm_memory", "parallel.comm_buffers"),
    ("parallel.prefetch", "parallel.fsdp_prefetch"),
    ("parallel.cuts", "parallel.pp_split_points"),
    ("train.init_only", "train.init_include"),
    ("log.allocations", "log.memory_snapshot"),
    ("log.norms_every", "log.layer_stats_every"),
    ("checkpoint.local", "checkpoint.local_dir"),
    ("checkpoint.read_back", "checkpoint.verify_after_write"),
    ("optimizer.clip", "optimizer.max_grad_norm"),
    ("optimizer.moments", "optimizer.moments_dtype"),
    ("optimizer.newton_schulz", "optimizer.newton_schulz_dtype"),
    ("optimizer[soap].every", "optimizer.precondition_frequency"),
    ("optimizer[soap].max_dim", "optimizer.max_precond_dim"),
    ("optimizer[adafactor].decay_power", "optimizer.beta2_decay"),
    ("optimizer[adafactor].smallest_scale", "optimizer.eps2"),
    ("optimizer[adafactor].clip_update", "optimizer.clip_threshold"),
    ("lr_schedule.final_ratio", "lr_schedule.min_lr_factor"),
    ("lr_schedule[wsd].shape", "lr_schedule.decay_type"),
    ("data.streams", "data.read_streams"),
    ("data.mixture_block", "data.mixture_block_rows"),
    ("data.mixture_changes", "data.mixture_schedule"),
    ("data.cache", "data.cache_dir"),
    ("data.warmup", "data.rampup"),
    ("model.blocks", "model.layer_types"),
    ("model.block", "model.layer_type"),
    ("model.head", "model.lm_head"),
    ("model.heads", "model.extra_heads"),
    ("model.future_tokens", "model.n_mtp_heads"),
    ("model.attention[latent].kv_rank", "model.attention.kv_lora_rank"),
    ("model.attention[latent].q_rank", "model.attention.q_lora_rank"),
    ("model.attention[latent].rope_dim", "model.attention.qk_rope_head_dim"),
    ("model.attention[latent].v_dim", "model.attention.v_head_dim"),
    ("model.attention[latent].head_dim", "model.attention.qk_nope_head_dim"),
    ("model.attention[mla].head_dim", "model.attention.qk_nope_head_dim"),
    ("model.attention[linformer].length", "model.attention.max_length"),
    ("model.attention[linformer].rank", "model.attention.projected_length"),
    ("model.attention.pattern[window].step", "model.attention.pattern.dilation"),
    ("model.attention.pattern[window].first", "model.attention.pattern.initial_tokens"),
    ("model.attention.pattern[fixed].summary", "model.attention.pattern.n_summary_tokens"),
    ("model.attention.pattern[bigbird].block", "model.attention.pattern.block_size"),
    ("model.attention.pattern[bigbird].random", "model.attention.pattern.n_random_blocks"),
    ("model.attention.pattern[bigbird].extra", "model.attention.pattern.n_global_tokens"),
    ("model.attention.pattern[longformer].tokens", "model.attention.pattern.global_tokens"),
    ("model.ffn.capacity", "model.ffn.capacity_factor"),
    ("model.ffn.places", "model.ffn.expert_capacity"),
    ("model.ffn.router.balance", "model.ffn.router.aux_loss_coef"),
    ("model.ffn.router.sequence_balance", "model.ffn.router.seq_aux_loss_coef"),
    ("model.ffn.router.z_loss", "model.ffn.router.z_loss_coef"),
    ("model.ffn.router[noisy_top_k].importance", "model.ffn.router.importance_loss_coef"),
    ("model.ffn.router[noisy_top_k].load", "model.ffn.router.load_loss_coef"),
    ("model.ffn.router.normalise", "model.ffn.router.norm_topk_prob"),
    ("model.ffn.router[deepseek_v2].scale", "model.ffn.router.routed_scaling_factor"),
    ("model.ffn.router[deepseek_v3].scale", "model.ffn.router.routed_scaling_factor"),
    ("model.ffn.router.n_groups", "model.ffn.router.n_group"),
    ("model.ffn.router.top_groups", "model.ffn.router.topk_group"),
    ("model.ffn.router.bias_rate", "model.ffn.router.bias_update_rate"),
    ("model.norm[rms_norm].from_one", "model.norm.zero_centered"),
    ("model.norm.first", "model.norm.first_attention_norm"),
    ("model.norm.final", "model.norm.final_norm"),
    ("objective.future_weight", "objective.mtp_loss_weight"),
    ("objective[masked].rate", "objective.mask_rate"),
    ("objective[next_sentence].rate", "objective.mask_rate"),
    ("objective[sentence_order].rate", "objective.mask_rate"),
    ("objective[span_boundary].rate", "objective.mask_rate"),
    ("objective[replaced_token].rate", "objective.mask_rate"),
    ("objective.mask_share", "objective.mask_replace_prob"),
    ("objective.random_share", "objective.random_replace_prob"),
    ("objective[span_boundary].stop", "objective.geometric_p"),
    ("objective[span_boundary].max_words", "objective.max_span_words"),
    ("objective[permutation].every", "objective.tokens_per_prediction"),
    ("objective[span_corruption].rate", "objective.noise_density"),
    ("objective[span_corruption].mean_span", "objective.mean_noise_span_length"),
    ("objective[denoisers].regular", "objective.r_denoiser_weight"),
    ("objective[denoisers].extreme", "objective.x_denoiser_weight"),
    ("objective[denoisers].sequential", "objective.s_denoiser_weight"),
    ("deepspeed.hpz", "deepspeed.zero_hpz_partition_size"),
)
"""(Old key, new key) of training configs, in the order of their renaming."""
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
RENAMED_PREP_KEYS: tuple[tuple[str, str], ...] = (
    ("read.source", "read.builtin"),
    ("read.on_bad", "read.on_error"),
    ("read.repair_unicode", "read.fix_unicode"),
    ("read.fields.text", "read.text_key"),
    ("read.fields.url", "read.url_key"),
    ("read.fields.keep", "read.metadata_keys"),
    ("read.tokens.end", "read.tokens.eos_id"),
    ("split.by", "split.partition_by"),
    ("split.values", "split.partition_values"),
    ("split.files", "split.validation_files"),
    ("near_duplicates.similarity", "split.near_duplicates.similarity"),
    ("near_duplicates.shingle_words", "split.near_duplicates.n_grams"),
    ("tokenizer.modes", "tokenizer.ul2_modes"),
    ("tokenizer.pattern", "tokenizer.pretokenizer"),
    ("workers", "tokenizer_threads"),
    ("part_bytes", "task_bytes"),
    ("memory_bytes", "dedup_memory_bytes"),
    ("plain_tars", "compress"),
    ("duplicates", "dedup"),
    ("steps[gopher_quality].words", "steps[gopher_quality].word_tokenizer"),
    ("steps[gopher_repetition].words", "steps[gopher_repetition].word_tokenizer"),
    ("steps[fineweb].words", "steps[fineweb].word_tokenizer"),
    ("steps[gopher_quality].min_words", "steps[gopher_quality].min_doc_words"),
    ("steps[gopher_quality].max_words", "steps[gopher_quality].max_doc_words"),
    ("steps[gopher_quality].min_mean_word", "steps[gopher_quality].min_avg_word_length"),
    ("steps[gopher_quality].max_mean_word", "steps[gopher_quality].max_avg_word_length"),
    ("steps[gopher_quality].max_symbols", "steps[gopher_quality].max_symbol_word_ratio"),
    ("steps[gopher_quality].max_bullet_lines", "steps[gopher_quality].max_bullet_lines_ratio"),
    ("steps[gopher_quality].max_ellipsis_lines", "steps[gopher_quality].max_ellipsis_lines_ratio"),
    ("steps[gopher_quality].min_alphabetic", "steps[gopher_quality].min_alpha_words_ratio"),
    ("steps[gopher_repetition].lines", "steps[gopher_repetition].dup_line_frac"),
    ("steps[gopher_repetition].paragraphs", "steps[gopher_repetition].dup_para_frac"),
    ("steps[gopher_repetition].line_characters", "steps[gopher_repetition].dup_line_char_frac"),
    ("steps[gopher_repetition].paragraph_characters", "steps[gopher_repetition].dup_para_char_frac"),
    ("steps[gopher_repetition].top_ngrams", "steps[gopher_repetition].top_n_grams"),
    ("steps[gopher_repetition].repeated_ngrams", "steps[gopher_repetition].dup_n_grams"),
    ("steps[c4].terminal_punctuation", "steps[c4].filter_no_terminal_punct"),
    ("steps[c4].min_line_words", "steps[c4].min_words_per_line"),
    ("steps[c4].max_word_characters", "steps[c4].max_word_length"),
    ("steps[c4].min_sentences", "steps[c4].min_num_sentences"),
    ("steps[c4].curly_brackets", "steps[c4].filter_curly_bracket"),
    ("steps[fineweb].min_punctuated_lines", "steps[fineweb].line_punct_thr"),
    ("steps[fineweb].max_repeated_characters", "steps[fineweb].char_duplicates_ratio"),
    ("steps[fineweb].max_short_lines", "steps[fineweb].short_line_thr"),
    ("steps[fineweb].short_line", "steps[fineweb].short_line_length"),
    ("steps[fineweb].max_lines_per_word", "steps[fineweb].new_line_ratio"),
    ("steps[language].keep", "steps[language].languages"),
    ("steps[language].min_probability", "steps[language].language_threshold"),
    ("steps[language].characters", "steps[language].max_characters"),
    ("steps[decontaminate].words", "steps[decontaminate].n_grams"),
    ("steps[decontaminate].against", "steps[decontaminate].files"),
    ("steps[where].is_in", "steps[where].allowed"),
    ("steps[where].is_not", "steps[where].denied"),
    ("steps[where].at_least", "steps[where].min"),
    ("steps[where].at_most", "steps[where].max"),
    ("steps[sample].keep", "steps[sample].rate"),
    ("steps[sample].by_path", "steps[sample].rate_by_path"),
    ("steps[fasttext].at_least", "steps[fasttext].min_score"),
    ("steps[fasttext].at_most", "steps[fasttext].max_score"),
    ("steps[fasttext].field", "steps[fasttext].save_as"),
    ("steps[linear].at_least", "steps[linear].min_score"),
    ("steps[linear].at_most", "steps[linear].max_score"),
    ("steps[linear].field", "steps[linear].save_as"),
    ("steps[classifier].at_least", "steps[classifier].min_score"),
    ("steps[classifier].at_most", "steps[classifier].max_score"),
    ("steps[classifier].field", "steps[classifier].save_as"),
    ("steps[perplexity].at_least", "steps[perplexity].min_score"),
    ("steps[perplexity].at_most", "steps[perplexity].max_score"),
    ("steps[perplexity].field", "steps[perplexity].save_as"),
    ("steps[classifier].tokens", "steps[classifier].max_tokens"),
    ("steps[perplexity].tokens", "steps[perplexity].max_tokens"),
    ("dedup[lines].loose", "dedup[lines].normalize"),
    ("dedup[paragraphs].loose", "dedup[paragraphs].normalize"),
    ("dedup[near].shingle_words", "dedup[near].n_grams"),
    ("dedup[near].bands", "dedup[near].num_buckets"),
    ("dedup[near].rows", "dedup[near].hashes_per_bucket"),
)
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


def migrate_prep(values: Any, renamed: Renames | None = None) -> Any:
    """Return the config of a prep.json with today's keys and values."""
    if renamed is not None or not isinstance(values, Mapping):
        return migrate(values, renamed or (), (), ())
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
