"""The two errors that users meet. A message is one line: what, where, and the way out."""


class MegatfmError(Exception):
    """Something failed while running: a damaged file, a full disk, a lost rank. The command exits with 1."""

    exit_code = 1


class UsageError(MegatfmError):
    """The command line, the config or the layout asks for what can't be done. The command exits with 2."""

    exit_code = 2
