"""Where checkpoints and engines come from: each kind of address, resolved to a local path."""

from stoker.deploy.sources.resolve import resolve

__all__ = ["resolve"]
