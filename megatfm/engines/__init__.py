"""Engines carry out steps of a laid-out model, behind `interface.py` and `registry.py`; each has a room of its own."""
