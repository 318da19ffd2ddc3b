"""Shared by tests: processes, grids of layouts, references, memory that nobody wrote."""
