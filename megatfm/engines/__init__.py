"""Engines, which run training steps of a parallelized model. Other packages use `interface.py` and `registry.py`."""
