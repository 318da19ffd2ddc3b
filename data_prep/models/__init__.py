"""Steps that have a model of ours read the text: the one place of data_prep that knows models."""
