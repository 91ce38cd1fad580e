"""Objects that describe the served models."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from stoker.frontend.service import Service
from stoker.server.protocols.common.parsers.selection import with_parsers
from stoker.server.settings import ServerSettings

LATEST = ":latest"
NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded


def model_object(name: str, service: Service, started: str) -> dict[str, Any]:
    """An entry of /api/tags. The size of the engine's files is not known here, and 0."""
    return {
        "name": name,
        "model": name,
        "modified_at": started,
        "size": 0,
        "digest": _digest(name, service),
        "details": _details(service),
    }


def running_object(name: str, service: Service) -> dict[str, Any]:
    """An entry of /api/ps."""
    return {
        "name": name,
        "model": name,
        "size": 0,
        "size_vram": 0,
        "digest": _digest(name, service),
        "details": _details(service),
        "expires_at": NEVER,
        "context_length": service.max_seq_len,
    }


def show_object(service: Service, settings: ServerSettings, started: str) -> dict[str, Any]:
    """The response of /api/show."""
    family = _family(service)
    settings = with_parsers(settings, service)
    capabilities = {"completion": True, "tools": settings.tool_parser is not None, "thinking": settings.reasoning_parser is not None}
    return {
        "modelfile": "",
        "parameters": "",
        "template": service.chat_template or "",
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            "general.basename": service.model_name,
            f"{family}.context_length": service.max_seq_len,
            f"{family}.vocab_size": service.info.vocab_size,
        },
        "capabilities": [name for name, available in capabilities.items() if available],
        "modified_at": started,
    }


def _details(service: Service) -> dict[str, Any]:
    """The member `details` of a model."""
    family = _family(service)
    return {
        "parent_model": "",
        "format": "stoker",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _family(service: Service) -> str:
    """The model's architecture in lower case."""
    return service.info.model.lower()


def _digest(name: str, service: Service) -> str:
    """An identifier of the model and its limits."""
    return hashlib.sha256(msgspec.json.encode([name, service.info])).hexdigest()
