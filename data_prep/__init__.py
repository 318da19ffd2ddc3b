"""From corpora of text to a tokenizer and training shards: `data_prep.run(config)`, `python -m data_prep`."""

from data_prep.command import cli
from data_prep.pipeline import run
from data_prep.summary import PrepSummary

__all__ = ["PrepSummary", "cli", "run"]
