"""preprocessing and postprocessing inside Triton's Python backend. They use only the tokenizer and do not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import Limits
from stoker.deploy.deployment import Deployment
from stoker.deploy.triton.hosted.model import HostedModel, engine_directory, tokenizer_directory
from stoker.frontend.generation import GenerationService
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.client import ExecutorInfo
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.protocols.kserve.models.tokenizer import Postprocessing, Preprocessing


class TokenizerModel(HostedModel):
    """The model preprocessing or postprocessing."""

    def __init__(self, backend: Any, args: dict[str, str]) -> None:
        super().__init__(backend, args)
        kind = Preprocessing if self.model.kind == "preprocessing" else Postprocessing
        service = self.wait(tokenizer_service(self.deployment))
        self.run = kind(lambda: service, self.deployment.server).run


class _ModelFacts(msgspec.Struct):
    vocab_size: int


class _EngineFacts(msgspec.Struct):
    """The part of an engine's config.json that a tokenizer needs."""

    limits: Limits
    model: _ModelFacts


async def tokenizer_service(deployment: Deployment) -> GenerationService:
    """A service that encodes and decodes text, without an executor."""
    facts = msgspec.json.decode((Path(engine_directory(deployment)) / "config.json").read_bytes(), type=_EngineFacts)
    info = ExecutorInfo(
        limits=facts.limits,
        max_seq_len=facts.limits.max_seq_len,
        vocab_size=facts.model.vocab_size,
        device="none",
        kv_cache_tokens=0,
        model="tokenizer",
    )
    return GenerationService("tokenizer", Tokenizer.load(tokenizer_directory(deployment)), InProcessClient(InProcessMailbox(info)))
