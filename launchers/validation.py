"""Checks of a job before it is queued: layout and batch against processes, paths, time limits. Imports no torch."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatfm.config import Config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.config.prep import PrepConfig
from megatfm.config.world_size import check_world_size
from megatfm.errors import UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.job import Job
from megatfm.launchers.record import find_latest_checkpoint_step, is_finished, list_checkpoint_steps
from megatfm.launchers.slurm import FROM_SHELL, Site


def explain_layout_error(config: Config, processes: int) -> str | None:
    """Return why a run can't train on this number of processes; None if it can."""
    try:
        check_world_size(config, processes)
    except UsageError as error:
        return str(error)
    return None


def find_max_fitting_nodes(config: Config, counts: Iterable[int], processes_per_node: int) -> int | None:
    """Return the largest of `counts`, numbers of nodes, on which the run can train; None if it can on none."""
    return max((n for n in counts if explain_layout_error(config, n * processes_per_node) is None), default=None)


# --- errors and warnings of a launch ---------------------------------------------------------------------------------

START_SECONDS = 120
"""Seconds that a run needs to start, including the minute by which SLURM may send its signal early."""


def find_launch_errors(job: Job, site: Site | None, partition: scheduler.SlurmPartition | None = None) -> Iterator[str]:
    """Yield one line for each reason why a job can't be launched.

    site: None unless it is a SLURM job. partition: the job's partition, if SLURM describes it.
    """
    if job.kind == "train" and (problem := _check_size(job, site is not None)):
        yield problem
    if site and job.kind == "train" and (problem := _check_unfinished(job)):
        yield problem
    if job.kind == "train":
        yield from _find_linked_checkpoints(job.run_dir)
    if site is None or not site.container:
        yield from find_missing_paths(job)
        yield from _check_deepspeed(job)
    if site and (problem := _find_unknown_part(job)):
        yield problem
    if site:
        yield from _find_time_limit_errors(job, site, partition)


def _find_unknown_part(job: Job) -> str | None:
    """Return an error for a name that neither megatfm nor a plugin registers; None if a plugin was not imported."""
    if job.kind == "evaluate" or not all(name in sys.modules for name in job.config.plugins):
        return None
    return job.config.find_unknown_part()


def _check_unfinished(job: Job) -> str | None:
    """Return an error if the run has already done all of its steps."""
    assert isinstance(job.config, Config)
    run, steps = job.run_dir, job.config.train.steps
    if find_latest_checkpoint_step(run) < steps or not is_finished(run, steps):
        return None
    return (
        f"{run}: the run is finished: all of its {steps} steps are done: give the new run another name, as name="
        f"{job.config.name}-2, or continue this one with more train.steps (and resume.allow=schedule)"
    )


def _find_linked_checkpoints(run: Path) -> Iterator[str]:
    """Yield the error with which the run would refuse a symbolic link in the place of a checkpoint."""
    if (folder := run / "checkpoints").is_dir():
        for link in sorted(path for path in folder.glob("step-*") if path.is_symlink()):
            yield f"{link} is a symbolic link: put the checkpoint itself there, or remove the link"


def find_launch_warnings(job: Job, site: Site, partition: scheduler.SlurmPartition | None) -> Iterator[str]:
    """Yield one line for each doubt about a SLURM job that does not prevent its submission."""
    per_node = job.resources.nproc_per_node
    if isinstance(job.config, Config) and per_node % job.config.parallel.tp:
        yield (
            f"parallel.tp = {job.config.parallel.tp} does not divide a node's {per_node} processes, so that traffic of "
            "every block crosses the network: choose a tp that stays inside a node"
        )
    if site.container:
        for problem in find_missing_paths(job):
            yield f"{problem}; make sure that it exists in the container"
    if ignored := sorted(set(scheduler.list_sbatch_variables()) - set(FROM_SHELL.values())):
        yield f"{', '.join(ignored)}: not passed on to sbatch, so that the script alone describes the job: use flags"
    if partition and partition.state != "UP":
        yield (
            f"partition {partition.name} is closed ({partition.state}): the job waits until it opens; `sinfo` shows "
            "others, for --partition"
        )
    limit, _ = _find_time_limit(job, partition)
    if limit is not None and job.kind != "evaluate" and 0 < limit - site.stop_seconds < START_SECONDS:
        yield (
            f"the job is told to save {site.stop_seconds} s ahead of its time limit, so it has only "
            f"{limit - site.stop_seconds} s to start and to train: give more --time, or lower stop_seconds in the site "
            "file"
        )


def _find_time_limit_errors(job: Job, site: Site, partition: scheduler.SlurmPartition | None) -> Iterator[str]:
    """Yield errors for time limits with which SLURM would never start the job, or stop it as soon as it starts."""
    limit, origin = _find_time_limit(job, partition)
    if limit is None:
        return
    if partition and partition.max_time is not None and limit > partition.max_time:
        yield (
            f"--time {job.resources.time_limit} is above the limit of partition {partition.name}, "
            f"{_format_duration(partition.max_time)}: the job would wait for ever; give less (a run continues in the "
            "next job), or another --partition"
        )
    if job.kind != "evaluate" and limit <= site.stop_seconds:
        yield (
            f"{origin} leaves no time to work: the job is told to save {site.stop_seconds} s ahead of its limit "
            f"(stop_seconds in the site file): give more than {_format_duration(site.stop_seconds)}, or lower "
            "stop_seconds"
        )


