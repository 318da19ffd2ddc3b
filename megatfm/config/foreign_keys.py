"""Config keys of other frameworks, and of megatfm before `[model]` had sections, for errors that name today's keys."""

from collections.abc import Mapping
from typing import Any

SECTIONS = ("attention", "ffn", "norm", "position", "embedding", "init")
"""Keys of [model] that were a part's name and are its section now."""

FLAT_MODEL_KEYS = {
    "n_heads": "attention.n_heads",
    "n_kv_heads": "attention.n_kv_heads",
    "head_dim": "attention.head_dim",
    "attention_bias": "attention.bias",
    "attention_scale": "attention.scale",
    "attention_softcap": "attention.softcap",
    "attention_dropout": "attention.dropout",
    "qk_norm": "attention.qk_norm",
    "d_ff": "ffn.d_ff",
    "activation": "ffn.activation",
    "ffn_bias": "ffn.bias",
    "ffn_dropout": "ffn.dropout",
    "norm_eps": "norm.eps",
    "norm_position": "norm.placement",
    "final_norm": "norm.final_norm",
    "max_positions": "position.max_positions",
    "position_offset": "position.offset",
    "rope_theta": "position.theta",
    "rope_scaling": "position.scaling",
    "relative_buckets": "position.buckets",
    "relative_distance": "position.max_distance",
    "embedding_dim": "embedding.dim",
    "embedding_scale": "embedding.scale",
    "embedding_norm": "embedding.norm",
    "n_segments": "embedding.n_segments",
    "tie_embeddings": "embedding.tied",
    "head_bias": "lm_head.bias",
    "head_scale": "lm_head.scale",
    "logit_softcap": "lm_head.softcap",
    "label_smoothing": "lm_head.label_smoothing",
    "init_std": "init.std",
    "sentence_classes": "extra_heads.sentence.classes",
    "boundary_head": "extra_heads.boundary",
}
"""Key of `[model]` when it was one flat section → today's key."""


def reject_renamed_keys(values: Any) -> None:
    """Raise ValueError that names every key of an earlier version in `[model]`, and today's key."""
    if not isinstance(values, Mapping):
        return
    moved_keys = []
    for key, value in values.items():
        if key == "latent" and isinstance(value, Mapping):
            moved_keys += [(f"latent.{inner}", f"attention.{inner}") for inner in value]
        elif key in FLAT_MODEL_KEYS:
            moved_keys.append((key, FLAT_MODEL_KEYS[key]))
        elif key in SECTIONS and isinstance(value, str):
            moved_keys.append((key, f"{key}.name"))
    if moved_keys:
        raise ValueError(
            f"keys that have moved into sections: {', '.join(f'{old} is model.{new} now' for old, new in moved_keys)}"
        )


