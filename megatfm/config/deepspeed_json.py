"""DeepSpeed's JSON config, derived from megatfm's (`make_deepspeed_json`).

A user's own JSON is read when an engine is built or a job is launched. A key of it repeats one of ours and must agree
with it (`list_controlled_keys`), or tunes and is passed through (`PASSED_SECTIONS`, `PASSED_ZERO_KEYS`), or is refused
with what to set instead.

This module is in `config`, not beside the engine: launchers and `megatfm config` refuse a wrong JSON before a job
waits in a queue, and neither may import an engine or torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatfm.config.root import Config
from megatfm.errors import UsageError

Json = dict[str, Any]
OPTIMIZER_TYPES: dict[str, str | tuple[str, ...]] = {"adamw": ("AdamW", "Adam"), "lion": "Lion"}
"""Our optimizer → DeepSpeed's names of it. Its Adam is AdamW by default."""
ANY_VALUE = object()
"""Stands for a value: any value in a JSON is accepted."""


def make_deepspeed_json(config: Config, precision: str, folder: Path | None = None) -> Json:
    """Return the JSON for DeepSpeed. folder: this rank's folder in nvme_path.

    Raises UsageError if the user's JSON can't be read, or disagrees with our config, naming the keys.
    """
    derived = _make_base_json(config, precision, str(folder or config.deepspeed.nvme_path))
    if config.deepspeed.json_file is None:
        return derived
    path = Path(config.deepspeed.json_file)
    try:
        tuned = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(
            f"deepspeed.json_file = {str(path)!r}: can't read it: {reason}: give DeepSpeed's JSON, or leave the key out"
        ) from None
    if not isinstance(tuned, dict):
        raise UsageError(f"deepspeed.json_file = {str(path)!r} is no JSON object: give one, key → value")
    return merge_tuning_keys(derived, tuned, list_controlled_keys(config, precision))


def _make_base_json(config: Config, precision: str, folder: str) -> Json:
    parallel, offload = config.parallel, config.deepspeed
    zero: Json = {"stage": parallel.zero}
    if parallel.zero == 3:
        # Small parameters would stay gathered, a second kind of weights to keep up to date.
        zero["stage3_param_persistence_threshold"] = 0
        # It would replace torch's `linear` for the rest of the process by one that adds biases in place: twice to
        # outputs that selective recomputation has kept.
        zero["memory_efficient_linear"] = False
        if offload.zero_hpz_partition_size > 1:
            zero["zero_hpz_partition_size"] = offload.zero_hpz_partition_size
    elif parallel.zero and offload.offload_optimizer == "none" and (parallel.zero, precision) != (1, "bf16"):
        zero["compute_grad_norm"] = False  # the engine computes the norm before it decides to step
    devices = {"offload_optimizer": offload.offload_optimizer, "offload_param": offload.offload_parameters}
    for key, device in devices.items():
        if device != "none":
            zero[key] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    if offload.offload_parameters == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0
        zero["stage3_max_reuse_distance"] = 0  # else weights stay in buffers until they are used again
    derived: Json = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": 1,  # the loop counts micro-batches, whose number may change between steps
        "gradient_clipping": 0.0,  # the engine clips by its norm in float64
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if parallel.zero < 3:
        derived["gradient_allreduce_op"] = "sum"  # losses are divided by counts over the global batch
    if precision in ("bf16", "fp16"):
        derived[precision] = {"enabled": True}
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
        derived["communication_data_type"] = "fp32"
    if precision == "bf16" and parallel.zero == 1:
        derived["bf16"]["immediate_grad_update"] = True  # after each pass, since pipelines interleave passes
    if precision == "fp16":
        derived["fp16"]["loss_scale"] = 1.0  # the engine scales, so that the scale is in every checkpoint
    return derived


