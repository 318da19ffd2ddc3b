"""The command line of data_prep, which `megatfm prep` shares."""

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

import data_prep
from data_prep.progress import Reporter
from megatfm.config import load
from megatfm.config.prep import PrepConfig
from megatfm.errors import REQUEUE, MegatfmError


def cli(argv: Sequence[str] | None = None) -> int:
    """`CONFIG [key=value …]`: prepare a corpus. Returns the exit code: 0 done, 1 failed, 2 usage, 75 stopped."""
    parser = argparse.ArgumentParser(
        prog="megatfm prep", description="From a folder of text to training shards."
    )
    parser.add_argument("config", help="a TOML file or the name of a preset, for example quickstart-data")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example read.folder=my-texts")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _prepare(load(PrepConfig, arguments.config, arguments.overrides), console)
    except MegatfmError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if arguments.debug:
            raise
        print(f"error: {error.filename or 'system'}: {error.strerror}", file=sys.stderr)
        return MegatfmError.exit_code
    except KeyboardInterrupt:
        print("stopped: finished stages are kept, the same command goes on from there", file=sys.stderr)
        return REQUEUE
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _prepare(config: PrepConfig, console: Console) -> None:
    reporter = Reporter(console)
    summary = data_prep.run(config, reporter)
    for note in summary.result["notes"]:
        reporter.say(f"note: {note}")
    for skipped in summary.result["skipped_files"]:
        reporter.say(f"skipped: {skipped}")
    console.print(summary.table())
    if summary.already_done:
        reporter.say(f"{summary.out} was already prepared with this config: nothing to do")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
