"""Parallelism of plain modules, which know nothing of it: mesh, collectives, styles, plans, pipeline stages."""
