"""SLURM jobs from Python: `submit` a run as `megatfm launch --slurm` does, and wait for it or cancel it."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from megatfm.errors import UsageError
from megatfm.launchers.cli import add_arguments, launch
from megatfm.launchers.job import JobState
from megatfm.launchers.run_jobs import cancel_run
from megatfm.launchers.status import RunStatus, get_run_status
from megatfm.registry import refuse_repeats

POLL_SECONDS = 30.0
"""Seconds between two queries of a job's state: frequent queries slow a scheduler down for everyone."""


@dataclass(frozen=True)
class RunHandle:
    """Handle of a submitted run. It needs only the run directory, so any process can construct one."""

    run_dir: Path

    @property
    def state(self) -> JobState:
        """State of the job (PENDING, RUNNING, DONE, FAILED, …) with its reason."""
        return self.progress.state

    @property
    def progress(self) -> RunStatus:
        """Step, loss, time left and restarts: the values that `megatfm status` shows."""
        return get_run_status(self.run_dir)

    def wait(self, timeout: float | None = None, poll_interval: float = POLL_SECONDS) -> JobState:
        """Wait until the run ends, across restarts and all jobs of a chain; return the final state.

        Keeps polling while the scheduler doesn't answer. Raises TimeoutError after `timeout` seconds.
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
        """Cancel all jobs of the run; return a sentence that lists them. Raises UsageError if none is left."""
        return cancel_run(self.run_dir)


def submit(config: str | Path, *overrides: str, **flags: object) -> RunHandle:
    """Submit a run as a SLURM job, as `megatfm launch CONFIG --slurm …` does.

    For example `submit("mine.toml", "train.steps=100", nodes=2, gpus_per_node=8, time="24:00:00")`.

    overrides: `key=value` settings of the config. flags: flags of the command, with `_` for `-`; True stands for a
    flag without a value, a list for a repeated flag. Raises UsageError, MegatfmError.
    """
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    add_arguments(parser)
    argv = ["--slurm"]
    for name, values in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for value in values if isinstance(values, list | tuple) else [values]:
            if value is True:
                argv.append(flag)
            elif value is not None and value is not False:  # 0 is a value
                argv.append(f"{flag}={value}")
    try:
        args, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"submit: {error}") from None
    if unknown or args.dry_run:
        raise UsageError(f"submit: {(unknown or ['--dry-run'])[0]}: not a flag of jobs: see `megatfm launch --help`")
    refuse_repeats(overrides)
    args.config, args.overrides = str(config), list(overrides)
    return RunHandle(launch(args)[1].run_dir)
