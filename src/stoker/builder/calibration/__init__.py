"""Calibration: text passes through the checkpoint layer by layer, and each layer is quantized by the inputs that were measured."""
