"""The groups of parameters that DeepSpeed flattens together."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatfm.engines.interface import OptimizerGroup
from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import EXPERT, EXPERT_DATA_AXES
from megatfm.parallel.pipeline_cut import Pipeline


def parameter_groups(
    group: OptimizerGroup,
    trained: Mapping[str, nn.Parameter],
    layout: ModelLayout,
    pipeline: Pipeline | None,
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Names and torch's group of the parameters that share options.

    Those whose parts must be the same on several ranks are by themselves, for parameters beside them shift these parts:
    those that tensor parallelism leaves whole, as it may cut others unevenly; and those that the same pipeline ranks
    share. So are experts, whose gradients are summed over other ranks. Raises UsageError, on all ranks, where one has
    no weight to train.
    """
    _refuse_frozen_ranks(pipeline)
    names, options = [], []
    for group_names, made in group.parameter_groups(trained):
        alike: dict[tuple[bool, bool, tuple[int, ...]], list[str]] = {}
        for name in group_names:
            placement, holders = layout[name], pipeline.parameter_ranks[name] if pipeline else ()
            shared = holders if len(holders) > 1 else ()
            alike.setdefault(
                (placement.data_axes == EXPERT_DATA_AXES, bool(placement.shards), shared), []
            ).append(name)
        for (experts, _, _), own in sorted(alike.items()):
            statistics = {"moe": True, "name": EXPERT} if experts else {}
            names.append(own)
            options.append({**made, **statistics, "params": [trained[name] for name in own]})
    return names, options


def _refuse_frozen_ranks(pipeline: Pipeline | None) -> None:
    if pipeline is None:
        return
    for rank in range(pipeline.ranks):
        held = {name for name, holders in pipeline.parameter_ranks.items() if rank in holders}
        if held <= pipeline.frozen:
            raise UsageError(
                f"parallel.engine = 'deepspeed': train.freeze leaves pipeline rank {rank} no weight to train, and "
                "DeepSpeed makes no optimizer of none: set a smaller parallel.pp, or parallel.engine = 'native'"
            )


def require_single_group(optimizers: Sequence[OptimizerGroup]) -> OptimizerGroup:
    """The one optimizer that there is. Raises UsageError for several, or one that DeepSpeed's flat parts don't suit."""
    (group, *others) = optimizers
    if others or group.granularity != "elementwise":
        raise UsageError(
            "parallel.engine = 'deepspeed' with an optimizer that looks at whole tensors, while its ZeRO cuts "
            "flattened ones: set optimizer.name = 'adamw', 'lion' or 'schedule_free_adamw', or parallel.engine = "
            "'native'"
        )
    return group
