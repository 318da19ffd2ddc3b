"""`megatfm launch CONFIG --nproc N | --mpi N | --slurm … [key=value …]`, and the same with `--from MODEL`."""

import argparse
from pathlib import Path

from megatfm.atomic import atomic_write
from megatfm.commands import add_config_arguments, add_source_argument, training_config
from megatfm.config import to_toml
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import cli
from megatfm.launchers.beside import check_no_process

RESOLVED_CONFIG = "from.toml"
"""In the run directory: the config with which all ranks of a run that goes on from a model are started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megatfm train` takes, and where to run it."""
    add_config_arguments(parser, optional=True)
    add_source_argument(parser)
    cli.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Start the run. A model that it goes on from is brought into our format here, once for all ranks."""
    if args.source is not None and (args.prep or args.evaluate):
        raise UsageError(
            f"--from is for training: leave it out, or {'--prep' if args.prep else '--evaluate'}"
        )
    if args.source is not None or args.config is None:
        cli.check_flags(args)  # before a model is brought into our format for nothing
        config = training_config(args)
        path = Path(config.run_dir or Path("runs") / config.name) / RESOLVED_CONFIG
        check_no_process(path.parent)  # whose restarts read the file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, to_toml(config))
        except OSError as error:
            raise MegatfmError(f"{path}: can't write the run's config: {error.strerror}") from error
        args.config, args.overrides = str(path), []
    return cli.main(args)
