"""Builds an engine from a checkpoint. `build.py` is the entry point."""
