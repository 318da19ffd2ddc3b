"""`make bare-machine` refuses where it can't work, and leaves what it showed to the machine as it was."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


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


def test_what_it_showed_is_there_afterwards(tmp_path: Path) -> None:
    """Also where a command fails, which is when a machine is removed with everything still mounted."""
    if not can_mount():
        pytest.skip("needs root, and a machine that lets it mount")
    displayed = tmp_path / "shown"
    displayed.mkdir()
    (displayed / "precious").write_text("kept", encoding="utf-8")
    status, output = run(
        tmp_path, BIND=str(displayed), PIP_INDEX_URL="https://example.org/simple", SECRET="x"
    )
    assert status == 3, output
    assert "shown: kept" in output
    assert "shown read-only" in output
    assert "PIP_INDEX_URL=https://example.org/simple" in output
    assert "SECRET" not in output
    assert [path.name for path in displayed.iterdir()] == ["precious"]
    assert not list((tmp_path / "tmp").iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")
