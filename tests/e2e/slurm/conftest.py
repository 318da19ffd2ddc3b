"""One cluster for all tests of this folder, and `launch`, which submits the small run as a user would."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import (
    JOB_REPORT_PROPERTY,
    JOB_REPORTS,
    Cluster,
    Job,
    Project,
    PythonServer,
    find_missing_requirement,
)
from tests.support.small_runs import SMALL_CONFIG, SMALL_PREP

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs have limits of their own, and on a busy machine several of them may be near."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def scontrol(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record SLURM's words on a test's jobs for the summary; all of them show with `-rP`."""
    yield
    while JOB_REPORTS:
        record_property(JOB_REPORT_PROPERTY, JOB_REPORTS.pop(next(iter(JOB_REPORTS))))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Eight virtual nodes of one CPU each, up once for all tests: jobs share no node."""
    if reason := find_missing_requirement():
        pytest.skip(reason)
    cluster = Cluster(f"t{os.getpid()}", "--nodes", 8, "--cpus", 1)
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def python_server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonServer]:
    """Server that forks the processes of jobs; it ends before the cluster."""
    server = PythonServer(tmp_path_factory.mktemp("python"))
    yield server
    server.end()


@pytest.fixture(scope="session")
def new_project(
    cluster: Cluster, python_server: PythonServer, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Project]:
    """`new_project(name)`: a project in a folder of its own."""

    def make(name: str) -> Project:
        project = Project(tmp_path_factory.mktemp(name), cluster, str(python_server.program))
        project.config.write_text(SMALL_CONFIG.format(corpus=corpus))
        (project.folder / "trouble").mkdir()
        return project

    return make


@pytest.fixture(scope="session")
def prep_config(texts: Path) -> Callable[[Project], Path]:
    """`prep_config(project)`: what made the corpus of these tests, in many parts, into the project's folder."""

    def write(project: Project) -> Path:
        file = project.folder / "prep.toml"
        settings = SMALL_PREP.format(out=project.folder / "corpus", texts=texts)
        file.write_text(f"task_bytes = 5000\ntokenizer_threads = 1\n{settings}")
        return file

    return write


@pytest.fixture
def project(new_project: Callable[[str], Project]) -> Project:
    return new_project("project")


@pytest.fixture(scope="session")
def uninterrupted(new_project: Callable[[str], Project]) -> Job:
    """The run that nothing interrupts: two nodes, a process on each."""
    return new_project("whole").launch(nodes=2)


@pytest.fixture(scope="session")
def start_ahead(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`start_ahead(request, "limited", …)`: starts those jobs that any test of the session asks for."""
    collected_fixtures = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}

    def start(test: pytest.FixtureRequest, *jobs: str) -> None:
        for job in jobs:
            if job in collected_fixtures:
                test.getfixturevalue(job)

    return start


@pytest.fixture(scope="session")
def limited(new_project: Callable[[str], Project]) -> Job:
    """A job whose minute ends before its steps do: the first to start, since it takes longer than all others."""
    project = new_project("limited")
    project.plant_fault("slow-first", "2")
    (project.folder / "site.toml").write_text("stop_seconds = 10\n")
    return project.launch("--time", 1, "--site", "site.toml")


@pytest.fixture(scope="session")
def alone(new_project: Callable[[str], Project]) -> Path:
    """The run directory of the same run in one process, without SLURM."""
    project = new_project("alone")
    project.megatfm("train", *project.small)
    return project.run_dir
