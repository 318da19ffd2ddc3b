"""Cleaning steps by name: ours, and those of plugins."""

from megatfm.data_prep.steps.rule import Filter
from megatfm.registry import Registry

STEPS: Registry[type[Filter]] = Registry("cleaning step")
"""Made as `step(config)`, from a table of `[[steps]]`; then `apply(document, counts)` for each document."""
