"""Everything that needs a GPU, part by part, with the torch that is there: `make gpu`.

    python3 benchmarks/gpu.py                       # all parts
    python3 benchmarks/gpu.py facts tests --out results

A bare machine with CUDA, Python and torch is enough. Missing packages go into a folder beside torch (--site): each is
installed alone, then what it in turn needs, so that pip never touches torch and what came with it. --wheels takes them
from a folder, without a network, that `pip download` made elsewhere. Each part ends within nine minutes and writes
OUT/DATE-gpu-PART.md, anew after every row. Ends with 1 where a part failed; the others run all the same.
"""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import common

try:
    from packaging.requirements import Requirement
except ImportError:  # a bare Python has what pip brings along
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

TESTS = ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "transformers>=5.0"]
TORCH_PACKAGES = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Packages that belong to the installed torch."""
PART_SECONDS, TIMED_OUT = "540", 124
"""How long a part may take, and what `timeout` ends with after that."""
SIZES = ("124m", "350m", "1.3b", "fp8", "6.7b")
PARTS: Mapping[str, Sequence[str]] = {
    "facts": ["benchmarks/gpu_facts.py"],
    "tests": ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"],
    **{size: ["benchmarks/gpu_training.py", "steps", "--case", size] for size in SIZES},
    "run": ["benchmarks/gpu_training.py", "run"],
}
"""Part → arguments of Python."""


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


def install_missing(site: Path, wheels: Path | None) -> None:
    """Install into a folder until nothing is missing. Raises SystemExit that names what can't be installed."""
    project = tomllib.loads((common.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.path.insert(0, str(site))
    source = ["--no-index", "--find-links", str(wheels)] if wheels else []
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
    tried: list[str] = []
    while names := find_missing([*project["dependencies"], *TESTS]):
        command = [*pip, *source, "--upgrade", "--target", str(site), *names]
        if names == tried or subprocess.run(command, check=False).returncode:
            reason = "these packages are not in WHEELS" if wheels else "pip can't install these packages"
            raise SystemExit(
                f"make gpu: {reason}: {', '.join(names)}. Without a network, run `pip download -d WHEELS "
                f"--no-deps {' '.join(names)}` where there is one, bring the folder and give WHEELS=FOLDER"
            )
        tried = names
        importlib.invalidate_caches()


def check_torch(*, tiny: bool) -> None:
    """Check that torch sees a GPU. Raises SystemExit. tiny: torch is enough."""
    try:
        import torch

        is_usable = tiny or torch.cuda.is_available()
    except ImportError:
        is_usable = False
    if not is_usable:
        raise SystemExit(f"make gpu: no torch with CUDA in {sys.executable}, or no GPU that it sees")


def make_environment(site: Path) -> dict[str, str]:
    paths = [str(common.ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # Every torch still reads the older name, so that nothing is set where a user has set that.
    if not environment.get("PYTORCH_CUDA_ALLOC_CONF"):
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return environment


def run_part(name: str, environment: Mapping[str, str], out: Path, *, tiny: bool) -> str:
    """Run a part; return how it failed, or nothing."""
    command = ["timeout", PART_SECONDS, sys.executable, *PARTS[name]]
    if name != "tests":
        command += ["--out", str(out), *(["--tiny"] if tiny else [])]
    capture = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if name == "tests" else {}
    finished = subprocess.run(command, cwd=common.ROOT, env=environment, **capture)  # type: ignore[call-overload]
    code = finished.returncode
    if name == "tests":
        lines = finished.stdout.splitlines()
        print("\n".join(lines[-3:]))
        outcome = f"`pytest -m gpu` ended with {code}:"
        page = [f"# Tests marked gpu, {common.today()}", "", outcome, "", "```text", *lines[-60:], "```"]
        common.write_text(common.make_dated_path(out, "gpu-tests.md"), "\n".join(page))
    if code == TIMED_OUT:
        return "its nine minutes were up"
    return f"exit {code}" if code else ""


def main() -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {' '.join(PARTS)}; all if none is given")
    parser.add_argument("--out", type=common.make_output_folder, default=common.RESULTS, help="folder for the results")
    parser.add_argument("--site", type=common.make_output_folder, default=common.ROOT / ".gpu-packages")
    parser.add_argument("--wheels", type=Path, help="folder of packages, where there is no network")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU: do the scripts work?")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    check_torch(tiny=args.tiny)
    install_missing(args.site, args.wheels)
    environment = make_environment(args.site)
    failed = []
    for name in args.parts or PARTS:
        print(f"== {name}", flush=True)
        if failure := run_part(name, environment, args.out.resolve(), tiny=args.tiny):
            failed.append(f"{name} ({failure})")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
