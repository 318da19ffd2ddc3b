"""Prepare a corpus, and be hit by a signal on the way: `python signal_prep.py SIGNAL WRITES RANK CONFIG`.

The process sends the signal to itself when it writes a document that has been read for the so-manieth time, in the
middle of a part, and leaves a file `fallen` beside the config. RANK is that of mpirun if it is one of several, which
then begin when it has fallen; else `-`.
"""

import os
import signal
import sys
import time
from pathlib import Path

from megatfm import data_prep
from megatfm.corpus.files import AtomicFile

name, writes, rank, config, *remaining = sys.argv[1:]
fallen = Path(config).with_name("fallen")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
write = AtomicFile.write
count = 0


def counted(self: AtomicFile, data: bytes) -> None:
    """Write, with a signal at the chosen write."""
    global count
    if self.path.name.startswith("clean."):
        count += 1
        if count == int(writes):
            fallen.touch()
            os.kill(os.getpid(), signal.Signals[name])
    write(self, data)


if rank in ("-", os.environ.get("OMPI_COMM_WORLD_RANK")):
    AtomicFile.write = counted  # type: ignore[method-assign]
else:
    while not fallen.exists():
        time.sleep(0.05)
sys.exit(data_prep.cli([config, *remaining]))
