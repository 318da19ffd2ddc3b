"""The DeepSpeed engine's section, what DeepSpeed can't carry, and the JSON that DeepSpeed is configured with.

DeepSpeed is no more than asked here for what our config says: each of its keys is either one of ours under another
name (`DECIDED`), or free to be set in a JSON of the user's own (`FREE`), or refused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from megatfm.config.base import PathStr, Section
from megatfm.config.optimizer import AdafactorConfig, LambConfig, MuonConfig, SoapConfig
from megatfm.config.sections import ParallelConfig

if TYPE_CHECKING:
    from megatfm.config.root import Config

Json = dict[str, Any]
Place = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """What only parallel.engine = "deepspeed" has."""

    offload_optimizer: Place = "none"
    """Where optimizer state and the weights that it moves are kept, with zero = 1, 2 or 3: "none" is the device."""
    offload_parameters: Place = "none"
    """Where the weights that are not in use are kept, with zero = 3: "none" is the device."""
    nvme_path: PathStr | None = None
    """Folder on a local disk for what is offloaded to "nvme"."""
    hpz: int = Field(default=1, ge=1)
    """With zero = 3: how many neighbouring ranks, as a rule a node's, keep another copy of the weights between them, in
    the compute precision, from which backward passes gather (DeepSpeed's zero_hpz_partition_size)."""
    json_file: PathStr | None = None
    """A DeepSpeed config of your own, whose tuning is taken over; what it says about our keys must agree with them."""

    @model_validator(mode="after")
    def _has_a_disk(self) -> Self:
        if "nvme" in (self.offload_optimizer, self.offload_parameters) and self.nvme_path is None:
            raise ValueError("offloading to 'nvme' needs nvme_path, a folder on a local disk")
        return self


WHOLE_TENSORS = (MuonConfig, SoapConfig, AdafactorConfig, LambConfig)


def check(config: "Config") -> None:
    """Raise ValueError for what DeepSpeed can't carry, or for a `deepspeed` section that nobody reads."""
    if config.parallel.engine != "deepspeed":
        if config.deepspeed != DeepSpeedConfig():
            raise ValueError(
                f"deepspeed.{next(iter(config.deepspeed.model_fields_set))} is set, but parallel.engine = "
                f"{config.parallel.engine!r}: leave it out, or set parallel.engine = 'deepspeed'"
            )
        return
    for problem in _problems(config):
        raise ValueError(f"parallel.engine = 'deepspeed' with {problem}, or parallel.engine = 'native'")
    derive(config, config.train.precision)


def _problems(config: "Config") -> Iterator[str]:
    parallel, train, offload = config.parallel, config.train, config.deepspeed
    if parallel.pp > 1 and parallel.zero > 1:
        yield (
            f"parallel.pp = {parallel.pp} and parallel.zero = {parallel.zero}, which reduces gradients in each of the "
            "passes that pipelines take in turn: set parallel.zero = 1, or parallel.pp = 1"
        )
    if parallel.reduce_dtype != "full":
        yield "parallel.reduce_dtype = 'bf16', which its ZeRO knows otherwise: set parallel.reduce_dtype = 'full'"
    if parallel.comm_memory != "torch":
        yield "parallel.comm_memory = 'group', which is for FSDP2's buffers: set parallel.comm_memory = 'torch'"
    if parallel.prefetch is not None:
        yield (
            "parallel.prefetch, which its ZeRO knows otherwise: leave it out, and set stage3_prefetch_bucket_size in "
            "deepspeed.json_file"
        )
    if parallel.dp_replicate > 1:
        yield (
            f"parallel.dp_replicate = {parallel.dp_replicate}: its ZeRO shards over all data ranks: set "
            "parallel.dp_replicate = 1"
        )
    if train.precision == "fp64":
        yield "train.precision = 'fp64': it keeps weights in float32: set 'fp32'"
    if train.precision.startswith("fp8"):
        yield f"train.precision = {train.precision!r}, which is shown for our own engine alone: set 'bf16'"
    if problem := precision_problem(parallel, train.precision):
        yield problem
    if train.compile not in (False, "auto"):
        yield "train.compile = true: its hooks stand between compiled blocks: set train.compile = false"
    if isinstance(config.optimizer, WHOLE_TENSORS):
        yield (
            f"optimizer.name = {config.optimizer.name!r}, which looks at whole tensors, while its ZeRO cuts flattened "
            "ones: set optimizer.name = 'adamw', 'lion' or 'schedule_free_adamw'"
        )
    if getattr(config.optimizer, "moments", "full") != "full":
        yield (
            "optimizer.moments = 'bf16', which are rounded by where an element is in its tensor, while its ZeRO "
            "flattens tensors: set optimizer.moments = 'full'"
        )
    if offload.offload_optimizer != "none" and parallel.zero == 0:
        yield "deepspeed.offload_optimizer and parallel.zero = 0: set parallel.zero = 1, 2 or 3"
    if offload.offload_optimizer == "nvme":
        yield (
            "deepspeed.offload_optimizer = 'nvme', which leaves no weights in memory between steps for checkpoints and "
            "comparisons to read: set deepspeed.offload_optimizer = 'cpu'"
        )
    if offload.offload_parameters != "none" and parallel.zero != 3:
        yield f"deepspeed.offload_parameters and parallel.zero = {parallel.zero}: set parallel.zero = 3"
    if offload.hpz > 1 and (problem := _hpz_problem(parallel, offload)):
        yield f"deepspeed.hpz = {offload.hpz} and {problem}"


def _hpz_problem(parallel: ParallelConfig, offload: DeepSpeedConfig) -> str:
    if parallel.zero != 3:
        return f"parallel.zero = {parallel.zero}, which keeps whole weights anyway: set parallel.zero = 3"
    for axis in ("tp", "pp", "ep"):
        if (size := getattr(parallel, axis)) > 1:
            return f"parallel.{axis} = {size}, for it takes all ranks for data ranks: set parallel.{axis} = 1"
    if offload.offload_parameters != "none":
        return (
            f"deepspeed.offload_parameters = {offload.offload_parameters!r}, which would keep the copy on the host, "
            "too: leave one of them out"
        )
    return ""


def precision_problem(parallel: ParallelConfig, precision: str) -> str:
    """Why a stage can't be had in a precision, and what can; empty where it can."""
    if parallel.zero or precision not in ("bf16", "fp16"):
        return ""
    return f"train.precision = {precision!r} and parallel.zero = 0, which adds gradients in that: set parallel.zero = 1"


def derive(config: "Config", precision: str) -> Json:
    """The JSON for DeepSpeed. Raises ValueError where the user's own disagrees with our config, key by key."""
    derived = _ours(config, precision)
    if config.deepspeed.json_file is None:
        return derived
    path = Path(config.deepspeed.json_file)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed.json_file = {str(path)!r} can't be read: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"deepspeed.json_file = {str(path)!r} holds no table")
    return merge(derived, given, decided(config, precision))


def _ours(config: "Config", precision: str) -> Json:
    parallel, offload = config.parallel, config.deepspeed
    zero: Json = {"stage": parallel.zero}
    if parallel.zero == 3:
        # Small parameters that stay gathered would be a second kind of weights to keep up to date.
        zero["stage3_param_persistence_threshold"] = 0
        # It would put a function in the place of torch's `linear` for all that the process does afterwards, which adds
        # biases in place: to outputs that selective recomputation has kept, twice.
        zero["memory_efficient_linear"] = False
        if offload.hpz > 1:
            zero["zero_hpz_partition_size"] = offload.hpz
    elif parallel.zero and offload.offload_optimizer == "none" and (parallel.zero, precision) != (1, "bf16"):
        zero["compute_grad_norm"] = False  # ours is computed before it is known whether the step is taken
    for key, place in (
        ("offload_optimizer", offload.offload_optimizer),
        ("offload_param", offload.offload_parameters),
    ):
        if place != "none":
            zero[key] = {"device": place} | ({"nvme_path": offload.nvme_path} if place == "nvme" else {})
    derived: Json = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": 1,  # the loop counts micro-batches: a step may have fewer than another
        "gradient_clipping": 0.0,  # the engine clips, by a norm in float64 that it has already
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
        derived["bf16"]["immediate_grad_update"] = (
            True  # after each of the passes that pipelines take in turn
        )
    if precision == "fp16":
        derived["fp16"]["loss_scale"] = 1.0  # the engine scales, so that the scale is in every checkpoint
    return derived


def decided(config: "Config", precision: str) -> dict[str, tuple[str, Any]]:
    """DeepSpeed's keys that ours decide: → ours, and the value that a JSON must have there if it has the key."""
    parallel, train, optimizer, offload = config.parallel, config.train, config.optimizer, config.deepspeed
    known = precision != "auto"
    overlap = {"zero_optimization.overlap_comm": ("parallel.pp", False)} if parallel.pp > 1 else {}
    return overlap | {
        "train_batch_size": ("train.global_batch", train.global_batch),
        "train_micro_batch_size_per_gpu": ("train.micro_batch", train.micro_batch),
        "gradient_accumulation_steps": ("train.global_batch and train.micro_batch", None),
        "gradient_clipping": ("optimizer.clip", optimizer.clip),
        "zero_optimization.stage": ("parallel.zero", parallel.zero),
        "zero_optimization.offload_optimizer.device": (
            "deepspeed.offload_optimizer",
            offload.offload_optimizer,
        ),
        "zero_optimization.offload_optimizer.nvme_path": ("deepspeed.nvme_path", offload.nvme_path),
        "zero_optimization.offload_param.device": (
            "deepspeed.offload_parameters",
            offload.offload_parameters,
        ),
        "zero_optimization.offload_param.nvme_path": ("deepspeed.nvme_path", offload.nvme_path),
        "zero_optimization.zero_hpz_partition_size": ("deepspeed.hpz", offload.hpz),
        "zero_optimization.cpu_offload": ("deepspeed.offload_optimizer", offload.offload_optimizer == "cpu"),
        "bf16.enabled": ("train.precision", precision == "bf16" if known else None),
        "fp16.enabled": ("train.precision", precision == "fp16" if known else None),
        "optimizer.type": ("optimizer.name", _their_name(optimizer.name)),
        "optimizer.params.lr": ("optimizer.lr", optimizer.lr),
        "optimizer.params.betas": ("optimizer.betas", list(getattr(optimizer, "betas", ()))),
        "optimizer.params.eps": ("optimizer.eps", getattr(optimizer, "eps", None)),
        "optimizer.params.weight_decay": ("optimizer.weight_decay", optimizer.weight_decay),
    }


def _their_name(name: str) -> str:
    return {"adamw": "AdamW", "lion": "Lion"}.get(name, name)


FREE = {
    "aio": "how NVMe is read and written",
    "comms_logger": "what is sent",
    "dump_state": "what is printed",
    "flops_profiler": "what is measured",
    "memory_breakdown": "what is printed",
    "wall_clock_breakdown": "what is printed",
    "zero_optimization": "buckets, prefetching and pinned memory, but for what FIXED holds",
}
"""DeepSpeed's keys that a JSON may set as it likes: they tune, and change no result."""

TUNES = {
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
"""Keys of zero_optimization of which the same is true."""

REFUSED = {
    "activation_checkpointing": "set train.recompute",
    "amp": "set train.precision",
    "autotuning": "the layout is the config's",
    "compression_training": "megatfm has none",
    "curriculum_learning": "set data.warmup",
    "data_efficiency": "set data.warmup and data.train",
    "elasticity": "set resilience.elastic",
    "hybrid_engine": "megatfm only pretrains",
    "monitor_config": "set log.sinks",
    "scheduler": "set [schedule]",
    "tensorboard": "set log.sinks",
    "tensor_parallel": "set parallel.tp",
    "wandb": "set log.sinks",
    "zero_optimization.zenflow": (
        "its updates come late, and Adam's state stays in a process of its own, where no checkpoint reaches it"
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        "Adam's state stays in a process of its own, where no checkpoint reaches it"
    ),
    "zero_optimization.offload_optimizer.ratio": "a second optimizer would move what isn't offloaded",
    "zero_optimization.zero_quantized_weights": "it is inexact, and its operator is compiled for CUDA alone",
    "zero_optimization.zero_quantized_gradients": "it is inexact, and its operator is compiled for CUDA alone",
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "it is inexact, and its operator is compiled for CUDA alone"
    ),
    "zero_optimization.mics_shard_size": "it wants the model built inside of it: deepspeed.hpz keeps copies near, too",
    "compile.deepcompile": "its operator is compiled for CUDA alone, and its reductions replace those that are proven",
}
"""Keys that are not carried, and why, or what to set instead."""


def merge(derived: Json, given: Json, fixed: Mapping[str, tuple[str, Any]]) -> Json:
    """Take what a JSON tunes into ours. Raises ValueError that names every key that can't be, and why."""
    merged: Json = json.loads(json.dumps(derived))
    wrong = []
    for key, value in _leaves(given):
        if key in fixed:
            ours, wanted = fixed[key]
            if value not in ("auto", wanted) and wanted is not None:
                wrong.append(f"{key} = {json.dumps(value)}, but {ours} = {json.dumps(wanted)}")
            continue
        reason = next(
            (why for known, why in REFUSED.items() if key == known or key.startswith(f"{known}.")), None
        )
        first, _, rest = key.partition(".")
        tunes = first in FREE and (first != "zero_optimization" or rest in TUNES)
        if reason or not tunes:
            wrong.append(f"{key}: {reason or 'not carried'}")
        elif value != "auto":
            _set(merged, key, value)
    if wrong:
        raise ValueError(
            f"deepspeed.json_file: {'; '.join(wrong)}: leave these out of the file, or change our keys"
        )
    return merged


def _leaves(table: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(table: Json, key: str, value: Any) -> None:
    *outer, last = key.split(".")
    for name in outer:
        table = table.setdefault(name, {})
    table[last] = value
