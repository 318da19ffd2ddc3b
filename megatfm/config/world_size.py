"""Mesh axes, shares of the batch and elastic layouts for a number of processes."""

from collections.abc import Mapping
from math import gcd, prod

from megatfm.config.parallel import ParallelConfig
from megatfm.config.root import Config, list_global_batches
from megatfm.config.section import find_nearest_divisor, list_divisors
from megatfm.errors import UsageError


def check_world_size(config: Config, world_size: int) -> None:
    """Raise UsageError unless a run can train on this number of processes, an elastic one with another layout."""
    if config.resilience.elastic:
        config, _ = fit_layout(config, world_size)
    sizes = compute_axis_sizes(config.parallel, world_size)
    check_global_batches(config, sizes["dp_replicate"] * sizes["dp_shard"])


def compute_axis_sizes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Compute axis → size, the slowest axis first (dp_shard = −1: the remaining ranks).

    Raises UsageError if the product is not the world size.
    """
    fixed = config.pp * config.dp_replicate * config.cp * config.tp
    shard = world_size // fixed if config.dp_shard == -1 else config.dp_shard
    sizes = {axis: getattr(config, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    requested_sizes = {axis: size for axis, size in sizes.items() if size != -1}
    sizes["dp_shard"] = shard
    if fixed * shard != world_size:
        nearest = fixed * (shard if config.dp_shard != -1 else max(1, round(world_size / fixed)))
        raise UsageError(
            f"the layout {describe_sizes(requested_sizes)} does not fit {world_size} process"
            f"{'es' * (world_size > 1)}: start {nearest}, or change parallel.tp, parallel.cp, parallel.pp, "
            "parallel.dp_replicate or parallel.dp_shard"
        )
    expert_axes = ("dp_shard", "cp", "tp") if config.expert_tp == "folded" else ("dp_shard", "cp")
    n_ranks = prod(sizes[axis] for axis in expert_axes)
    if n_ranks % config.ep:
        axes = [f"parallel.{axis}" for axis in expert_axes if axis == "dp_shard" or sizes[axis] > 1]
        raise UsageError(
            f"parallel.ep = {config.ep} does not divide the {n_ranks} ranks of {' × '.join(axes)}, over which experts "
            f"lie: the nearest that does is {find_nearest_divisor(n_ranks, config.ep)}"
        )
    return sizes


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Format axis sizes as text, such as "dp_shard 4 × tp 2"; pp and cp only if larger than 1."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if axis not in ("pp", "cp") or size > 1)


def check_global_batches(config: Config, data_ranks: int) -> None:
    """Raise UsageError unless all global batches of the run are multiples of micro-batch × data ranks."""
    for batch, key in list_global_batches(config).items():
        check_global_batch(batch, config.train.micro_batch, data_ranks, key)


def check_global_batch(global_batch: int, micro_batch: int, data_ranks: int, key: str = "train.global_batch") -> None:
    """Raise a UsageError unless the global batch, which `key` sets, is a multiple of micro-batch × data ranks."""
    unit = micro_batch * data_ranks
    if global_batch < 1 or global_batch % unit:
        rows, remainder = divmod(global_batch, data_ranks)
        fits = rows > 0 and not remainder
        smaller = f", or choose train.micro_batch = {_shrink_micro_batch(rows, micro_batch)}" if fits else ""
        raise UsageError(
            f"{key} = {global_batch} is not a multiple of train.micro_batch = {micro_batch} × {data_ranks} data ranks: "
            f"the nearest that is one is {round_to_multiple(global_batch, unit)}{smaller}"
        )


def round_to_multiple(batch: int, unit: int) -> int:
    """Return the positive multiple of `unit` that is nearest to `batch`."""
    return max(1, (batch + unit // 2) // unit) * unit


def fit_layout(config: Config, world_size: int) -> tuple[Config, str | None]:
    """Return the config if its layout fits the number of processes; else the nearest one that fits, and its changes.

    Global batches (also those of `data.rampup`) and the axes that split the model (tp, pp, cp) stay as they are. The
    data axes take the remaining ranks; micro-batch and `ep` shrink if needed. None of this changes the result. Raises
    UsageError if nothing fits; it names numbers of processes that would.
    """
    parallel = config.parallel
    try:
        sizes = compute_axis_sizes(parallel, world_size)
    except UsageError:
        sizes = None
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    data_ranks, batches = world_size // model_ranks, list_global_batches(config)
    common = gcd(*batches)
    if sizes is not None and common % (config.train.micro_batch * data_ranks) == 0:
        return config, None
    if world_size % model_ranks or common % data_ranks:
        batch_settings = ", ".join(f"{key} = {batch}" for batch, key in batches.items())
        raise UsageError(
            f"no layout fits {world_size} process{'es' * (world_size > 1)}: {batch_settings} and "
            f"{model_ranks} ranks per model allow {_list_world_sizes(model_ranks, common)} processes"
        )
    micro_batch = _shrink_micro_batch(common // data_ranks, config.train.micro_batch)
    replicas = gcd(data_ranks, parallel.dp_replicate)
    changes = {
        "dp_replicate": replicas,
        "dp_shard": parallel.dp_shard if sizes is not None else -1,
        "ep": gcd(parallel.ep, data_ranks // replicas * (parallel.expert_mesh_size // parallel.dp_shard)),
    }
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    fitted = config.model_copy(update={"parallel": parallel.model_copy(update=changes), "train": train})
    return fitted, ", ".join(list_layout_changes(config, fitted))


def list_layout_changes(requested: Config, fitted: Config) -> list[str]:
    """Return the differences between the requested and the fitted layout, as `parallel.ep 4 → 2`."""
    values = [
        (f"{section}.{key}", value, getattr(getattr(fitted, section), key))
        for section in ("parallel", "train")
        for key, value in getattr(requested, section)
    ]
    return [f"{key} {old} → {new}" for key, old, new in values if old != new]


def _list_world_sizes(model_ranks: int, batch: int) -> str:
    """Return, as text, the numbers of processes on which each replica of the model has an equal share of the rows."""
    fitting = [str(model_ranks * n) for n in list_divisors(batch)]
    return ", ".join(fitting[-8:]) if len(fitting) <= 8 else f"{', '.join(fitting[:4])}, … {fitting[-1]}"


def _shrink_micro_batch(rows_per_rank: int, micro_batch: int) -> int:
    """Return the largest micro-batch, at most the present one, of which a rank's rows are a multiple."""
    return max(size for size in list_divisors(rows_per_rank) if size <= micro_batch)