def list_controlled_keys(config: Config, precision: str) -> dict[str, tuple[str, Any]]:
    """Return DeepSpeed key → our key that decides it, and the value that a JSON must have if it has the key."""
    parallel, train, optimizer = config.parallel, config.train, config.optimizer
    overlap = {"zero_optimization.overlap_comm": ("parallel.pp", False)} if parallel.pp > 1 else {}
    return {
        **overlap,
        **_get_precision_keys(precision),
        **_get_offload_keys(config),
        "train_batch_size": ("train.global_batch", train.global_batch),
        "train_micro_batch_size_per_gpu": ("train.micro_batch", train.micro_batch),
        "gradient_accumulation_steps": ("train.global_batch and train.micro_batch", ANY_VALUE),
        "gradient_clipping": ("optimizer.max_grad_norm", optimizer.max_grad_norm),
        "zero_optimization.stage": ("parallel.zero", parallel.zero),
        "optimizer.type": ("optimizer.name", OPTIMIZER_TYPES.get(optimizer.name, optimizer.name)),
        "optimizer.params.adam_w_mode": ("optimizer.name = 'adamw' decays weights by themselves", True),
        "optimizer.params.torch_adam": ("optimizer.name", ANY_VALUE),
        "optimizer.params.lr": ("optimizer.lr", optimizer.lr),
        "optimizer.params.betas": ("optimizer.betas", list(getattr(optimizer, "betas", ()))),
        "optimizer.params.eps": ("optimizer.eps", getattr(optimizer, "eps", None)),
        "optimizer.params.weight_decay": ("optimizer.weight_decay", optimizer.weight_decay),
    }


def _get_precision_keys(precision: str) -> dict[str, tuple[str, Any]]:
    """Return the controlled keys of precision. precision: "auto" if not resolved; the loss scale's count for fp16."""
    precision_text = f"train.precision = {precision!r}"
    keys: dict[str, tuple[str, Any]] = {
        "data_types.grad_accum_dtype": ("gradients are added up in it", ("fp32", None)),
        "communication_data_type": ("gradients are reduced in it", ("fp32", None)),
    }
    for name in ("bf16", "fp16"):
        keys[f"{name}.enabled"] = precision_text, ANY_VALUE if precision == "auto" else precision == name
    scale: dict[str, Any] = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 2000,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }
    reason = "the scale starts at 2¹⁶, halves at an overflow, and doubles after 2000 steps without one"
    if precision != "fp16":
        scale = dict.fromkeys(scale, ANY_VALUE)
    return keys | {f"fp16.{key}": (reason, value) for key, value in scale.items()}


def _get_offload_keys(config: Config) -> dict[str, tuple[str, Any]]:
    offload = config.deepspeed
    optimizer_device = ("deepspeed.offload_optimizer", offload.offload_optimizer)
    keys: dict[str, tuple[str, Any]] = {
        "offload_optimizer.device": optimizer_device,
        "offload_optimizer.nvme_path": ("deepspeed.nvme_path", offload.nvme_path),
        "offload_param.device": ("deepspeed.offload_parameters", offload.offload_parameters),
        "offload_param.nvme_path": ("deepspeed.nvme_path", offload.nvme_path),
        "zero_hpz_partition_size": ("deepspeed.zero_hpz_partition_size", offload.zero_hpz_partition_size),
        "cpu_offload": (f"{optimizer_device[0]} = {optimizer_device[1]!r}", optimizer_device[1] == "cpu"),
    }
    if offload.offload_parameters == "nvme":  # other values would need more buffers than there are
        for key in ("stage3_max_reuse_distance", "offload_param.max_in_cpu"):
            keys[key] = "deepspeed.offload_parameters = 'nvme' needs 0", 0
    return {f"zero_optimization.{key}": rule for key, rule in keys.items()}


PASSED_SECTIONS = {
    "aio": "how NVMe is read and written",
    "comms_logger": "what is sent",
    "dump_state": "what is printed",
    "flops_profiler": "what is measured",
    "memory_breakdown": "what is printed",
    "steps_per_print": "what is printed",
    "wall_clock_breakdown": "what is printed",
    "zero_optimization": "buckets, prefetching and pinned memory: TUNES",
}
"""DeepSpeed's tuning keys, which a JSON may set freely: they change no result. Key → what it tunes."""

PASSED_ZERO_KEYS = {
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "offload_optimizer.buffer_count",
    "offload_optimizer.pin_memory",
    "offload_param.buffer_count",
    "offload_param.buffer_size",
    "offload_param.max_in_cpu",
    "offload_param.pin_memory",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
}
"""Tuning keys of zero_optimization."""

FIXED_VALUES = {
    "prescale_gradients": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization.memory_efficient_linear": False,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
}
"""Key → its only accepted value."""

