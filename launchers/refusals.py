"""What would fail only after the wait in the queue, or once ranks have started: found before, without torch."""

from collections.abc import Iterator
from pathlib import Path

from megatfm.config import Config
from megatfm.config.deepspeed_json import derive
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.files import finished, latest_checkpoint_step
from megatfm.launchers.fit import layout_error, max_fitting_nodes
from megatfm.launchers.job import Job
from megatfm.launchers.site import FROM_SHELL, Site

START_SECONDS = 120
"""What a start takes, and by how much SLURM may signal too early (a minute)."""


def launch_errors(job: Job, site: Site | None) -> Iterator[str]:
    """Why a job must not be started, a line each. site: of a SLURM job."""
    if job.kind == "train" and (problem := _misfit(job, site is not None)):
        yield problem
    if site and job.kind == "train" and (problem := _finished(job)):
        yield problem
    if site is None or not site.container:
        yield from missing_paths(job)
        yield from _json_problem(job)
    if site:
        yield from _time_limit_errors(job, site)


def _finished(job: Job) -> str | None:
    """What a job would say after its wait, of a run that has done all of its steps."""
    assert isinstance(job.config, Config)
    run, steps = job.run_dir, job.config.train.steps
    if latest_checkpoint_step(run) < steps or not finished(run, steps):
        return None
    return (
        f"{run}: the run is finished: all of its {steps} steps are done: give the new one another name, as name="
        f"{job.config.name}-2, or go on with more train.steps (and resume.allow=schedule)"
    )


def launch_warnings(job: Job, site: Site) -> Iterator[str]:
    """What a SLURM job will meet, and its user may want."""
    if site.container:
        for problem in missing_paths(job):
            yield f"{problem}; let it be in the container"
    if left_out := sorted(set(scheduler.overruling()) - set(FROM_SHELL.values())):
        yield f"{', '.join(left_out)}: not passed on to sbatch, so that the job is as its script says: use flags"
    partition = scheduler.partition(site.partition)
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


def _time_limit_errors(job: Job, site: Site) -> Iterator[str]:
    """A job that SLURM would take and never start, or tell to stop as soon as it starts."""
    partition = scheduler.partition(site.partition)
    limit, whose = _time_limit(job, partition)
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
            f"{whose} leaves no time to work: the job is told to save {site.stop_seconds} s ahead of its limit "
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
    """What DeepSpeed's engine would refuse of a JSON of the user's own when it is built."""
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
        given = {"read.folder": config.read.folder, "tokenizer.file": config.tokenizer.file}
        yield from ((key, path, "") for key, path in given.items() if path)
        for number, step in enumerate(config.steps):
            named = [*([step.file] if hasattr(step, "file") else []), *getattr(step, "against", ())]
            yield from ((f"steps[{number}]", path, "") for path in named)
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
    """What the layout and the batch make impossible; None if the run fits some of its numbers of nodes."""
    assert isinstance(job.config, Config)
    counts = range(job.min_nodes, job.largest_node_count + 1)
    if max_fitting_nodes(job.config, counts, job.nproc_per_node) is not None:
        return None
    why = layout_error(job.config, job.world_size)
    where = f"{job.min_nodes} to {job.max_nodes} nodes" if job.max_nodes else f"{job.world_size} processes"
    return f"the run does not fit {where}: {why}{_suggest_node_count(job, job.config, on_nodes)}"


def _suggest_node_count(job: Job, config: Config, on_nodes: bool) -> str:
    """Numbers of nodes or processes near the wanted one that would do."""
    each, wanted = (job.nproc_per_node, job.largest_node_count) if on_nodes else (1, job.world_size)
    near: Iterator[int] = (
        count
        for distance in range(1, 64)
        for count in (wanted - distance, wanted + distance)
        if count > 0 and layout_error(config, count * each) is None
    )
    found = next(near, None)
    if found is None:
        return "; change the layout or the batch"
    return f"; it would fit on {found} {'nodes' if on_nodes else 'processes'}"
