"""Checks of a written engine: its files, its greedy tokens beside the checkpoint's, and what quantization cost in accuracy."""
