"""Installs beside the torch that is there what a script needs and this Python lacks, into a folder of its own.

    python benchmarks/gpu_packages.py FOLDER [--wheels WHEELS]

Each missing package is installed alone, then what it in turn needs, so that pip never touches torch and what came with
it. --wheels: take packages from this folder, without a network; made elsewhere by `pip download`.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:  # a bare Python has what pip brings along
    from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "transformers>=5.0"]
OWN = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""What belongs to the torch that is there."""


def missing(requirements: Iterable[str]) -> list[str]:
    """Of requirements and of what those need, the ones that are not met here."""
    queue, seen, found = [Requirement(line) for line in requirements], set(), []
    while queue:
        wanted = queue.pop()
        extras = wanted.extras or {""}
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = wanted.name.lower().replace("_", "-")
        if name in seen or OWN.fullmatch(name):
            continue
        seen.add(name)
        try:
            there = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            found.append(f"{wanted.name}{wanted.specifier}")
            continue
        if not wanted.specifier.contains(there.version, prereleases=True):
            found.append(f"{wanted.name}{wanted.specifier}")
            continue
        needs = (Requirement(line) for line in there.requires or ())
        queue += [
            need
            for need in needs
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    """Install until nothing is missing; 1 with a line that says what can't be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path)
    args = parser.parse_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.path.insert(0, str(args.folder))
    source = ["--no-index", "--find-links", str(args.wheels)] if args.wheels else []
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
    tried: list[str] = []
    while names := missing([*project["dependencies"], *TESTS]):
        command = [*pip, *source, "--upgrade", "--target", str(args.folder), *names]
        if names == tried or subprocess.run(command, check=False).returncode:
            folder = "these packages are not in WHEELS" if args.wheels else "pip can't install these packages"
            print(
                f"make gpu: {folder}: {', '.join(names)}. Without a network, run `pip download -d WHEELS "
                f"--no-deps {' '.join(names)}` where there is one, bring the folder and give WHEELS=FOLDER",
                file=sys.stderr,
            )
            return 1
        tried = names
        importlib.invalidate_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
