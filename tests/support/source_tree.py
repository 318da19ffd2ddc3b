"""Source files of the repository as modules."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"data_prep", "launchers", "slurm"}
"""Rooms beside `megatfm`, imported through links in it."""


def module_of(path: Path) -> str:
    """Name of the module in a file of `megatfm` or of a folder beside it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["megatfm"] * (parts[0] in FOLDERS) + [*parts]).removesuffix(".__init__")
