"""Run preps that are killed at given moments: `python kill_prep.py CONFIG.json OUT:MOMENT …`.

A moment is the number of times that something was written, synced or renamed before. Each run is a fork, so that
the imports are paid once. Prints a JSON list: for each run the exit status, negative for a signal.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatfm.config.prep import PrepConfig
from megatfm.corpus.files import AtomicFile
from megatfm.data_prep import pipeline
from megatfm.data_prep.execution.progress import Reporter


class MomentCounter:
    """Counts the moments, and kills this process without warning when the time has come."""

    def __init__(self, last: int) -> None:
        self.now = 0
        self.last = last

    def count_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def tick(*arguments: Any, **named: Any) -> Any:
            if self.now == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            self.now += 1
            return call(*arguments, **named)

        return tick


def run_until_moment(config: PrepConfig, last: int) -> None:
    """Prepare, and be killed at a moment; prints the number of moments."""
    clock = MomentCounter(last)
    os.fsync, os.replace = clock.count_calls(os.fsync), clock.count_calls(os.replace)
    AtomicFile.write = clock.count_calls(AtomicFile.write)  # type: ignore[method-assign]
    pipeline.run(config, Reporter())
    print(clock.now, file=sys.stderr)


def main() -> None:
    """Fork a preparation for each argument OUT:MOMENT."""
    with open(sys.argv[1]) as file:
        config = PrepConfig.model_validate(json.load(file))
    statuses = []
    for run_argument in sys.argv[2:]:
        out, _, moment = run_argument.rpartition(":")
        child = os.fork()
        if child == 0:
            run_until_moment(config.model_copy(update={"out": out}), int(moment))
            sys.stderr.flush()
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
