"""An imaginary GPU: one rank of any number takes real steps of the real engine on tensors without memory."""
