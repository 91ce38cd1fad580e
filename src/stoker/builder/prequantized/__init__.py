"""Reads weights that a checkpoint already stores in 4 or 8 bits, without changing a value. One file per quantization method."""
