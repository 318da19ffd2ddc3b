"""SLURM jobs from Python: submit, look, wait."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from megatfm.errors import UsageError
from megatfm.launchers import beside, cli
from megatfm.launchers.job import JobState
from megatfm.launchers.progress import RunStatus, run_status
from megatfm.registry import refuse_repeats

POLL_SECONDS = 30.0
"""Schedulers don't like to be asked often."""


@dataclass(frozen=True)
class RunHandle:
    """What was submitted, by its run directory: another process can make one, of the same folder."""

    run_dir: Path

    @property
    def state(self) -> JobState:
        """How it is: a word such as PENDING, RUNNING, DONE or FAILED, and more in words."""
        return self.progress.state

    @property
    def progress(self) -> RunStatus:
        """What `megatfm status` shows: step, loss, time left, restarts."""
        return run_status(self.run_dir)

    def wait(self, timeout: float | None = None, poll_interval: float = POLL_SECONDS) -> JobState:
        """Wait for the end, through restarts and all links of a chain. Raises TimeoutError after `timeout` seconds.

        A scheduler that doesn't answer is asked again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            state = self.state
            if state.is_over:
                return state
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.run_dir}: still {state.name} after {timeout:g} s: {state.reason}")
            time.sleep(poll_interval)

    def cancel(self) -> str:
        """End all of its jobs; says which. Raises UsageError if none is left."""
        return beside.cancel(self.run_dir)


def submit(config: str | Path, *overrides: str, **flags: object) -> RunHandle:
    """`megatfm launch CONFIG --slurm …`: overrides are its `key=value`, flags its flags, with `_` for `-`.

    `submit("mine.toml", "train.steps=100", nodes=2, gpus_per_node=8, time="24:00:00")`. True stands for a flag alone,
    a list for one that is repeated. Raises UsageError, MegatfmError.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    cli.add_arguments(parser)
    words = ["--slurm"]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [flag] if each is True else [] if each in (None, False) else [f"{flag}={each}"]
    try:
        args, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"submit: {error}") from None
    if unknown or args.dry_run:
        raise UsageError(
            f"submit: {(unknown or ['--dry-run'])[0]}: no flag for a job: see `megatfm launch --help`"
        )
    refuse_repeats(overrides)
    args.config, args.overrides = str(config), list(overrides)
    return RunHandle(cli.launch(args)[1].run_dir)
