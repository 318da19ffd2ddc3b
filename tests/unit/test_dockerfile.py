"""The Dockerfile, and `make bare-machine`."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.documentation import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KNOWN = {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """Instructions and what follows them, lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def select_lines(lines: list[tuple[str, str]], instruction: str) -> list[str]:
    return [line for word, line in lines if word == instruction]


def test_its_instructions_are_docker_s(lines: list[tuple[str, str]]) -> None:
    assert {word for word, _ in lines} <= KNOWN
    assert lines[0][0] == "FROM"
    assert json.loads(select_lines(lines, "CMD")[0])[0] in PROJECT["project"]["scripts"]


def test_the_dockerfile_copies_what_an_install_needs(lines: list[tuple[str, str]]) -> None:
    copied = {source for remaining in select_lines(lines, "COPY") for source in shlex.split(remaining)[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {name.partition(".")[0] for name in include}
    links = [path for name in packages for path in (ROOT / name).iterdir() if path.is_symlink()]
    packages |= {path.resolve().relative_to(ROOT).parts[0] for path in links}  # a copied link is only a name
    files = {
        "pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"],
    }  # fmt: skip
    assert copied == packages | files
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
    assert {".git", "runs", "corpora"} <= set(ignored)


def test_python_torch_and_extras_are_the_project_s(lines: list[tuple[str, str]]) -> None:
    image = re.fullmatch(r"python:(\d+)\.(\d+)-slim-bookworm", select_lines(lines, "FROM")[0])
    assert image
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"])
    assert least
    assert tuple(map(int, image.groups())) >= tuple(map(int, least.groups()))
    assert len(re.findall("^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    arguments = dict(remaining.split("=") for remaining in select_lines(lines, "ARG"))
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    instructions = list(select_lines(lines, "RUN"))
    for name in arguments:
        assert any(f"${name}" in line or f"${{{name}" in line for line in instructions), name


def test_the_manual_shows_it() -> None:
    text = (ROOT / "docs" / "guide" / "slurm.md").read_text(encoding="utf-8")
    for command in ("docker build -t megatfm .", "apptainer build", "enroot import", "TORCH_INDEX"):
        assert command in text, command


DEBOOTSTRAP = 'mkdir -p "$4/proc" "$4/sys" "$4/dev/shm" "$4/dev/pts" "$4/root" "$4/srv" "$4/etc"\n'
CHROOT = """
[[ "$*" != *" make "* ]] || {
  echo "shown: $(cat "$1$BIND/precious")"
  touch "$1$BIND/written" || echo "shown read-only"
  echo "passed: $(env -i "${@:3:7}" | tr '\\n' ' ')"
  exit 3
}
"""


def run(path: Path, **variables: str) -> tuple[int, str]:
    """Run it with stand-ins for debootstrap and chroot; returns the exit status and what it printed."""
    programs = path / "programs"
    programs.mkdir(exist_ok=True)
    for name, code in (("debootstrap", DEBOOTSTRAP), ("chroot", CHROOT)):
        (programs / name).write_text(f"#!/bin/bash\n{code}", encoding="utf-8")
        (programs / name).chmod(0o755)
    (path / "tmp").mkdir(exist_ok=True)
    paths = f"{programs}:{os.environ['PATH']}"
    command = ["bash", ".ci/bare-machine", "quickstart"]
    environment = {**os.environ, "CI": "", "PATH": paths, "TMPDIR": str(path / "tmp"), **variables}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return completed.returncode, completed.stdout + completed.stderr


def can_mount() -> bool:
    return os.getuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


def test_the_script_refuses_with_a_reason(tmp_path: Path) -> None:
    assert run(tmp_path, CI="true")[1].startswith("make bare-machine: not in CI")
    if os.getuid():
        assert "needs root" in run(tmp_path)[1]
        return
    for folder in ("relative", str(tmp_path / "missing")):
        status, output = run(tmp_path, BIND=folder)
        assert (status, output.partition(":")[2][:8]) == (1, " BIND = ")
        assert folder in output


def test_a_bare_machine_s_mounts_survive_its_removal(tmp_path: Path) -> None:
    """A machine whose command failed is removed with everything still mounted."""
    if not can_mount():
        pytest.skip("needs root, and a machine that lets it mount")
    displayed = tmp_path / "shown"
    displayed.mkdir()
    (displayed / "precious").write_text("kept", encoding="utf-8")
    status, output = run(tmp_path, BIND=str(displayed), PIP_INDEX_URL="https://example.org/simple", SECRET="x")
    assert status == 3, output
    assert "shown: kept" in output
    assert "shown read-only" in output
    assert "PIP_INDEX_URL=https://example.org/simple" in output
    assert "SECRET" not in output
    assert [path.name for path in displayed.iterdir()] == ["precious"]
    assert not list((tmp_path / "tmp").iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")
