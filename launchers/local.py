"""N processes on this machine."""

import os
import random
import shlex
import socket

from megatfm.errors import MegatfmError
from megatfm.launchers.foreground import ForegroundLauncher
from megatfm.launchers.job import Job, python_path
from megatfm.launchers.supervise import Child, supervise

# Below the kernel's range for outgoing connections, so that nobody's connection takes the port before rank 0 does.
PORTS = range(12_000, 32_000)


class LocalLauncher(ForegroundLauncher):
    """Starts the ranks as children. Rank 0 has this terminal, the others write to RUN/logs/rank-K.log."""

    name = "local"

    def render(self, job: Job) -> dict[str, str]:
        """One line of shell a rank."""
        lines = []
        for child in self._children(job, PORTS[0]):
            env = " ".join(f"{key}={shlex.quote(value)}" for key, value in child.environment.items())
            output = f" >>{shlex.quote(str(child.log))} 2>&1" if child.log else ""
            lines.append(f"{env} {shlex.join(child.command)}{output} &")
        return {"launch.sh": "\n".join([*lines, "wait", ""])}

    def submit(self, job: Job) -> int:
        """Run to the end; returns the ranks' common exit code."""
        return self.run(job, lambda: supervise(self._children(job, free_port())))

    def _children(self, job: Job, port: int) -> list[Child]:
        ranks = range(job.world_size)
        if job.kind == "prep":  # they take parts of the work from one another, and need no address
            return [
                Child(
                    f"worker {rank + 1}",
                    [*job.command, "--part", f"{rank + 1}/{job.world_size}"],
                    default_env(job.world_size),
                    job.run_dir / "logs" / f"worker-{rank + 1}.log" if rank else None,
                )
                for rank in ranks
            ]
        shared = {
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_WORLD_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # needs no name service
            **default_env(job.world_size),
        }
        return [
            Child(
                f"rank {rank}",
                job.command,
                {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
                job.run_dir / "logs" / f"rank-{rank}.log" if rank else None,
                blocks_stop_signals=job.kind == "train",
            )
            for rank in ranks
        ]


def default_env(processes: int) -> dict[str, str]:
    """Settings of a rank on this machine that the user's own environment overrules."""
    env = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        "PYTHONUNBUFFERED": "1",  # the log of a rank that is killed holds its last words
    }
    return {key: os.environ.get(key, value) for key, value in env.items()} | python_path()


def free_port() -> int:
    """A port that nobody listens on. Raises MegatfmError when none is found."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise MegatfmError(
        f"no free port between {PORTS[0]} and {PORTS[-1]} on 127.0.0.1: is something using them all?"
    )
