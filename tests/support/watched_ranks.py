"""A rank of a run that only moves on, watched by the rank monitor, on a machine of a name of its own.

`python -m tests.support.watched_ranks MACHINES HANG_TIMEOUT [FAILING_RANK]`, where MACHINES has a letter for each rank.
"""

import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from megatfm.errors import MegatfmError
from megatfm.parallel.distributed import distributed_session
from megatfm.train import rank_monitor_client
from megatfm.train.rank_monitor_client import RankMonitor

STEPS = 40


def main() -> int:
    machines, hang_timeout = sys.argv[1], float(sys.argv[2])
    failing = int(sys.argv[3]) if len(sys.argv) > 3 else None
    mine = machines[int(os.environ["RANK"])]
    rank_monitor_client.machine = lambda: mine
    try:
        with distributed_session(60.0, "cpu", 60.0) as rank, RankMonitor(rank, hang_timeout) as monitor:
            print("watched", flush=True)
            for step in range(STEPS):
                monitor.tick(step, "step")
                if step == 5 and rank.rank == failing:
                    raise ValueError("as the test wants it")
                if dist.get_world_size() > 1:
                    dist.monitored_barrier(timeout=timedelta(seconds=60))
                time.sleep(0.1)
    except (MegatfmError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
