"""Checks of a job before it waits in a queue: layout and batch against processes, paths, time limits. No torch."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatfm.config import Config
from megatfm.config.deepspeed_json import derive
from megatfm.config.prep import PrepConfig
from megatfm.config.root import global_batches
from megatfm.config.section import divisors
from megatfm.errors import UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.job import Job
from megatfm.launchers.record import finished, latest_checkpoint_step
from megatfm.launchers.slurm import FROM_SHELL, Site

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
        all_sizes = {**sizes, **({} if parallel.dp_shard == -1 else {"dp_shard": shard})}
        layout = " × ".join(f"{axis} {size}" for axis, size in all_sizes.items() if size > 1)
        return f"the layout {layout} does not divide {processes} processes"
    expert_sizes = shard * (parallel.expert_mesh_size // parallel.dp_shard)  # -1 over -1 where dp_shard is -1
    if expert_sizes % parallel.ep:
        return f"parallel.ep = {parallel.ep} does not divide the {expert_sizes} ranks over which experts lie"
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
    rows = batch // data_ranks
    largest_fitting = max(n for n in divisors(rows) if n <= micro_batch)
    return f" (train.micro_batch = {largest_fitting} would)"


def max_fitting_nodes(config: Config, counts: Iterable[int], processes_per_node: int) -> int | None:
    """The largest of these numbers of nodes on which the run fits; None if it fits on none."""
    return max((n for n in counts if layout_error(config, n * processes_per_node) is None), default=None)


# --- errors and warnings of a launch ---------------------------------------------------------------------------------

START_SECONDS = 120
"""Seconds that a start takes, and by which SLURM may signal too early (a minute)."""


def launch_errors(job: Job, site: Site | None, partition: scheduler.Partition | None = None) -> Iterator[str]:
    """Why a job must not be started, a line each. site: of a SLURM job; partition: what SLURM says of its own."""
    if job.kind == "train" and (problem := _misfit(job, site is not None)):
        yield problem
    if site and job.kind == "train" and (problem := _finished(job)):
        yield problem
    if site is None or not site.container:
        yield from missing_paths(job)
        yield from _json_problem(job)
    if site:
        yield from _time_limit_errors(job, site, partition)


def _finished(job: Job) -> str | None:
    """Error for a run that has done all of its steps already."""
    assert isinstance(job.config, Config)
    run, steps = job.run_dir, job.config.train.steps
    if latest_checkpoint_step(run) < steps or not finished(run, steps):
        return None
    return (
        f"{run}: the run is finished: all of its {steps} steps are done: give the new one another name, as name="
        f"{job.config.name}-2, or go on with more train.steps (and resume.allow=schedule)"
    )


def launch_warnings(job: Job, site: Site, partition: scheduler.Partition | None) -> Iterator[str]:
    """Warnings of a SLURM job that its user may heed, a line each."""
    if site.container:
        for problem in missing_paths(job):
            yield f"{problem}; let it be in the container"
    if left_out := sorted(set(scheduler.overruling()) - set(FROM_SHELL.values())):
        yield f"{', '.join(left_out)}: not passed on to sbatch, so that the job is as its script says: use flags"
    if partition and partition.state != "UP":
        yield (
            f"partition {partition.name} is closed ({partition.state}): the job waits until it opens; `sinfo` shows "
            "others, for --partition"
        )
    limit, _ = _time_limit(job, partition)
    if limit is not None and job.kind != "evaluate" and 0 < limit - site.stop_seconds < START_SECONDS:
        yield (
            f"{limit - site.stop_seconds} s are left to start and to train before the job is told to save, "
            f"{site.stop_seconds} s ahead of its time limit: give more --time, or lower stop_seconds in the site file"
        )


def _time_limit_errors(job: Job, site: Site, partition: scheduler.Partition | None) -> Iterator[str]:
    """A job that SLURM would take and never start, or tell to stop as soon as it starts."""
    limit, origin = _time_limit(job, partition)
    if limit is None:
        return
    if partition and partition.max_time is not None and limit > partition.max_time:
        yield (
            f"--time {job.time_limit} is above the limit of partition {partition.name}, "
            f"{_minutes(partition.max_time)}: "
            "the job would wait for ever; give less (a run goes on in the next job), or another --partition"
        )
    if job.kind != "evaluate" and limit <= site.stop_seconds:
        yield (
            f"{origin} leaves no time to work: the job is told to save {site.stop_seconds} s ahead of its limit "
            f"(stop_seconds in the site file): give more than {_minutes(site.stop_seconds)}, or lower stop_seconds"
        )


def _time_limit(job: Job, partition: scheduler.Partition | None) -> tuple[int | None, str]:
    """The time limit of a job in seconds, if there is one, and what sets it."""
    if job.time_limit is not None:
        return scheduler.parse_time(job.time_limit), f"--time {job.time_limit}"
    if partition is None or partition.default_time is None:
        return None, ""
    usual = partition.default_time
    return usual, f"the time limit of partition {partition.name} for jobs without --time, {_minutes(usual)},"


def _minutes(seconds: int) -> str:
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _json_problem(job: Job) -> Iterator[str]:
    """Errors that DeepSpeed's engine would raise for the user's own JSON."""
    config = job.config
    if job.kind == "train" and isinstance(config, Config) and config.deepspeed.json_file:
        try:
            derive(config, config.train.precision)
        except UsageError as error:
            yield str(error)


def missing_paths(job: Job) -> Iterator[str]:
    """Files and folders that a config names and that are not there. URLs are not looked up."""
    for key, path, inside in _paths(job):
        place = Path(path)
        if "://" in path or (place / inside).exists():
            continue
        if place.exists():
            yield f"{key} = {path!r}: no corpus of `megatfm prep` or `megatfm data index`: it has no {inside}"
        else:
            yield f"{key} = {path!r}: there is no such file or folder"


def _paths(job: Job) -> Iterator[tuple[str, str, str]]:
    """Key, path, and what a folder must hold."""
    config = job.config
    if isinstance(config, PrepConfig):
        paths = {"read.folder": config.read.folder, "tokenizer.file": config.tokenizer.file}
        yield from ((key, path, "") for key, path in paths.items() if path)
        for number, step in enumerate(config.steps):
            files = [*([step.file] if hasattr(step, "file") else []), *getattr(step, "against", ())]
            yield from ((f"steps[{number}]", path, "") for path in files)
        return
    data = config.data
    for name, path in data.validation.items():
        yield f"data.validation.{name}", path, "manifest.json"
    if job.kind == "evaluate":
        return
    if data.train:
        yield "data.train", data.train, "manifest.json"
    for name, source in data.mixture.items():
        yield f"data.mixture.{name}.path", source.path, "manifest.json"
    if data.tokenizer:
        yield "data.tokenizer", data.tokenizer, ""
    if config.train.init_from:
        yield "train.init_from", config.train.init_from, ""
    if config.train.branch_from:
        yield "train.branch_from", config.train.branch_from.rpartition("@")[0], ""


def _misfit(job: Job, on_nodes: bool) -> str | None:
    """Error if layout and batch fit none of the job's numbers of nodes, with one that would fit."""
    assert isinstance(job.config, Config)
    counts = range(job.min_nodes, job.largest_node_count + 1)
    if max_fitting_nodes(job.config, counts, job.nproc_per_node) is not None:
        return None
    reason = layout_error(job.config, job.world_size)
    allocation = (
        f"{job.min_nodes} to {job.max_nodes} nodes" if job.max_nodes else f"{job.world_size} processes"
    )
    return f"the run does not fit {allocation}: {reason}{_suggest_node_count(job, job.config, on_nodes)}"


def _suggest_node_count(job: Job, config: Config, on_nodes: bool) -> str:
    """Numbers of nodes or processes near the wanted one that would do."""
    per_unit, n_processes = (job.nproc_per_node, job.largest_node_count) if on_nodes else (1, job.world_size)
    nearby: Iterator[int] = (
        count
        for distance in range(1, 64)
        for count in (n_processes - distance, n_processes + distance)
        if count > 0 and layout_error(config, count * per_unit) is None
    )
    fitting = next(nearby, None)
    if fitting is None:
        return "; change the layout or the batch"
    return f"; it would fit on {fitting} {'nodes' if on_nodes else 'processes'}"
