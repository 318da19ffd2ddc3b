"""One step under a layout against the same step on one process by plain autograd: are the gradients the same?"""
