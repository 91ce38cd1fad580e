"""Quantization: formats of weights, calibration, the spreading of keys in a quantized KV cache, and recipes."""
