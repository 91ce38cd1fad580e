"""The model in transformers with which an engine is compared."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

from stoker.builder.checkpoint.checkpoint import Checkpoint


def load_reference_model(checkpoint: Checkpoint, dtype: str, trust_remote_code: bool) -> torch.nn.Module:
    """The checkpoint's model in transformers, in float32, with weights rounded to `dtype`."""
    rounded = getattr(torch, dtype)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws progress bars
        if checkpoint.gguf is not None:
            return _from_gguf(checkpoint, rounded).eval()
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(checkpoint.path), dtype=rounded, **options)
        return model.float().eval()


def _from_gguf(checkpoint: Checkpoint, rounded: torch.dtype) -> torch.nn.Module:
    """The model with the tensors that Stoker read, because transformers' own GGUF reader requires the accelerate package."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: checkpoint.weights.read(name).to(rounded) for name in checkpoint.weights.tensors}
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"lm_head.weight"}:
        raise ValueError(f"{sorted(missing)} are not in the file")
    return model
