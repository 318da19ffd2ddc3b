"""A plugin (`plugins = ["trouble"]`) that lets a test steer the steps of a running job by files in $TROUBLE.

`slow` makes each step after the seventh since the start take the seconds that it holds, until the file is gone;
`crash` makes every rank raise at the third step, or those on the host that it names; `hang` holds the rank that it
names at the seventh. `slow-first` and so on do the same until the job is requeued. `handover` holds the seconds for
which a job waits for another one's lock. The loader is hooked: every step asks it for a batch.
"""

import os
import socket
import time
from pathlib import Path

from megatfm.data.loader import DataLoader
from megatfm.tracking import run_lock

FOLDER = Path(os.environ["TROUBLE"])
RANK = os.environ.get("SLURM_PROCID") or os.environ.get("RANK") or "0"
RESTARTED = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"

_next = DataLoader.__next__
_steps = 0


def read(name):
    for file in (name,) if RESTARTED else (name, f"{name}-first"):
        try:
            return (FOLDER / file).read_text()
        except FileNotFoundError:
            continue
    return None


def next_with_trouble(loader):
    global _steps
    _steps += 1
    start = time.monotonic()
    while _steps > 7 and (seconds := read("slow")) and time.monotonic() < start + float(seconds):
        time.sleep(0.02)
    if read("crash") in ("", socket.gethostname()) and _steps == 3:
        raise RuntimeError("trouble was asked for")
    while read("hang") == RANK and _steps >= 7:
        time.sleep(0.1)
    return _next(loader)


DataLoader.__next__ = next_with_trouble
if handover := read("handover"):
    run_lock.HANDOVER_SECONDS = float(handover)
