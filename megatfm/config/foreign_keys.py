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


FOREIGN_KEYS = {
    "batch_size": "train.global_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "local_batch_size": "train.micro_batch",
    "global_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "train_iters": "train.steps",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "clip_grad": "optimizer.max_grad_norm",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "warmup_iters": "lr_schedule.warmup_steps",
    "lr_warmup_iters": "lr_schedule.warmup_steps",
    "lr_decay_style": "lr_schedule.name",
    "lr_scheduler_type": "lr_schedule.name",
    "min_lr": "lr_schedule.min_lr_factor",
    "block_size": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_length": "data.sequence_length",
    "data_path": "data.train",
    "num_workers": "data.workers",
    "hidden_size": "model.d_model",
    "n_embd": "model.d_model",
    "dim": "model.d_model",
    "num_layers": "model.n_layers",
    "num_hidden_layers": "model.n_layers",
    "n_layer": "model.n_layers",
    "n_head": "model.attention.n_heads",
    "num_attention_heads": "model.attention.n_heads",
    "num_key_value_heads": "model.attention.n_kv_heads",
    "num_query_groups": "model.attention.n_kv_heads",
    "intermediate_size": "model.ffn.d_ff",
    "ffn_hidden_size": "model.ffn.d_ff",
    "hidden_act": "model.ffn.activation",
    "tie_word_embeddings": "model.embedding.tied",
    "initializer_range": "model.init.std",
    "tensor_parallel_degree": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "data_parallel_shard_degree": "parallel.dp_shard",
    "data_parallel_replicate_degree": "parallel.dp_replicate",
    "ddp": "parallel.dp_replicate",
    "fsdp": "parallel.dp_shard",
    "zero_stage": "parallel.zero",
    "gradient_checkpointing": "train.recompute",
    "activation_checkpoint": "train.recompute",
    "recompute_granularity": "train.recompute",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "mixed_precision": "train.precision",
    "dtype": "train.precision",
    "torch_compile": "train.compile",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every",
    "eval_interval": "evaluate.every",
    "logging_steps": "log.every",
    "log_interval": "log.every",
    "max_norm": "optimizer.max_grad_norm",
    "warmup_ratio": "lr_schedule.warmup_steps",
    "num_warmup_steps": "lr_schedule.warmup_steps",
    "min_lr_factor": "lr_schedule.min_lr_factor",
    "num_experts": "model.ffn.n_experts",
    "num_local_experts": "model.ffn.n_experts",
    "n_routed_experts": "model.ffn.n_experts",
    "num_experts_per_tok": "model.ffn.top_k",
    "moe_router_topk": "model.ffn.top_k",
    "rope_theta": "model.position.theta",
    "rotary_base": "model.position.theta",
    "rope_scaling": "model.position.scaling",
    "max_position_embeddings": "model.position.max_positions",
    "sliding_window": "model.attention.pattern",
    "window_size": "model.attention.pattern",
    "attention_dropout": "model.attention.dropout",
    "hidden_dropout": "model.dropout",
    "hidden_dropout_prob": "model.dropout",
    "rms_norm_eps": "model.norm.eps",
    "layer_norm_eps": "model.norm.eps",
    "layernorm_epsilon": "model.norm.eps",
    "context_parallel_degree": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel_degree": "parallel.ep",
    "expert_model_parallel_size": "parallel.ep",
    "report_to": "log.sinks",
    "output_dir": "run_dir",
    "out_dir": "run_dir",
    "run_name": "name",
}
"""Key of another framework, without its section → our key. `docs/reference/glossary.md` lists them by framework."""
