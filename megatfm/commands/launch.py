"""`megatfm launch CONFIG --nproc N | --mpi N | --slurm … [key=value …]`."""

import argparse

from launchers import cli
from megatfm.commands import add_config_arguments

main = cli.main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    cli.add_arguments(parser)
