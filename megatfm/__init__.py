"""megatfm: pretraining of transformers under any parallel layout, each proven to be the same computation."""

__version__ = "0.1.0"
