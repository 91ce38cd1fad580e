"""The model in transformers with which an engine is compared."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.verification.published_names import read_published_tensors


def load_reference_model(checkpoint: Checkpoint, dtype: str, trust_remote_code: bool) -> torch.nn.Module:
    """The checkpoint's model in transformers, in float32, with weights rounded to `dtype`."""
    rounded = getattr(torch, dtype)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws progress bars
        if checkpoint.gguf is not None:
            return _from_gguf(checkpoint, rounded).eval()
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        kind = type(AutoConfig.from_pretrained(str(checkpoint.path), **options))
        is_multimodal = kind in AutoModelForImageTextToText._model_mapping and kind not in AutoModelForCausalLM._model_mapping
        auto: Any = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        model: torch.nn.Module = auto.from_pretrained(str(checkpoint.path), dtype=rounded, **options)
        return model.float().eval()


def _from_gguf(checkpoint: Checkpoint, rounded: torch.dtype) -> torch.nn.Module:
    """The model with the tensors that Stoker read, because transformers' own GGUF reader requires the accelerate package."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    weights = {name: tensor.to(rounded).float() for name, tensor in read_published_tensors(checkpoint).items()}
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    model, report = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True)
    wrong = {*report["missing_keys"], *report["mismatched_keys"]} - {"lm_head.weight"}
    if wrong:
        raise ValueError(f"{sorted(map(str, wrong))[:3]} are not in the file")
    loaded: torch.nn.Module = model
    return loaded
