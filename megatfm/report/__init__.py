"""The report of a run: one self-contained HTML page."""

from megatfm.report.page import write_report

__all__ = ["write_report"]
