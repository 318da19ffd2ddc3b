"""The Dockerfile agrees with the package: it can't be built where the tests run, but it can be read."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KNOWN = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """Instructions and what follows them, lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def of(lines: list[tuple[str, str]], instruction: str) -> list[str]:
    return [line for word, line in lines if word == instruction]


def test_its_instructions_are_docker_s(lines: list[tuple[str, str]]) -> None:
    assert {word for word, _ in lines} <= KNOWN
    assert lines[0][0] == "FROM"
    assert json.loads(of(lines, "CMD")[0])[0] in PROJECT["project"]["scripts"]


def test_what_is_copied_is_there_and_is_all_that_an_install_needs(lines: list[tuple[str, str]]) -> None:
    copied = {source for remaining in of(lines, "COPY") for source in shlex.split(remaining)[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.partition(".")[0] for name in include}
    links = [path for name in packages for path in (ROOT / name).iterdir() if path.is_symlink()]
    packages |= {path.resolve().relative_to(ROOT).parts[0] for path in links}  # a copied link is only a name
    files = {
        "pyproject.toml",
        "constraints.txt",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    }
    assert copied == packages | files
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
    assert {".git", "runs", "corpora"} <= set(ignored)


def test_python_torch_and_extras_are_the_project_s(lines: list[tuple[str, str]]) -> None:
    image = re.fullmatch(r"python:(\d+)\.(\d+)-slim-bookworm", of(lines, "FROM")[0])
    assert image
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"])
    assert least
    assert tuple(map(int, image.groups())) >= tuple(map(int, least.groups()))
    assert len(re.findall("^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    arguments = dict(remaining.split("=") for remaining in of(lines, "ARG"))
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    for name in arguments:
        assert any(f"${name}" in remaining or f"${{{name}" in remaining for remaining in of(lines, "RUN")), (
            name
        )


def test_the_manual_shows_it() -> None:
    text = (ROOT / "docs" / "guide" / "slurm.md").read_text(encoding="utf-8")
    for command in ("docker build -t megatfm .", "apptainer build", "enroot import", "TORCH_INDEX"):
        assert command in text, command
