"""How good a trained model is, beside what compressors reach on the same text."""
