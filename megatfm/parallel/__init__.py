"""Parallelism, laid over plain modules from outside: mesh, collectives, styles, plans. Modules by name only."""
