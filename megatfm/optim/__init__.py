"""Optimizers, parameter groups and learning rate schedules."""

from megatfm.optim import matrix_optimizers, optimizers  # these register themselves

__all__ = ["matrix_optimizers", "optimizers"]
