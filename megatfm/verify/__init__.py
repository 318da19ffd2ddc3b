"""Check that a step under a layout computes the same gradients as plain autograd on one process."""
