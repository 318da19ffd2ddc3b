"""Traces that are forked."""

from tests.support.forked_traces import forked_traces, trace_server

__all__ = ["forked_traces", "trace_server"]