_PROCESS = "Adam's state stays in a process of its own, where no checkpoint reaches it"
_ROUNDED = "what is sent would be rounded to 8 bits or 4, so the run would not be that of one device"
_CUDA = "its operator is compiled for CUDA alone"
UNSUPPORTED_KEYS = {
    "activation_checkpointing": "set train.recompute",
    "aio.use_gds": "its operator, for disks that GPUs read by themselves, would be compiled unasked",
    "amp": "set train.precision",
    "autotuning": "the layout is the config's",
    "checkpoint": "megatfm writes its own format: set [checkpoint]",
    "compile.deepcompile": f"{_CUDA}, and its reductions replace those that are tested",
    "compression_training": "megatfm has none",
    "curriculum_learning": "set data.rampup",
    "data_efficiency": "set data.rampup and data.train",
    "elasticity": "set resilience.elastic",
    "hybrid_engine": "megatfm only pretrains",
    "monitor_config": "set log.sinks",
    "pipeline": "set parallel.pp and parallel.pp_schedule",
    "prescale_gradients": "the loss is divided by what the global batch counts",
    "scheduler": "set [lr_schedule]",
    "sparse_attention": "set the model's attention",
    "tensor_parallel": "set parallel.tp",
    "tensorboard": "set log.sinks",
    "wandb": "set log.sinks",
    "zero_optimization.memory_efficient_linear": "it replaces torch's linear for the rest of the process",
    "zero_optimization.mics_hierarchical_params_gather": "see mics_shard_size",
    "zero_optimization.mics_shard_size": "it wants the model built inside of it: "
    "deepspeed.zero_hpz_partition_size keeps copies near, too",
    "zero_optimization.offload_optimizer.fast_init": "initial weights are drawn after DeepSpeed has started",
    "zero_optimization.offload_optimizer.pipeline_read": "it would need more buffers, and gain nothing measured here",
    "zero_optimization.offload_optimizer.pipeline_write": "files are looked at between steps, when all is written",
    "zero_optimization.offload_optimizer.ratio": "a second optimizer would move what isn't offloaded",
    "zero_optimization.offload_optimizer.super_offload": _PROCESS,
    "zero_optimization.round_robin_gradients": "where gradients lie is read from DeepSpeed's usual order",
    "zero_optimization.stage3_param_persistence_threshold": "weights that stay gathered would be a second kind",
    "zero_optimization.zenflow": f"its updates come late, and {_PROCESS}",
    "zero_optimization.zero_quantized_gradients": _ROUNDED,
    "zero_optimization.zero_quantized_weights": _ROUNDED,
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are kept as they were stored",
}
"""Refused key → why, or what to set instead."""
DISABLED_VALUES = (False, None, "auto", -1)
"""Values that turn a refused key off; a section with "enabled": false is off as well."""


def merge_tuning_keys(derived: Json, tuned: Json, fixed: Mapping[str, tuple[str, Any]]) -> Json:
    """Merge a user's tuning keys into our JSON. Raises UsageError that names every refused key, and why.

    fixed: `list_controlled_keys`.
    """
    merged: Json = json.loads(json.dumps(derived))
    conflicts: dict[str, str] = {}
    for key, value in _iter_leaves(tuned):
        unsupported = next((k for k in UNSUPPORTED_KEYS if f"{key}.".startswith(f"{k}.")), None)
        section, _, inner_key = key.partition(".")
        if value == "auto" or _matches(value, FIXED_VALUES.get(key)):
            continue
        if key in fixed:
            source, expected = fixed[key]
            if not _matches(value, expected):
                conflicts[f"{key} = {json.dumps(value)}"] = _explain_conflict(source, expected)
        elif unsupported:
            if not (_is_disabled(tuned, key) or (value in DISABLED_VALUES and unsupported not in FIXED_VALUES)):
                conflicts[unsupported] = f": {UNSUPPORTED_KEYS[unsupported]}"
        elif section in PASSED_SECTIONS and (section != "zero_optimization" or inner_key in PASSED_ZERO_KEYS):
            _set(merged, key, value)
        else:
            conflicts[key] = ": not carried"
    if conflicts:
        conflict_text = "; ".join(key + reason for key, reason in conflicts.items())
        raise UsageError(f"deepspeed.json_file: {conflict_text}: leave these out of the file, or change our keys")
    return merged


def _matches(value: Any, expected: Any) -> bool:
    if expected is ANY_VALUE or value == expected:
        return True
    return isinstance(expected, tuple) and value in expected


def _explain_conflict(source: str, expected: Any) -> str:
    """Return the reason of a conflict: our key with its value, or a phrase."""
    value = expected[0] if isinstance(expected, tuple) else expected
    return f", but {source}" if " " in source else f", but {source} = {json.dumps(value)}"


def _is_disabled(values: Json, key: str) -> bool:
    section: Any = values
    for name in key.split(".")[:-1]:
        section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get("enabled") is False:
            return True
    return False


def _iter_leaves(table: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(table: Json, key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        table = table.setdefault(name, {})
    table[last] = value
