"""Checkpoints in every supported layout: finding them, reading their tensors in bounded memory, and identifying them by content."""
