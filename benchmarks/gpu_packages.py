"""Installs missing packages into a separate folder, beside the torch that is there.

    python benchmarks/gpu_packages.py FOLDER [--wheels WHEELS]

Each missing package is installed alone, then what it in turn needs, so that pip never touches torch and what came with
it. --wheels: take packages from this folder, without a network; made elsewhere by `pip download`.
"""

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import common

try:
    from packaging.requirements import Requirement
except ImportError:  # a bare Python has what pip brings along
    from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "transformers>=5.0"]
TORCH_PACKAGES = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Packages that belong to the installed torch."""


def find_missing(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that are not met here, dependencies included."""
    queue, checked, unmet = [Requirement(line) for line in requirements], set(), []
    while queue:
        requirement = queue.pop()
        extras = requirement.extras or {""}
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in checked or TORCH_PACKAGES.fullmatch(name):
            continue
        checked.add(name)
        try:
            installed = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{requirement.name}{requirement.specifier}")
            continue
        if not requirement.specifier.contains(installed.version, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier}")
            continue
        needs = (Requirement(line) for line in installed.requires or ())
        queue += [
            need for need in needs if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return sorted(unmet)


def main(arguments: list[str] | None = None) -> int:
    """Install until nothing is missing; return 1 after an error that names what can't be installed."""
    parser = common.make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path)
    args = parser.parse_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.path.insert(0, str(args.folder))
    source = ["--no-index", "--find-links", str(args.wheels)] if args.wheels else []
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
    tried: list[str] = []
    while names := find_missing([*project["dependencies"], *TESTS]):
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
