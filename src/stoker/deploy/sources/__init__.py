"""Fetches checkpoints and engines: resolves a path, hub id or address to a local path."""

from stoker.deploy.sources.addresses import resolve

__all__ = ["resolve"]
