"""Config keys of earlier versions and what they are today, for configs that megatfm has stored itself.

Checkpoints, run directories and prep.json hold configs with every key spelled out, and outlive a version. To rename a
key, add a row here in the same commit. For a new key whose default computes something else than the versions before,
add to `VALUES_BEFORE` what those computed. A user's own file is not translated: it is refused, with the new name. An
old name is never given a new meaning, so that a stored config needs no version to be read by.

A key is a path such as "optimizer.clip". `section[NAME].key` means the section where its `name` is NAME, and `*` every
key of a table. A list of tables stands for each of them. Rows of "model." hold in the kinds of blocks as well.
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
"""Old key, new key, of training configs; in the order in which they were renamed."""
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
"""Key (its name now), old value, new value."""
VALUES_BEFORE: tuple[tuple[str, Any], ...] = ()
"""Key (its name now), and the value that says what versions without it computed, where that isn't the default."""
RENAMED_PREP_KEYS: tuple[tuple[str, str], ...] = ()
"""The same as `RENAMED_KEYS`, of the configs in prep.json."""

BLOCK_KINDS = ("model.block.*", "model.layer_type.*")
"""Sections that hold sections of [model] for some blocks, under each name that they have had."""

Renames = Sequence[tuple[str, str]]


def migrate(
    values: Any,
    renamed: Renames | None = None,
    new_values: Sequence[tuple[str, Any, Any]] | None = None,
    before: Sequence[tuple[str, Any]] | None = None,
) -> Any:
    """Translate a stored training config into today's keys and values; anything else than a table is returned as it is.

    renamed, new_values, before: other tables than those of this module.
    """
    if not isinstance(values, Mapping):
        return values
    tables = copy.deepcopy(dict(values))
    for old, new in _for_blocks(RENAMED_KEYS if renamed is None else renamed):
        _rename(tables, old.split("."), new.split("."))
    for key, old_value, new_value in RENAMED_VALUES if new_values is None else new_values:
        for path, _ in _for_blocks([(key, key)]):
            *parents, last = path.split(".")
            for table in _tables_at(tables, parents):
                if last in table and table[last] == old_value:
                    table[last] = new_value
    for key, value in VALUES_BEFORE if before is None else before:
        *parents, last = key.split(".")
        for table in _tables_at(tables, parents):
            table.setdefault(last, value)
    return tables


def migrate_prep(values: Any, renamed: Renames | None = None) -> Any:
    """Translate the config in a prep.json into today's keys."""
    return migrate(values, RENAMED_PREP_KEYS if renamed is None else renamed, (), ())


def find_renamed_keys(values: Any, renamed: Renames | None = None) -> list[tuple[str, str]]:
    """Return the old keys that a config still has, each with its name now."""
    found = []
    for old, new in _for_blocks(RENAMED_KEYS if renamed is None else renamed):
        *parents, last = old.split(".")
        if any(last in table for table in _tables_at(values, parents)):
            found.append((_plain(old), _plain(new)))
    return found


def _for_blocks(renamed: Renames) -> Iterator[tuple[str, str]]:
    """The rows, and those of [model] for each kind of block, too."""
    for old, new in renamed:
        yield old, new
        if old.startswith("model.") and new.startswith("model."):
            for kind in BLOCK_KINDS:
                yield f"{kind}{old.removeprefix('model')}", f"{kind}{new.removeprefix('model')}"


def _rename(tables: dict[str, Any], old: list[str], new: list[str]) -> None:
    """Move what stands under the old path to the new one, below the deepest table that both paths share."""
    shared = 0
    while shared < min(len(old), len(new)) - 1 and _names_same_table(old[shared], new[shared]):
        shared += 1
    for root in _tables_at(tables, old[:shared]):
        *parents, last = old[shared:]
        *places, name = (part.partition("[")[0] for part in new[shared:])
        for table in _tables_at(root, parents):
            if last not in table:
                continue
            value, target = table.pop(last), root
            for place in places:
                target = target.setdefault(place, {})
            target.setdefault(name, value)


def _names_same_table(old: str, new: str) -> bool:
    return old.partition("[")[0] == new.partition("[")[0]


def _tables_at(values: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every table that a path leads to."""
    if isinstance(values, list):
        for element in values:
            yield from _tables_at(element, path)
    elif not isinstance(values, dict):
        return
    elif not path:
        yield values
    elif path[0] == "*":
        for value in list(values.values()):
            yield from _tables_at(value, path[1:])
    else:
        key, _, variant = path[0].partition("[")
        for table in _tables_at(values.get(key), ()):
            if not variant or table.get("name") == variant.rstrip("]"):
                yield from _tables_at(table, path[1:])


def _plain(path: str) -> str:
    """A path as a user would write it."""
    return ".".join(part.partition("[")[0].replace("*", "KIND") for part in path.split("."))
