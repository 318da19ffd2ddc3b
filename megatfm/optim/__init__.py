"""Optimizers by name, the parameters that they move, and the learning rate over a run."""

from megatfm.optim import matrix_optimizers, optimizers  # these register themselves

__all__ = ["matrix_optimizers", "optimizers"]