def _find_time_limit(job: Job, partition: scheduler.SlurmPartition | None) -> tuple[int | None, str]:
    """Return a job's time limit in seconds, None if unknown, and a phrase that says what sets it."""
    if job.resources.time_limit is not None:
        return scheduler.parse_time(job.resources.time_limit), f"--time {job.resources.time_limit}"
    if partition is None or partition.default_time is None:
        return None, ""
    limit = partition.default_time
    return (limit, f"the time limit of partition {partition.name} for jobs without --time, {_format_duration(limit)},")


def _format_duration(seconds: int) -> str:
    return f"{seconds // 60} min" if seconds % 60 == 0 else f"{seconds} s"


def _check_deepspeed(job: Job) -> Iterator[str]:
    """Yield the error that the DeepSpeed engine would raise for the user's JSON file, if any."""
    config = job.config
    if job.kind == "train" and isinstance(config, Config) and config.deepspeed.json_file:
        try:
            make_deepspeed_json(config, config.train.precision)
        except UsageError as error:
            yield str(error)


def find_missing_paths(job: Job) -> Iterator[str]:
    """Yield an error for each file or folder that the config names and that doesn't exist. URLs are not checked."""
    for key, path, required_file in _iter_config_paths(job):
        if "://" in path or (Path(path) / required_file).exists():
            continue
        if Path(path).exists():
            yield (
                f"{key} = {path!r}: not a corpus of `megatfm prep` or `megatfm data index`: it has no {required_file}"
            )
        else:
            yield f"{key} = {path!r}: there is no such file or folder"
    if problem := _check_branch_point(job):
        yield problem


def _check_branch_point(job: Job) -> str | None:
    """Return the error with which a run that has no checkpoint of its own would refuse `train.branch_from`."""
    branch_from = job.config.train.branch_from if job.kind == "train" and isinstance(job.config, Config) else None
    if not branch_from or find_latest_checkpoint_step(job.run_dir):
        return None
    run, at, step = branch_from.rpartition("@")
    steps = list_checkpoint_steps(Path(run if at else branch_from))
    if step.isdecimal() and int(step) in steps:
        return None
    return (
        f"train.branch_from = {branch_from!r}: give RUN@STEP, with the step of one of the run's checkpoints; there "
        f"are: {', '.join(map(str, steps)) or 'none'}"
    )


def _iter_config_paths(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yield (key, path, file that must exist under the path or "") for all input paths of a config."""
    config = job.config
    if isinstance(config, PrepConfig):
        paths: dict[str, str | None] = {
            "read.folder": config.read.folder,
            "read.labels.table": config.read.labels.table,
            "read.labels.classes": config.read.labels.classes,
            "tokenizer.file": config.tokenizer.file,
        }
        yield from ((key, path, "") for key, path in paths.items() if path)
        for index, step in enumerate(config.steps):
            for key in ("file", "files", "folder", "run"):
                value: str | Sequence[str] = getattr(step, key, ())
                step_paths = [value] if isinstance(value, str) else value
                yield from ((f"steps[{index}].{key}", path, "") for path in step_paths)
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
    for name, path in config.evaluate.tasks.items():
        yield f"evaluate.tasks.{name}", path, ""
    # A run that resumes reads them no more, but for the model that preferences are measured against.
    reads_weights = config.objective.name == "preference" or not find_latest_checkpoint_step(job.run_dir)
    if config.train.init_from and reads_weights:
        yield "train.init_from", config.train.init_from, ""


def _check_size(job: Job, on_nodes: bool) -> str | None:
    """Return an error if layout and batch fit none of the requested numbers of nodes; it suggests one that works."""
    assert isinstance(job.config, Config)
    resources = job.resources
    counts = range(resources.min_nodes, resources.largest_node_count + 1)
    if find_max_fitting_nodes(job.config, counts, resources.nproc_per_node) is not None:
        return None
    reason = explain_layout_error(job.config, job.world_size)
    is_range = resources.max_nodes is not None
    allocation = f"{resources.min_nodes} to {resources.max_nodes} nodes" if is_range else f"{job.world_size} processes"
    return f"the run does not fit {allocation}: {reason}{_suggest_node_count(job, job.config, on_nodes)}"


def _suggest_node_count(job: Job, config: Config, on_nodes: bool) -> str:
    """Return the end of an error message: the nearest number of nodes or processes on which the run can train."""
    processes_per_unit = job.resources.nproc_per_node if on_nodes else 1
    n_units = job.resources.largest_node_count if on_nodes else job.world_size
    for distance in range(1, 64):
        for count in (n_units - distance, n_units + distance):
            if count > 0 and explain_layout_error(config, count * processes_per_unit) is None:
                unit = ("node" if on_nodes else "process") if count == 1 else ("nodes" if on_nodes else "processes")
                return f"; it would fit on {count} {unit}"
    return "; change the layout or the batch"
