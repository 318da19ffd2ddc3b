"""From text to a tokenizer and training shards: `megatfm.data_prep.run(config)`, `python -m megatfm.data_prep`."""

from typing import TYPE_CHECKING

from megatfm.config.prep import PrepConfig
from megatfm.data_prep.cli import cli
from megatfm.data_prep.execution.progress import PrepSummary
from megatfm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from megatfm.data_prep.execution.executors import Executor
    from megatfm.data_prep.execution.progress import Reporter

__all__ = ["PrepSummary", "cli", "run"]


def run(
    config: PrepConfig, reporter: "Reporter | None" = None, make_executor: "Callable[[Path], Executor] | None" = None
) -> PrepSummary:
    """Prepare a corpus as `config` says; see `megatfm.data_prep.pipeline.run`."""
    # Imported on use: the command line of megatfm must start without the libraries of the "prep" extra.
    try:
        from megatfm.data_prep.pipeline import run as run_pipeline
    except ModuleNotFoundError as error:
        raise UsageError(f"the package {error.name} is missing: install it with pip install 'megatfm[prep]'") from error
    return run_pipeline(config, reporter, make_executor)
