"""On how many nodes a run can train: what the layout and the batch ask for, seen without torch."""

import math
from collections.abc import Iterable

from megatfm.config import Config
from megatfm.config.base import divisors
from megatfm.config.batches import global_batches

AXES = ("dp_replicate", "tp", "pp", "cp")
"""Fixed axes; dp_shard takes the ranks that are left, or is fixed too."""


def layout_error(config: Config, processes: int) -> str | None:
    """Why a run can't train on so many processes; None if it can."""
    parallel, train = config.parallel, config.train
    if config.resilience.elastic:  # the run itself takes another layout and micro-batch where it must
        model_ranks = parallel.tp * parallel.pp * parallel.cp
        for batch, key in global_batches(config).items():
            if processes % model_ranks or batch % (processes // model_ranks):
                return f"{key} = {batch} and {model_ranks} ranks a model do not divide {processes} processes"
        return None
    sizes = {axis: int(getattr(parallel, axis)) for axis in AXES}
    fixed = math.prod(sizes.values())
    shard = processes // fixed if parallel.dp_shard == -1 else parallel.dp_shard
    if fixed * shard != processes:
        named = {**sizes, **({} if parallel.dp_shard == -1 else {"dp_shard": shard})}
        layout = " × ".join(f"{axis} {size}" for axis, size in named.items() if size > 1)
        return f"the layout {layout} does not divide {processes} processes"
    within = shard * (parallel.expert_mesh_size // parallel.dp_shard)  # of both, the sign is dp_shard's
    if within % parallel.ep:
        return f"parallel.ep = {parallel.ep} does not divide the {within} ranks over which experts lie"
    data_ranks = sizes["dp_replicate"] * shard
    batches = global_batches(config)
    for batch, key in batches.items():
        if batch % (train.micro_batch * data_ranks):
            return (
                f"{key} = {batch} is not a multiple of train.micro_batch = {train.micro_batch} on "
                f"{data_ranks} data ranks{_suggest_micro_batch(math.gcd(*batches), train.micro_batch, data_ranks)}"
            )
    return None


def _suggest_micro_batch(batch: int, micro_batch: int, data_ranks: int) -> str:
    """A micro-batch that would do."""
    if batch % data_ranks:
        return ""
    each = batch // data_ranks
    fits = max(n for n in divisors(each) if n <= micro_batch)
    return f" (train.micro_batch = {fits} would)"


def max_fitting_nodes(config: Config, counts: Iterable[int], processes_per_node: int) -> int | None:
    """The largest of these numbers of nodes on which the run fits; None if it fits on none."""
    return max((n for n in counts if layout_error(config, n * processes_per_node) is None), default=None)
