"""Stoker as a Ray Serve application (extra `stoker[ray]`): replicas of engines, and an ingress that routes requests to them.

Ray Serve's configuration files name `stoker.ray:application`. Ray is imported when it is called.
"""

from __future__ import annotations

from typing import Any


def application(args: dict[str, Any]) -> Any:
    """The Ray Serve application of `ApplicationSettings` in the form of a dictionary. Raises ConfigError."""
    from stoker.ray.deployments import build_application
    from stoker.ray.settings import read_settings

    return build_application(read_settings(args))
