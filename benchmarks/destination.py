"""Where results go, made when the command is read: an hour's figures are not lost for want of a folder."""

from pathlib import Path


def folder(path: str) -> Path:
    """One that is there, made if need be: a type for argparse."""
    made = Path(path)
    made.mkdir(parents=True, exist_ok=True)
    return made


def file(path: str) -> Path:
    """A path whose folder is there, made if need be: a type for argparse."""
    made = Path(path)
    folder(str(made.parent))
    return made
