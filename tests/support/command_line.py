"""A command of megatfm in this process."""

import pytest

from megatfm import cli


def run_command(*words: str) -> int:
    """Run `megatfm`; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)
