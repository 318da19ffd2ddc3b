"""A node on which the run fails again and again is left out."""

import json

import pytest


@pytest.mark.slow  # six starts; tests/unit/launchers/test_jobside.py has what is asked of SLURM
def test_a_node_that_fails_twice_is_excluded(project):
    cluster = project.cluster
    if not cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them all nodes have one host name")
    cluster.until_idle()
    (project.folder / "site.toml").write_text('exclude = "n[4-8]"\n')
    project.trouble("crash", "n2")  # SLURM takes idle nodes in their order: n1 and n2, until n2 is excluded
    job = project.launch("--site", "site.toml", nodes=2)
    record = job.finish(timeout=400)
    assert record["Restarts"] == "2"
    assert cluster.hostnames(record["ExcNodeList"]) == ["n2", "n4", "n5", "n6", "n7", "n8"]
    assert job.nodes == ["n1", "n3"]
    attempts = json.loads((job.run_dir / "restarts.json").read_text())
    assert [(each["code"], each["failed_host"]) for each in attempts] == [(1, "n2"), (1, "n2"), (0, None)]
