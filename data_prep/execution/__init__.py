"""Execution of a preparation: stages and their commits, the processes that share them, progress, and upload."""
