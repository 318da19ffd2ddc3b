"""Training: the loop and what it needs besides model, data and engine."""
