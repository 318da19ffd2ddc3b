"""Layers that models are built from, registered by name. No layer knows of ranks or process groups."""
