"""Exit codes, and the errors that users meet. A message is one line: what, where, and the way out.

A launcher (a job script, torchrun, `megatfm launch`) decides by the exit code alone whether to restart a run, so each
code says whether the same command may help if it is started again.
"""

EXIT_OK = 0
EXIT_FAILED = 1
"""A crash, a lost rank, a full disk: worth another try."""
EXIT_USAGE = 2
"""The command line or the config asks for what can't be: another try says the same."""
EXIT_REQUEUE = 75
"""Saved, and stopped by a signal (sysexits' EX_TEMPFAIL): the same command goes on from there."""
NO_PROGRESS = 76
"""Restarts gained no new checkpoint, so one more would not either."""
LOCKED = 77
"""Another job is training this run at this moment."""


class MegatfmError(Exception):
    """Something failed while running: a damaged file, a full disk, a lost rank. The command exits with 1."""

    exit_code = EXIT_FAILED


class UsageError(MegatfmError):
    """The command line, the config or the layout asks for what can't be done. The command exits with 2."""

    exit_code = EXIT_USAGE


class RefusedMemberError(MegatfmError):
    """A member of an archive is refused, as what it is or claims may do harm: another way to read it is no way out."""


class SampleError(MegatfmError):
    """A stored sample can't be used. The message is only the reason, for the reader that knows shard and number."""


class NoProgressError(MegatfmError):
    """Restarted again and again without a new checkpoint. The command exits with 76."""

    exit_code = NO_PROGRESS


class LockedError(MegatfmError):
    """Another process trains in this run directory. The command exits with 77."""

    exit_code = LOCKED
