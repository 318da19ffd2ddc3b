"""One cluster for all tests of this folder, and `launch`, which submits the small run as a user would."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import JOB_REPORT_PROPERTY
from tests.e2e.conftest import PREP, SMALL
from tests.e2e.slurm.cluster import HERE, JOB_REPORTS, Cluster, Job, run, why_not
from tests.support.forked_commands import ForkedCommand, last_of_each_key

# The run of these tests: two layers, forty steps, a checkpoint every five; ZeRO-3 where there are two ranks.
STEPS = 40
OVERRIDES = (
    f"train.steps={STEPS}",
    "checkpoint.every=5",
    "evaluate.every=1000",
    "evaluate.max_rows=4",
    "optimizer.name=adamw",  # Muon's roundings grow from step to step
    "train.precision=fp64",  # in float32 a single step can make 1e-4 of them
    'plugins=["trouble"]',
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs have limits of their own, and on a busy machine several of them may be near."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def scontrol(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """What SLURM said of a test's jobs goes into the summary; all of it with `-rP`."""
    yield
    while JOB_REPORTS:
        record_property(JOB_REPORT_PROPERTY, JOB_REPORTS.pop(next(iter(JOB_REPORTS))))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Eight virtual nodes of one CPU each, up once for all tests: jobs share no node."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(f"t{os.getpid()}", "--nodes", 8, "--cpus", 1)
    yield cluster
    cluster.down()


@dataclass
class Project:
    """What a user has before submitting: a config, the description of the site, and the files that make trouble."""

    folder: Path
    cluster: Cluster
    run_name: str = "run"

    def plant_fault(self, what: str, text: str = "") -> Path:
        """Make trouble, see plugin/trouble.py; it ends when the file that is returned is deleted."""
        file = self.folder / "trouble" / what
        file.write_text(text)
        return file

    @property
    def config(self) -> Path:
        return self.folder / "small.toml"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.run_name

    @property
    def small(self) -> list[object]:
        """The small run, as the commands name it."""
        return [self.config, *OVERRIDES, f"run_dir={self.run_dir}"]

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(HERE / "plugin"), os.environ.get("PYTHONPATH")]))
        return {**self.cluster.environment, "PYTHONPATH": path, "TROUBLE": str(self.folder / "trouble")}

    def megatfm(self, *words: object, code: int = 0) -> str:
        """Run a command in the project's folder, as a fork; returns what it wrote. What jobs start is real."""
        command = ForkedCommand(last_of_each_key(words), self.folder / "said", self.folder, self.environment)
        assert command.wait() == code, f"{words}\n{command.output}"
        return command.output

    def submit(self, *words: object) -> list[Job]:
        """`megatfm launch … --slurm`; returns the job, or all of a chain."""
        output = self.megatfm("launch", *words, "--slurm")
        (numbers,) = re.findall(r"^jobs? ([\d, ]+) (?:is|are) queued", output, re.MULTILINE)
        return [self.cluster.job(number, self.run_dir) for number in numbers.split(", ")]

    def launch(self, *words: object, nodes: object = 1) -> Job:
        """Submit the small run, one process on each node: each takes seconds to import what it needs."""
        return self.submit(*self.small, "--nodes", nodes, "--nproc", 1, *words)[0]

    def sbatch(self, script: str, *words: object, **environment: str) -> Job:
        """Submit a script of the test's own."""
        file = self.folder / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        log = f"--output={self.folder}/slurm-%j.log"
        output = run(
            "sbatch", "--parsable", log, *words, file, cwd=self.folder, env=self.environment | environment
        )
        return self.cluster.job(output.strip(), self.run_dir)

    def command(self, *words: object) -> str:
        """A command of megatfm, for a shell."""
        return shlex.join([sys.executable, "-m", "megatfm", *map(str, words)])


@pytest.fixture(scope="session")
def new_project(
    cluster: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Project]:
    """`new_project(name)`: a project in a folder of its own."""

    def make(name: str) -> Project:
        project = Project(tmp_path_factory.mktemp(name), cluster)
        project.config.write_text(SMALL.format(corpus=corpus))
        (project.folder / "trouble").mkdir()
        return project

    return make


@pytest.fixture(scope="session")
def prep_config(texts: Path) -> Callable[[Project], Path]:
    """`prep_config(project)`: what made the corpus of these tests, in many parts, into the project's folder."""

    def write(project: Project) -> Path:
        file = project.folder / "prep.toml"
        settings = PREP.format(out=project.folder / "corpus", texts=texts)
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
def alone(new_project: Callable[[str], Project]) -> Path:
    """The run directory of the same run in one process, without SLURM."""
    project = new_project("alone")
    project.megatfm("train", *project.small)
    return project.run_dir
