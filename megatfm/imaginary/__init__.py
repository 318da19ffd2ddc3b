"""Imaginary GPU: one rank of a cluster takes real steps of the real engine on tensors without memory."""
