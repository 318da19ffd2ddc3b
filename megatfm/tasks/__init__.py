"""Downstream tasks: labelled files to examples, examples to a tokenized corpus, predictions to metrics."""
