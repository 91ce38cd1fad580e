"""The table of protocols. `--protocols` and deployment formats use these names.

A new protocol is a package in this folder and one row here; docs/guides/protocol.md explains the steps.
"""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.server.protocol import Protocol
from stoker.server.protocols.anthropic.protocol import Anthropic
from stoker.server.protocols.console.protocol import Console
from stoker.server.protocols.debug.protocol import Debug
from stoker.server.protocols.health.protocol import Health
from stoker.server.protocols.kserve.http.protocol import KServeHTTP
from stoker.server.protocols.ollama.protocol import Ollama
from stoker.server.protocols.openai.protocol import OpenAI
from stoker.server.protocols.sagemaker.protocol import SageMaker
from stoker.server.protocols.truss.protocol import Truss

PROTOCOLS: Registry[type[Protocol]] = Registry("protocol")
PROTOCOLS.add("health", Health)
PROTOCOLS.add("debug", Debug)
PROTOCOLS.add("kserve", KServeHTTP)
PROTOCOLS.add("anthropic", Anthropic)  # before openai, whose paths contain its paths
PROTOCOLS.add("openai", OpenAI)
PROTOCOLS.add("ollama", Ollama)
PROTOCOLS.add("sagemaker", SageMaker)
PROTOCOLS.add("truss", Truss)
PROTOCOLS.add("console", Console)  # after truss, which may define the path /
