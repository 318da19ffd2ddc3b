"""The report of a run, and the comparison of several: self-contained HTML pages."""

from megatfm.report.page import write_report

__all__ = ["write_report"]
