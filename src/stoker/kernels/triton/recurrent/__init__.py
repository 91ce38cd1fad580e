"""Kernels of layers with recurrent states: the short convolution, the recurrences, and the gated norm after them."""
