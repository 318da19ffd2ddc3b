"""Files of tests stay in the page cache: what a process wrote outlives it there, and no test takes the power away.

Waiting for the disk took a third of the time of tests that write many files, or more. Which files are synced, and in
which order, is shown by tests that replace or record `os.fsync` (`power_loss.py`); fresh Pythons call the real one.
"""

import os
from typing import Any


def check_descriptor(fd: Any) -> None:
    """Raise as fsync does if a file, or its descriptor, is closed; write nothing."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def leave_files_in_page_cache() -> None:
    """Replace fsync in this process and its forks."""
    os.fsync = check_descriptor
