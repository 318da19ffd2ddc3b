"""`megatfm launch` in this process, and jobs for launchers."""

import argparse

from megatfm.config import load, load_config
from megatfm.config.prep import PrepConfig
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.job import Job
from megatfm.launchers.slurm import Site


def launch(*words: str, config: str = "quickstart") -> int:
    """Run `megatfm launch CONFIG words`; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    add_arguments(parser)
    return main(parser.parse_intermixed_args([config, *words]))


def job(**changes: object) -> Job:
    """A training job of the quickstart, with other values in some fields."""
    fields: dict[str, object] = {
        "config_name": "quickstart",
        "overrides": (),
        "config": load_config("quickstart"),
        "name": "quickstart",
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


CLUSTER_FLAGS = [
    "--slurm",
    "--nodes",
    "4",
    "--gpus-per-node",
    "8",
    "--time",
    "24:00:00",
    "--job-name",
    "big-run",
]
FULL_SITE = Site(
    partition="gpu",
    account="physics",
    qos="long",
    constraint="a100&infiniband",
    exclude="gpu[07,12]",
    cpus_per_task=8,
    memory="480G",
    exclusive=True,
    sbatch=["--mail-type=FAIL"],
    srun=["--mpi=none"],
    modules=["cuda/12.8", "openmpi"],
    setup=[["source", "/my venv/bin/activate"]],
    container=["apptainer", "exec", "--nv", "/images/torch 2.sif"],
    python="python3",
    interface="ib0",
    environment={"NCCL_IB_HCA": "mlx5"},
)
SMALL_SITE = Site(
    partition="short", requeue=False, start="torchrun", cpus_per_task=2, gpus="gres", stop_seconds=60
)


def prep_job(**changes: object) -> Job:
    """A job of eight tasks that prepares the quickstart's data."""
    resolved = load(PrepConfig, "quickstart-data")
    return job(
        kind="prep", config_name="quickstart-data", config=resolved, name="prep", array_size=8, **changes
    )
