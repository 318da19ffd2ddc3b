"""Access to the DeepSpeed package, imported on first use without compiling anything; and its settings."""

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatfm.config import Config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.engines.deepspeed.internals import ignore_warnings, install_aio_handle, reset_globals
from megatfm.engines.deepspeed.nvme_offload import OffloadDirectory, SyncIOHandle, add_buffers
from megatfm.engines.interface import EngineSetup, OptimizerGroup
from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, EXPERT, EXPERT_DATA_AXES, PIPELINE, TENSOR, Mesh
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.parallel.process_environment import read_process_environment


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed and set it up for a device, after torch's process groups. Raises UsageError if it is missing."""
    # Before the import, which would otherwise compile an operator to find the accelerator.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if "LOCAL_RANK" not in os.environ:
        environment = read_process_environment(os.environ)
        os.environ["LOCAL_RANK"] = str(environment.local_rank if device.index is None else device.index)
    with ignore_warnings():
        try:
            package = importlib.import_module("deepspeed")
        except ImportError as error:
            raise UsageError(
                f"parallel.engine = 'deepspeed': DeepSpeed can't be imported ({error}): `make deepspeed` installs it "
                "beside this torch; or set parallel.engine = 'native'"
            ) from error
        reset_globals()
        backend = "nccl" if device.type == "cuda" else "gloo"
        package.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return package


def make_mpu(mesh: Mesh) -> SimpleNamespace:
    """Return our process groups by the interface of Megatron-LM's `mpu`, which DeepSpeed calls.

    Context-parallel ranks are data ranks to DeepSpeed: gradients are summed, and ZeRO shards, over them too.
    """
    data, model = mesh.flat_group(DENSE_DATA_AXES.all), mesh.flat_group((PIPELINE, TENSOR))
    return SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=lambda: torch.distributed.get_rank(data),
        get_data_parallel_world_size=lambda: torch.distributed.get_world_size(data),
        get_model_parallel_group=lambda: model,
        get_model_parallel_rank=lambda: torch.distributed.get_rank(model),
        get_model_parallel_world_size=lambda: torch.distributed.get_world_size(model),
    )


def split_param_groups(
    group: OptimizerGroup, trained: Mapping[str, nn.Parameter], layout: ModelLayout, pipeline: Pipeline | None
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return names and torch's parameter group of parameters that share options.

    DeepSpeed partitions the concatenated parameters of a group, so a parameter's neighbours shift its partitions. If
    these must be equal on several ranks, parameters form groups of their own: those that tensor parallelism replicates,
    as it may shard others unevenly, and those that the same pipeline ranks share. So do experts, whose gradients are
    summed over other ranks. Raises UsageError, on all ranks, if one has no weight to train.
    """
    _refuse_frozen_ranks(pipeline)
    names, options = [], []
    for group_names, group_options in group.make_param_groups(trained):
        names_by_kind: dict[tuple[bool, bool, tuple[int, ...]], list[str]] = {}
        for name in group_names:
            holders = pipeline.parameter_ranks[name] if pipeline else ()
            is_expert = layout[name].data_axes == EXPERT_DATA_AXES
            kind = is_expert, bool(layout[name].shards), holders if len(holders) > 1 else ()
            names_by_kind.setdefault(kind, []).append(name)
        for (is_expert, _, _), kind_names in sorted(names_by_kind.items()):
            expert_options = {"moe": True, "name": EXPERT} if is_expert else {}
            parameters = [trained[name] for name in kind_names]
            names.append(kind_names)
            options.append({**group_options, **expert_options, "params": parameters})
    return names, options


def _refuse_frozen_ranks(pipeline: Pipeline | None) -> None:
    if pipeline is None:
        return
    for rank in range(pipeline.ranks):
        local_names = {name for name, holders in pipeline.parameter_ranks.items() if rank in holders}
        if local_names <= pipeline.frozen:
            raise UsageError(
                f"parallel.engine = 'deepspeed': train.freeze leaves pipeline rank {rank} no weight to train, and "
                "DeepSpeed makes no optimizer of none: set a smaller parallel.pp, or parallel.engine = 'native'"
            )


def require_single_group(optimizers: Sequence[OptimizerGroup]) -> OptimizerGroup:
    """Return the only optimizer group. Raises UsageError for several, or for one that needs whole tensors."""
    (group, *more_optimizers) = optimizers
    if more_optimizers or group.granularity != "elementwise":
        raise UsageError(
            "parallel.engine = 'deepspeed': its ZeRO shards flattened tensors, but this optimizer needs whole ones: "
            "set optimizer.name = 'adamw', 'lion' or 'schedule_free_adamw', or parallel.engine = 'native'"
        )
    return group


def make_ds_config(
    config: Config, setup: EngineSetup, package: ModuleType
) -> tuple[dict[str, Any], OffloadDirectory | None]:
    """Return DeepSpeed's configuration of a run, and a new directory for offloaded state; None if it needs none.

    Raises UsageError for features that this machine or the number of ranks doesn't support.
    """
    options, folder = config.deepspeed, None
    if (ranks := setup.mesh.gradient_ranks) % options.zero_hpz_partition_size:
        raise UsageError(
            f"deepspeed.zero_hpz_partition_size = {options.zero_hpz_partition_size} doesn't divide the {ranks} ranks "
            "of parallel.dp_shard and parallel.cp: set a number that does"
        )
    if options.nvme_path and options.offloads_to_nvme:
        install_aio_handle(package, SyncIOHandle)
        folder = OffloadDirectory(Path(options.nvme_path))
    derived = make_deepspeed_json(config, setup.precision, folder.path if folder else None)
    add_buffers(derived, setup)
    return derived, folder
