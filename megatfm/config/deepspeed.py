"""The `[deepspeed]` section, and the settings that DeepSpeed doesn't support. `deepspeed_json.py` derives its JSON."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from megatfm.config.optimizer import AdafactorConfig, LambConfig, MuonConfig, OptimizerSection, SoapConfig
from megatfm.config.parallel import ParallelConfig
from megatfm.config.section import PathStr, Section
from megatfm.config.training import TrainConfig

OffloadDevice = Literal["none", "cpu", "nvme"]


class DeepSpeedConfig(Section):
    """Settings of parallel.engine = "deepspeed"."""

    offload_optimizer: OffloadDevice = "none"
    """Place of the optimizer's state and master weights, with zero = 1, 2 or 3; "none": on the device."""
    offload_parameters: OffloadDevice = "none"
    """Place of weights that are not in use, with zero = 3; "none": on the device."""
    nvme_path: PathStr | None = None
    """Folder on a local disk for state offloaded to "nvme"."""
    zero_hpz_partition_size: int = Field(default=1, ge=1)
    """Number of neighbouring ranks, usually those of a node, that share a second copy of the weights in the compute
    precision, from which backward passes gather, with zero = 3 (DeepSpeed's zero_hpz_partition_size)."""
    json_file: PathStr | None = None
    """A DeepSpeed config that you wrote, whose tuning keys are used; keys that repeat ours must agree with them."""

    @property
    def offloads_to_nvme(self) -> bool:
        """Whether anything is offloaded to files."""
        return "nvme" in (self.offload_optimizer, self.offload_parameters)

    @model_validator(mode="after")
    def _check_nvme_folder(self) -> Self:
        if self.offloads_to_nvme and self.nvme_path is None:
            raise ValueError("offloading to 'nvme' needs nvme_path, a folder on a local disk")
        return self


NVME_UNSHARDED_ERROR = (
    "deepspeed.offload_parameters = 'nvme' and weights that one data rank holds whole, which DeepSpeed doesn't gather: "
    "it computes with their buffer, and gives that away before the backward pass"
)
NVME_UNSHARDED_HINT = "set parallel.dp_shard = 2 or more, parallel.ep to less than that, or offload_parameters = 'cpu'"
WHOLE_TENSOR_OPTIMIZERS = (MuonConfig, SoapConfig, AdafactorConfig, LambConfig)


def check_compatibility(
    parallel: ParallelConfig, train: TrainConfig, optimizer: OptimizerSection, deepspeed: DeepSpeedConfig
) -> None:
    """Raise ValueError for settings that DeepSpeed doesn't support, or for an unused `deepspeed` section.

    `deepspeed.json_file` is not read here: a config may be loaded where that file is missing.
    """
    if parallel.engine != "deepspeed":
        defaults = DeepSpeedConfig()
        for key in type(deepspeed).model_fields:
            if getattr(deepspeed, key) != getattr(defaults, key):
                raise ValueError(
                    f"deepspeed.{key} is set, but parallel.engine = {parallel.engine!r}: leave it out, or set "
                    "parallel.engine = 'deepspeed'"
                )
        return
    for problem in _iter_problems(parallel, train, optimizer, deepspeed):
        raise ValueError(f"parallel.engine = 'deepspeed' with {problem}, or parallel.engine = 'native'")


def _iter_problems(
    parallel: ParallelConfig, train: TrainConfig, optimizer: OptimizerSection, offload: DeepSpeedConfig
) -> Iterator[str]:
    """Yield each unsupported setting, and what to set instead."""
    yield from _iter_parallel_problems(parallel)
    yield from _iter_train_problems(parallel, train)
    yield from _iter_optimizer_problems(parallel, optimizer)
    yield from _iter_offload_problems(parallel, offload)


def _iter_parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.pp > 1 and parallel.zero > 1:
        yield (
            f"parallel.pp = {parallel.pp} and parallel.zero = {parallel.zero}, which reduces gradients in each of the "
            "passes that pipelines take in turn: set parallel.zero = 1, or parallel.pp = 1"
        )
    if parallel.reduce_dtype != "param":
        yield "parallel.reduce_dtype = 'bf16', while its ZeRO reduces in float32: set parallel.reduce_dtype = 'param'"
    if parallel.comm_buffers != "torch":
        yield (
            "parallel.comm_buffers = 'process_group', which is for FSDP2's buffers: set parallel.comm_buffers = 'torch'"
        )
    if parallel.async_tp:
        yield "parallel.async_tp, which takes compiled blocks apart: set parallel.async_tp = false"
    if parallel.fsdp_prefetch is not None:
        yield (
            "parallel.fsdp_prefetch, which is for FSDP2: leave it out, and set "
            "stage3_prefetch_bucket_size in deepspeed.json_file"
        )
    if parallel.dp_replicate > 1:
        yield (
            f"parallel.dp_replicate = {parallel.dp_replicate}: its ZeRO shards over all data ranks: set "
            "parallel.dp_replicate = 1"
        )


