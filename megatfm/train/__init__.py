"""Training: the trainer, and what it needs besides model, data, engine, optimizers and tracking."""
