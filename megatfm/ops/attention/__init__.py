"""Scaled dot-product attention: a mask protocol, a reference, kernels, and the table by which one of them is chosen."""
