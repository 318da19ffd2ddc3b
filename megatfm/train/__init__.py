"""Training: the trainer, and its parts besides model, data, engine, optimizers and tracking."""
