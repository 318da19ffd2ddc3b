"""What is read from SLURM's answers."""

from pathlib import Path

import pytest

from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import scheduler
from megatfm.launchers.record import find_latest_checkpoint_step, tail_jsonl
from tests.support.fake_slurm import FakeSlurm

# As SLURM 22.05 prints it: values with spaces, with `=`, and empty ones.
RECORD = (
    "JobId=7 JobName=a b UserId=root(0) JobState=RUNNING Reason=None Restarts=2 ExitCode=0:0 RunTime=1-02:03:04 "
    "TimeLimit=00:10:00 Partition=main NodeList=n[1-2] NumNodes=2-2 TRES=cpu=2,node=2 Command=/a b/c=d "
    "Power=\n"
)


def test_the_record_of_a_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol-show", RECORD)
    job = scheduler.show_job("7")
    assert job["JobName"] == "a b"
    assert job["TRES"].startswith("cpu=2")
    assert (job["JobState"], job["Restarts"], job["NumNodes"], job["Power"]) == (
        "RUNNING",
        "2",
        "2-2",
        "",
    )
    assert fake_slurm.calls == ["scontrol -o show job 7"]


def test_a_job_that_is_forgotten_has_no_record(fake_slurm: FakeSlurm) -> None:
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error: Invalid job id specified\n")
    assert scheduler.show_job("7") == {}
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error:\n Unable to contact slurm controller\n")
    with pytest.raises(MegatfmError, match=r"^scontrol -o show: slurm_load_jobs error: Unable to contact"):
        scheduler.show_job("7")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("05:04", 304),
        ("00:10:00", 600),
        ("1-02:03:04", 93784),
        ("90", 5400),
        ("1-02", 93600),
        ("1-02:03", 93780),
        ("UNLIMITED", None),
        ("", None),
        ("INVALID", None),
    ],
)
def test_slurm_durations_are_parsed(text: str, seconds: int | None) -> None:
    assert scheduler.parse_time(text) == seconds


def test_node_lists_are_expanded(fake_slurm: FakeSlurm) -> None:
    assert scheduler.expand_nodelist("n1") == ["n1"]
    assert scheduler.expand_nodelist("n1,gpu-2.site") == ["n1", "gpu-2.site"]
    assert fake_slurm.calls == [], "what needs no expansion needs no SLURM"
    fake_slurm.answer("scontrol-show", "n1\nn2\n")
    assert scheduler.expand_nodelist("n[1-2]") == ["n1", "n2"]


def test_usable_nodes_are_those_in_order(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer(
        "sinfo", "n1 idle\nn2 alloc\nn3 down*\nn4 drain\nn5 mix\nn6 idle*\nn7 comp\nn8 drng\nn9 \nn10\n\n"
    )
    assert scheduler.list_usable_nodes("main") == {"n1", "n2", "n5", "n7"}


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="squeue is not on PATH: run this on a login node"):
        scheduler.run_slurm_command("squeue")


def test_a_scheduler_that_hangs_is_given_up(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_slurm.folder / "bin" / "sinfo").write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(scheduler, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(MegatfmError, match="sinfo gave no answer in 0 s: is slurmctld up"):
        scheduler.run_slurm_command("sinfo")


def test_the_end_of_a_file_of_records(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert tail_jsonl(file, 3) == []
    file.write_text("".join(f'{{"step": {n}}}\n' for n in range(5)) + '{"step": 5')
    assert [item["step"] for item in tail_jsonl(file, 3)] == [2, 3, 4]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    assert find_latest_checkpoint_step(tmp_path) == 0
    for name in ("step-00000004", "step-00000012", ".step-00000020.partial-1", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_latest_checkpoint_step(tmp_path) == 12