FOREIGN_NAMES = {
    "name": "run_name",
    "run_dir": "output_dir out_dir dump_folder save_folder checkpoints_path exp_dir",
    "plugins": "trust_remote_code custom_import",
    "model.attention.bias": "add_qkv_bias",
    "model.attention.dropout": "attention_dropout attn_pdrop attention_probs_dropout_prob",
    "model.attention.head_dim": "kv_channels",
    "model.attention.n_heads": "n_head num_attention_heads",
    "model.attention.n_kv_heads": "num_key_value_heads num_query_groups",
    "model.attention.name": "group_query_attention multi_latent_attention",
    "model.attention.pattern": "sliding_window window_size",
    "model.attention.qk_nope_head_dim": "qk_head_dim",
    "model.attention.qk_norm": "qk_layernorm",
    "model.attention.qk_rope_head_dim": "qk_pos_emb_head_dim",
    "model.attention.scale": "query_pre_attn_scalar",
    "model.attention.softcap": "attn_logit_softcapping",
    "model.d_model": "hidden_size n_embd dim",
    "model.dropout": "hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop",
    "model.embedding.n_segments": "type_vocab_size",
    "model.embedding.tied": (
        "tie_word_embeddings untie_embeddings_and_output_weights enable_weight_tying "
        "share_embeddings_and_output_weights"
    ),
    "model.ffn.activation": "hidden_act swiglu squared_relu activation_function",
    "model.ffn.bias": "add_bias_linear disable_bias_linear mlp_bias",
    "model.ffn.capacity_factor": "moe_expert_capacity_factor",
    "model.ffn.d_ff": "intermediate_size ffn_hidden_size hidden_dim moe_intermediate_size moe_ffn_hidden_size",
    "model.ffn.n_experts": "num_experts num_local_experts n_routed_experts",
    "model.ffn.n_shared_experts": "moe_shared_expert_intermediate_size num_shared_experts",
    "model.ffn.router.aux_loss_coef": "moe_aux_loss_coeff router_aux_loss_coef",
    "model.ffn.router.bias_update_rate": "moe_router_bias_update_rate load_balance_coeff moe_router_enable_expert_bias",
    "model.ffn.router.n_group": "moe_router_num_groups",
    "model.ffn.router.topk_group": "moe_router_group_topk",
    "model.ffn.router.z_loss_coef": "moe_z_loss_coeff router_z_loss_coef",
    "model.ffn.top_k": "num_experts_per_tok moe_router_topk",
    "model.init.std": "initializer_range init_method_std",
    "model.layer_types": "moe_layer_freq first_k_dense_replace",
    "model.lm_head.label_smoothing": "label_smoothing_factor",
    "model.lm_head.softcap": "final_logit_softcapping",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rank": "r",
    "model.lora.targets": "target_modules",
    "model.lora.trained": "modules_to_save",
    "model.n_encoder_layers": "encoder_num_layers",
    "model.n_layers": "num_layers num_hidden_layers n_layer",
    "model.n_mtp_heads": "mtp_num_layers num_nextn_predict_layers",
    "model.norm.eps": "rms_norm_eps layer_norm_eps layernorm_epsilon norm_eps norm_epsilon layer_norm_epsilon",
    "model.norm.name": "normalization",
    "model.norm.zero_centered": "apply_layernorm_1p",
    "model.position.max_positions": "max_position_embeddings n_positions n_ctx",
    "model.position.name": "position_embedding_type",
    "model.position.scaling": "rope_scaling rope_parameters use_rope_scaling",
    "model.position.theta": "rope_theta rotary_base",
    "objective.mask_rate": "mask_prob",
    "objective.mtp_loss_weight": "mtp_loss_scaling_factor",
    "data.attend_across_documents": "reset_attention_mask reset_position_ids",
    "data.mixture": "interleave_datasets",
    "data.rampup": "rampup_batch_size",
    "data.sequence_length": (
        "block_size seq_length seq_len max_length max_sequence_length max_seq_length encoder_seq_length"
    ),
    "data.target_length": "decoder_seq_length",
    "data.tokenizer": (
        "tokenizer_type tokenizer_model tokenizer_path hf_assets_path tokenizer_name_or_path tokenizer_name"
    ),
    "data.train": "data_path dataset_path dataset dataset_name train_file data_prefix",
    "data.validation": "validation_file",
    "data.workers": "num_workers dataloader_num_workers num_loading_workers",
    "parallel.async_tp": "tp_comm_overlap enable_async_tensor_parallel tp_linear_async_communication",
    "parallel.comm_buffers": "use_nccl_ub enable_fsdp_symm_mem",
    "parallel.cp": "context_parallel_degree context_parallel_size sequence_parallel_size cp_config",
    "parallel.cp_method": "cp_comm_type context_parallel_rotate_method",
    "parallel.dp_replicate": "data_parallel_replicate_degree ddp num_distributed_optimizer_instances num_replicas",
    "parallel.dp_shard": "data_parallel_shard_degree fsdp dp_config shard_degree parallelism.dp",
    "parallel.ep": "expert_parallel_degree expert_model_parallel_size ep_size ep_config expert_parallel_size",
    "parallel.expert_tp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "parallel.fsdp_prefetch": "overlap_param_gather stage3_prefetch_bucket_size",
    "parallel.pp": "pipeline_parallel_degree pipeline_model_parallel_size pp_config",
    "parallel.pp_schedule": "pipeline_parallel_schedule pp_engine",
    "parallel.pp_split_points": (
        "pipeline_model_parallel_layout decoder_first_pipeline_num_layers module_fqns_per_model_part "
        "partition_method pipeline_parallel_split_points"
    ),
    "parallel.reduce_dtype": "grad_reduce_in_bf16 mixed_precision_reduce communication_data_type",
    "parallel.sequence_parallel": "enable_sequence_parallel tp_mode",
    "parallel.tp": "tensor_parallel_degree tensor_model_parallel_size tp_plan tp_config",
    "parallel.virtual_stages": (
        "num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage "
        "virtual_pipeline_model_parallel_size"
    ),
    "parallel.zero": (
        "zero_stage use_distributed_optimizer data_parallel_sharding_strategy fsdp_reshard_after_forward "
        "fsdp_sharding_strategy use_torch_fsdp2"
    ),
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.lr": "learning_rate",
    "optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad max_norm gradient_clipping gradient_clip_val",
    "optimizer.moments_dtype": "exp_avg_dtype exp_avg_sq_dtype",
    "optimizer.name": "optim",
    "lr_schedule.decay_ratio": "lr_wsd_decay_iters lr_decay_steps",
    "lr_schedule.min_lr_factor": "min_lr min_lr_factor alpha_f min_decay_lr",
    "lr_schedule.name": "lr_decay_style lr_scheduler_type decay_type",
    "lr_schedule.warmup_steps": (
        "warmup_iters lr_warmup_iters warmup_ratio num_warmup_steps lr_warmup_fraction lr_warmup_steps "
        "lr_warmup_samples"
    ),
    "train.branch_from": "ckpt_step load_step load_path resume_checkpoint_path",
    "train.compile": "torch_compile compile_model",
    "train.cuda_graphs": "cuda_graph_impl",
    "train.global_batch": (
        "batch_size global_batch_size gradient_accumulation_steps train_batch_size batch_accumulation_per_replica "
        "accumulate_grad_batches"
    ),
    "train.gc_every": "gc_freq manual_gc manual_gc_interval",
    "train.hang_seconds": "distributed_timeout_minutes train_timeout_seconds ddp_timeout",
    "train.init_from": (
        "initial_load_path model_name_or_path pretrained_checkpoint restore_from_path initial_load_in_hf"
    ),
    "train.micro_batch": (
        "per_device_train_batch_size micro_batch_size local_batch_size train_micro_batch_size_per_gpu "
        "pipeline_parallel_microbatch_size rank_microbatch_size"
    ),
    "train.precision": "bf16 fp16 mixed_precision dtype fp8_format mixed_precision_param float8 torch_dtype",
    "train.recompute": (
        "gradient_checkpointing activation_checkpoint activation_checkpointing memory_budget recompute_granularity "
        "recompute_method recompute_num_layers ac_config recompute_layer recompute_activations recompute_modules "
        "selective_ac_option activations_checkpoint_granularity activations_checkpoint_method "
        "activations_checkpoint_num_layers"
    ),
    "train.steps": "max_steps max_iters train_iters lr_decay_iters train_samples max_duration train_steps",
    "task.epochs": "num_train_epochs max_epochs",
    "checkpoint.every": "save_steps save_interval checkpoint.interval checkpoint_interval save_strategy",
    "checkpoint.keep": "save_total_limit keep_latest_k save_top_k",
    "checkpoint.local_dir": "non_persistent_ckpt_type",
    "checkpoint.mode": "async_save async_mode save_async",
    "resume.allow": "override_opt_param_scheduler",
    "resilience.replay_every": "rerun_mode",
    "evaluate.every": "eval_steps eval_interval validation.freq val_check_interval eval_strategy evaluation_strategy",
    "evaluate.max_rows": "eval_iters limit_val_batches",
    "log.every": (
        "logging_steps log_interval log_freq iteration_step_info_interval metrics_collect_interval log_every_n_steps"
    ),
    "log.layer_stats_every": "log_params_norm",
    "log.memory_snapshot": "record_memory_history enable_memory_snapshot",
    "log.profile": "profile_step_start profile_step_end enable_profiling profile_freq",
    "log.sinks": "report_to tensorboard_dir enable_tensorboard enable_wandb create_wandb_logger",
}
"""Our key → names of other frameworks, without their sections if the names alone are clear.

`docs/reference/glossary.md` lists them by framework."""
FOREIGN_KEYS = {name: key for key, names in FOREIGN_NAMES.items() for name in names.split()}
"""Key of another framework → our key."""


def list_foreign_keys(section: str, value: Any) -> list[str]:
    """Return the dotted keys of an unknown section that has a key of another framework; nothing if it has none."""
    if not isinstance(value, Mapping) or section.lower() in FOREIGN_KEYS:
        return []
    keys = [f"{section}.{name}" for name in value]
    return keys if any(translate_foreign_key(key) for key in keys) else []


def translate_foreign_key(key: str) -> str | None:
    """Return our key for one of another framework, whose section counts where the name alone isn't clear, or for one of
    `[model]` when it was flat."""
    name = key.rpartition(".")[2]
    our_key = FOREIGN_KEYS.get(key.lower()) or FOREIGN_KEYS.get(name.lower())
    return our_key or (f"model.{FLAT_MODEL_KEYS[name]}" if name in FLAT_MODEL_KEYS else None)
