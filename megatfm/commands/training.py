"""`megatfm train` and `megatfm launch`: train or resume, in this process or through a launcher."""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatfm.commands.arguments import add_config_and_overrides, add_source_argument, split_config
from megatfm.config import Config, load_config, to_toml
from megatfm.errors import LockedError, UsageError
from megatfm.files import NEW_RUN_VARIABLE, NewPaths, atomic_write, name_write_errors
from megatfm.launchers import cli
from megatfm.launchers.run_jobs import check_no_process
from megatfm.parallel.process_environment import read_process_environment
from megatfm.parallel.startup_watch import start_sentinel

ALLOCATOR_VARS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Environment variables that configure torch's allocator: the current name, and older ones."""


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a config and its overrides, and a model to start from."""
    add_config_and_overrides(parser, optional=True)
    add_source_argument(parser)


def enable_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Set torch's GPU allocator to expandable segments, which reduces fragmentation, unless the user has configured it.

    Must be called before torch is imported.
    """
    if not ALLOCATOR_VARS.intersection(environment):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def load_training_config(args: argparse.Namespace, new_paths: NewPaths) -> Config:
    """Load the config of a run. With `--from`, convert the model if needed, and register its files in `new_paths`.

    Raises UsageError.
    """
    path, overrides = args.config, args.overrides
    if args.source is None:
        if path is None:
            raise UsageError("a config is missing: give a TOML file, a run directory, a preset or --from MODEL")
        return load_config(path, overrides)
    from megatfm.commands.from_model import continue_from_config  # imports torch

    path, overrides = split_config(path, overrides)
    config, messages = continue_from_config(args.source, path, overrides, new_paths)
    print_notes(messages)
    return config


def print_notes(notes: Sequence[str]) -> None:
    """Print notes to stderr on rank 0: the run's log, and the console that shows it, aren't open yet."""
    if read_process_environment(os.environ).rank == 0:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


@contextmanager
def show_log() -> Iterator[None]:
    """Print the log's messages to stderr on rank 0, with the time, as training does, but for a run's own log."""
    if read_process_environment(os.environ).rank:
        yield
        return
    log, handler = logging.getLogger("megatfm"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(lambda _: log.handlers == [handler])
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def train_command(args: argparse.Namespace) -> int:
    """Train or resume; return 0 when the run is done, 75 if a signal stopped it after saving (`megatfm.errors`)."""
    enable_expandable_segments(os.environ)
    start_sentinel()
    new_paths = NewPaths()
    with remove_on_refusal(new_paths):
        config = load_training_config(args, new_paths)
        # After the config is loaded, so that a mistake in it is reported before torch is imported.
        from megatfm.describe.description import flops_per_token
        from megatfm.inference.text import PromptSampler
        from megatfm.train.run import train

        if folder := os.environ.get(NEW_RUN_VARIABLE):
            new_paths.folders.append(Path(folder))
        return train(config, flops_per_token, PromptSampler(), new_paths)


@contextmanager
def remove_on_refusal(new_paths: NewPaths) -> Iterator[None]:
    """Remove a run's new files if the block raises UsageError or LockedError."""
    try:
        yield
    except (UsageError, LockedError):
        new_paths.remove()
        raise


RESOLVED_CONFIG = "from.toml"
"""File in the run directory with the config for all ranks of a run that starts from a model (`--from`)."""


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megatfm train`, and those that say where to run."""
    add_config_and_overrides(parser, optional=True)
    add_source_argument(parser)
    cli.add_arguments(parser)


def launch_command(args: argparse.Namespace) -> int:
    """Start the run. A model given by `--from` is converted here, once for all ranks."""
    if args.source is not None and (args.prep or args.evaluate):
        raise UsageError(f"--from is for training: leave it out, or {'--prep' if args.prep else '--evaluate'}")
    if args.source is not None or args.config is None:
        cli.check_flags(args)  # before a model is converted in vain
    new_paths = NewPaths()
    with remove_on_refusal(new_paths):
        if args.source is not None or args.config is None:
            args.config, args.overrides = str(_write_resolved_config(args, new_paths)), []
        return cli.main(args, new_paths)


def _write_resolved_config(args: argparse.Namespace, new_paths: NewPaths) -> Path:
    """Write the config of a run that starts from a model into its run directory; return the file."""
    config = load_training_config(args, new_paths)
    path = Path(config.run_dir or Path("runs") / config.name) / RESOLVED_CONFIG
    write_run_config(config, path, new_paths)
    return path


def write_run_config(config: Config, path: Path, new_paths: NewPaths) -> None:
    """Write a run's config into its directory, and register the file. Raises LockedError, MegatfmError."""
    check_no_process(path.parent)  # a running launcher's restarts would read the new file
    with name_write_errors(path):
        new_paths.make_folder(path.parent)
        new_paths.will_replace(path)
        atomic_write(path, to_toml(config))
