"""The engine directory: its configuration and files, how they are written, opened and checked, and the cache of built engines."""
