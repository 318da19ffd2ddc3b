"""Experiment tracking: the files of a run, its console output, and its lock."""
