"""Experiment tracking: what a run leaves on disk and shows to people, and who may write there."""
