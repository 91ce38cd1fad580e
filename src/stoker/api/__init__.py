"""The Python API: `stoker.LLM` and its settings."""
