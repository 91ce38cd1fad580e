"""The protocols a server can speak, by the name that `--protocols` and deployment formats use."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocol import Protocol
from stoker.server.protocols.health import Health
from stoker.server.protocols.kserve_http import KServeHTTP
from stoker.server.protocols.openai.api import OpenAI
from stoker.server.protocols.sagemaker.api import SageMaker
from stoker.server.protocols.truss.api import Truss

PROTOCOLS: Registry[type[Protocol]] = Registry("protocol")
PROTOCOLS.add("health", Health)
PROTOCOLS.add("kserve", KServeHTTP)
PROTOCOLS.add("openai", OpenAI)
PROTOCOLS.add("sagemaker", SageMaker)
PROTOCOLS.add("truss", Truss)
