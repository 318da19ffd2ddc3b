"""Tasks of an array prepare one corpus together; one that is killed leaves its part to the others."""

import fcntl
import os
import signal
import time
from pathlib import Path

from tests.support.prep_files import file_hashes
from tests.support.slurm_cluster import Job


def process_of(part: str) -> int | None:
    """The Python that does this part: nodes share the machine's kernel, so it can be seen from here."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if part.encode() in words and b"srun" not in words[0] and b"prep" in words:
            return int(file.parent.name)
    return None


def test_an_array_with_one_task_killed_makes_what_one_process_makes(project, corpus, prep_config):
    out = project.folder / "corpus"
    claim = out / ".work" / "claims" / "clean.0"
    claim.parent.mkdir(parents=True)
    with open(claim, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # nobody can finish before this is closed
        array, *_ = project.submit(prep_config(project), "--prep", "--array", 3)
        tasks = [Job(project.cluster, f"{array.number}_{k}", project.run_dir) for k in (1, 2, 3)]
        end = time.monotonic() + 240
        while (victim := process_of("2/3")) is None or not list((out / ".work").rglob("clean.*.json")):
            assert time.monotonic() < end, tasks[1].report("it never got to work")
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        assert tasks[1].finish("FAILED")["ExitCode"] == "137:0"
        assert not (out / "prep.json").exists(), "in the middle"
    for task in (tasks[0], tasks[2]):
        task.finish()
    assert file_hashes(out) == file_hashes(corpus)
