"""Exit codes, and the errors that users see. A message is one line: what, where, and how to mend it.

A launcher (a job script, torchrun, `megatfm launch`) decides by the exit code alone whether to restart a run. So each
code says whether the same command may succeed if it is started again.
"""

import errno

EXIT_OK = 0
EXIT_FAILED = 1
"""A crash, a lost rank, a full disk: a restart may succeed."""
EXIT_USAGE = 2
"""The command line or the config is invalid: a restart would fail in the same way."""
EXIT_REQUEUE = 75
"""A signal stopped the run after saving (sysexits' EX_TEMPFAIL): the same command resumes it."""
NO_PROGRESS = 76
"""Restarts saved no new checkpoint, so another one would not, either."""
LOCKED = 77
"""Another job is training this run."""


MAX_SHOWN_PATH = 60
"""Characters of an impossible path that its error shows."""


class MegatfmError(Exception):
    """A failure at run time: a damaged file, a full disk, a lost rank. The command exits with 1."""

    exit_code = EXIT_FAILED


class UsageError(MegatfmError):
    """An invalid command line, config or layout. The command exits with 2."""

    exit_code = EXIT_USAGE


class RefusedMemberError(MegatfmError):
    """A member of an archive is refused because it may do harm. Callers must not try another way to read it."""


class SampleError(MegatfmError):
    """A stored sample can't be used. The message is only the reason; the reader adds shard and index."""


class NoProgressError(MegatfmError):
    """The run was restarted repeatedly without a new checkpoint. The command exits with 76."""

    exit_code = NO_PROGRESS


class LockedError(MegatfmError):
    """Another process trains in this run directory. The command exits with 77."""

    exit_code = LOCKED


def describe_impossible_path(error: Exception) -> str | None:
    """Describe an error that the operating system raises for any use of a path; None for other errors."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)
        start = path if len(path) <= MAX_SHOWN_PATH else f"{path[:MAX_SHOWN_PATH]}…"
        return f"{start}: this path of {len(path):,} characters is too long: choose a shorter one"
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "a path contains the character NUL, which no path may have: remove it"
    return None
