"""Estimates of a run before it is queued: memory by rank, time, traffic, and which layout is best."""
