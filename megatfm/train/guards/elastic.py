"""The layout that fits the processes that are there, for a run that goes on with fewer (or more)."""

import logging
from math import gcd

from megatfm.config import Config
from megatfm.config.base import divisors
from megatfm.config.batches import global_batches
from megatfm.errors import UsageError
from megatfm.parallel.mesh import axis_sizes

log = logging.getLogger("megatfm")


def elastic_config(config: Config, world_size: int) -> Config:
    """The config, with another layout where `resilience.elastic` allows it and this many processes need it."""
    if not config.resilience.elastic:
        return config
    config, said = fit_layout(config, world_size)
    if said:
        log.warning("%d processes: %s", world_size, said)
    return config


def fit_layout(config: Config, world_size: int) -> tuple[Config, str | None]:
    """The config itself where it fits, else the nearest that does, and what was changed.

    Kept: the global batches, those of the warm-up too, and the axes that cut the model (tp, pp, cp). The data axes
    take what is left, and the micro-batch and `ep` become smaller where they must: none of it changes what is computed.
    Raises UsageError where nothing fits, naming numbers of processes that would.
    """
    try:
        sizes = axis_sizes(config.parallel, world_size)
    except UsageError:
        sizes = None
    data_ranks, batches = world_size // model_parallel_size(config), global_batches(config)
    common = gcd(*batches)
    if sizes is not None and common % (config.train.micro_batch * data_ranks) == 0:
        return config, None
    if world_size % model_parallel_size(config) or common % data_ranks:
        asked = ", ".join(f"{key} = {batch}" for batch, key in batches.items())
        raise UsageError(
            f"no layout fits {world_size} process{'es' * (world_size > 1)}: {asked} and "
            f"{model_parallel_size(config)} ranks a "
            f"model go with {_valid_world_sizes(config, common)} processes"
        )
    share = common // data_ranks
    micro_batch = max(m for m in divisors(share) if m <= config.train.micro_batch)
    replicas = max(
        r
        for r in range(1, config.parallel.dp_replicate + 1)
        if data_ranks % r == config.parallel.dp_replicate % r == 0
    )
    changes = {
        "dp_replicate": replicas,
        "dp_shard": config.parallel.dp_shard if sizes is not None else -1,
        "ep": gcd(config.parallel.ep, data_ranks // replicas * expert_fold_size(config)),
    }
    parallel = config.parallel.model_copy(update=changes)
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    fitted = config.model_copy(update={"parallel": parallel, "train": train})
    return fitted, ", ".join(layout_changes(config, fitted))


def layout_changes(given: Config, fitted: Config) -> list[str]:
    """What of a layout was changed to fit the processes that are there."""
    pairs = [
        (f"{section}.{key}", was, getattr(getattr(fitted, section), key))
        for section in ("parallel", "train")
        for key, was in getattr(given, section)
    ]
    return [f"{key} {was} → {now}" for key, was, now in pairs if was != now]


def model_parallel_size(config: Config) -> int:
    """Ranks over which one copy of the model's work is cut."""
    return config.parallel.tp * config.parallel.pp * config.parallel.cp


def expert_fold_size(config: Config) -> int:
    """Ranks besides dp_shard's that `ep` divides."""
    return abs(config.parallel.expert_mesh_size // config.parallel.dp_shard)


def _valid_world_sizes(config: Config, batch: int) -> str:
    ranks = model_parallel_size(config)
    fitting = [str(ranks * n) for n in divisors(batch)]
    return ", ".join(fitting[-8:]) if len(fitting) <= 8 else f"{', '.join(fitting[:4])}, … {fitting[-1]}"
