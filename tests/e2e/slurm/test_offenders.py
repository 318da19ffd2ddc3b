"""A node on which the run fails again and again is left out."""

import json

import pytest

from tests.support.slurm_cluster import metrics


@pytest.mark.slow  # six starts; tests/unit/launchers/test_prolog_epilog.py has what is asked of SLURM
def test_a_node_that_fails_twice_is_excluded(project):
    cluster = project.cluster
    if not cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them all nodes have one host name")
    cluster.until_idle()
    (project.folder / "site.toml").write_text('exclude = "n[4-8]"\n')
    project.plant_fault(
        "crash", "n2"
    )  # SLURM takes idle nodes in their order: n1 and n2, until n2 is excluded
    job = project.launch("--site", "site.toml", nodes=2)
    record = job.finish(timeout=400)
    assert record["Restarts"] == "2"
    assert cluster.hostnames(record["ExcNodeList"]) == ["n2", "n4", "n5", "n6", "n7", "n8"]
    assert job.nodes == ["n1", "n3"]
    attempts = json.loads((job.run_dir / "restarts.json").read_text())
    assert [(attempt["code"], attempt["failed_host"]) for attempt in attempts] == [
        (1, "n2"),
        (1, "n2"),
        (0, None),
    ]


@pytest.mark.slow  # tests/unit/launchers/test_prolog_epilog.py has what srun writes
def test_a_node_that_dies_before_srun_starts_its_task_is_blamed(project):
    """Twice, and comes back in between: then the run goes on beside it, and the healthy node is not left out."""
    cluster = project.cluster
    if not cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them a killed node's tasks live on")
    cluster.until_idle()
    held, waits = project.plant_fault("held"), project.folder / "waits"
    hold = f"touch '{waits}'; while [ -e '{held}' ]; do sleep 0.1; done"
    site = f'exclude = "n[4-8]"\nsetup = [["bash", "-c", {json.dumps(hold)}]]\n'
    (project.folder / "site.toml").write_text(site)
    job = project.launch("train.steps=3", "--site", "site.toml", nodes=2)
    for dies in (True, True, False):
        job.until(waits.exists)
        if dies:
            cluster.node("kill", "n2")
        waits.unlink()
        held.unlink()
        if dies:
            job.until(lambda: job.state != "RUNNING")
            project.plant_fault("held")
            cluster.node("start", "n2")
    job.finish(timeout=400)
    attempts = json.loads((job.run_dir / "restarts.json").read_text())
    assert [attempt["failed_host"] for attempt in attempts] == ["n2", "n2", None]
    assert job.nodes == ["n1", "n3"]
    assert len(metrics(job.run_dir)) == 3