def _iter_train_problems(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    if train.precision == "fp64":
        yield "train.precision = 'fp64': it keeps weights in float32: set 'fp32'"
    if train.precision.startswith("fp8"):
        yield f"train.precision = {train.precision!r}, which is shown for our own engine alone: set 'bf16'"
    if problem := find_precision_problem(parallel, train.precision):
        yield problem
    if train.compile not in (False, "auto"):
        yield "train.compile = true: its hooks stand between compiled blocks: set train.compile = false"


def _iter_optimizer_problems(parallel: ParallelConfig, optimizer: OptimizerSection) -> Iterator[str]:
    if isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS):
        yield (
            f"optimizer.name = {optimizer.name!r}, which looks at whole tensors, while its ZeRO cuts flattened "
            "ones: set optimizer.name = 'adamw', 'lion' or 'schedule_free_adamw'"
        )
    if optimizer.name == "schedule_free_adamw" and parallel.zero == 3:
        yield (
            "optimizer.name = 'schedule_free_adamw' and parallel.zero = 3, which steps by groups, so that its count of "
            "steps runs ahead: set parallel.zero = 2"
        )
    if getattr(optimizer, "moments_dtype", "param") != "param":
        yield (
            "optimizer.moments_dtype = 'bf16', which are rounded by where an element is in its tensor, while its ZeRO "
            "flattens tensors: set optimizer.moments_dtype = 'param'"
        )


def _iter_offload_problems(parallel: ParallelConfig, offload: DeepSpeedConfig) -> Iterator[str]:
    if offload.offload_optimizer != "none" and parallel.zero == 0:
        yield "deepspeed.offload_optimizer and parallel.zero = 0: set parallel.zero = 1, 2 or 3"
    if offload.offload_optimizer == "nvme" and parallel.zero in (1, 2):
        yield (
            f"deepspeed.offload_optimizer = 'nvme' and parallel.zero = {parallel.zero}, which would keep it in memory: "
            "set parallel.zero = 3, or deepspeed.offload_optimizer = 'cpu'"
        )
    if offload.offload_parameters != "none" and parallel.zero != 3:
        yield f"deepspeed.offload_parameters and parallel.zero = {parallel.zero}: set parallel.zero = 3"
    if offload.offload_parameters == "nvme" and parallel.zero == 3 and _has_unsharded_weights(parallel):
        yield f"{NVME_UNSHARDED_ERROR}: {NVME_UNSHARDED_HINT}"
    if offload.zero_hpz_partition_size > 1 and (problem := _find_hpz_problem(parallel, offload)):
        yield f"deepspeed.zero_hpz_partition_size = {offload.zero_hpz_partition_size} and {problem}"


def _has_unsharded_weights(parallel: ParallelConfig) -> bool:
    """Return whether ZeRO leaves weights or experts unsharded on a rank; False for dp_shard = −1, not known yet."""
    n_data_ranks = parallel.dp_shard * parallel.cp
    n_expert_ranks = n_data_ranks * (parallel.tp if parallel.expert_tp == "folded" else 1)
    return parallel.dp_shard != -1 and (n_data_ranks == 1 or parallel.ep == n_expert_ranks)


def _find_hpz_problem(parallel: ParallelConfig, offload: DeepSpeedConfig) -> str:
    if parallel.zero != 3:
        return f"parallel.zero = {parallel.zero}, which keeps whole weights anyway: set parallel.zero = 3"
    for axis in ("tp", "pp", "ep"):
        if (size := getattr(parallel, axis)) > 1:
            return f"parallel.{axis} = {size}, for it treats all ranks as data ranks: set parallel.{axis} = 1"
    if offload.offload_parameters != "none":
        return (
            f"deepspeed.offload_parameters = {offload.offload_parameters!r}, which would keep the copy on the host, "
            "too: leave one of them out"
        )
    return ""


def find_precision_problem(parallel: ParallelConfig, precision: str) -> str:
    """Return why a ZeRO stage doesn't support a precision, and which stage does; "" if it does."""
    if parallel.zero or precision not in ("bf16", "fp16"):
        return ""
    return f"train.precision = {precision!r} and parallel.zero = 0, which adds gradients in that: set parallel.zero = 1"
