"""A run that is restarted by itself, again and again, must gain something each time."""

import json
import os
from collections.abc import Mapping

from megatfm.errors import NoProgressError
from megatfm.ranks import run_on_rank_0_raising
from megatfm.train.record.run_directory import RunDirectory

ATTEMPTS = "attempts.json"


def check_progress(
    run: RunDirectory, step: int, max_failures: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Under torchrun's elastic agent, count the restarts since the newest checkpoint (of `step`). A collective.

    Raises NoProgressError on all ranks after `max_failures` of them. SLURM's jobs are counted by their script, and a
    person who starts a run again is not counted at all.
    """
    if environment.get("TORCHELASTIC_RUN_ID") is None:
        return
    run_id = environment["TORCHELASTIC_RUN_ID"]
    restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    failures = run_on_rank_0_raising(lambda: _count(run, run_id, restarts, step))
    if failures >= max_failures:
        raise NoProgressError(
            f"{run.folder}: {failures} restarts in a row gained no checkpoint beyond step {step} "
            "(resilience.max_failures): see logs/ for what ended them"
        )


def _count(run: RunDirectory, run_id: str, restarts: int, step: int) -> int:
    """Restarts of this agent since the first start that found this checkpoint."""
    path = run.folder / ATTEMPTS
    first = None
    try:
        before = json.loads(path.read_bytes())
        if (before["agent"], before["step"]) == (run_id, step):
            first = int(before["restarts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # none, or not what was written here
        pass
    # An agent that was started anew counts from 0 again, under the same name if the user gave one.
    if first is None or first > restarts:
        run.write(ATTEMPTS, json.dumps({"agent": run_id, "step": step, "restarts": restarts}) + "\n")
        return 0
    return restarts - first
