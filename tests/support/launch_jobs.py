"""`megatfm launch` in this process, and jobs for launchers."""

import argparse

from megatfm.config import load_config
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.job import Job


def launch(*words: str, config: str = "quickstart") -> int:
    """Run `megatfm launch CONFIG words`; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    add_arguments(parser)
    return main(parser.parse_intermixed_args([config, *words]))


def job(**changes: object) -> Job:
    """A training job of the quickstart, with other values in some fields."""
    fields: dict[str, object] = {
        "config_name": "quickstart",
        "overrides": (),
        "config": load_config("quickstart"),
        "name": "quickstart",
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]
