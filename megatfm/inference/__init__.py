"""Inference: text by sampling or beam search, sentence embeddings, and evaluation of trained models."""
