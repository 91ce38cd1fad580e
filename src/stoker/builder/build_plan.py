"""All decisions of a build, made before anything is written."""

from __future__ import annotations

import msgspec
import torch

from stoker.builder.checkpoint.checkpoint import Checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.conversion.canonical_names import CanonicalWeights
from stoker.builder.conversion.convert import Converter, PrecomputedTensors
from stoker.builder.conversion.stored_cache import StoredCacheTensors
from stoker.builder.conversion.tensor_plan import TensorPlan
from stoker.engine.config import EngineConfig


class BuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of `prepare`: sizes, dtype and formats of the engine, and the checkpoint tensors that make each engine tensor."""

    checkpoint: Checkpoint
    settings: BuildConfig
    config: EngineConfig  # of the engine; without files, and without a fingerprint until `prepare.add_fingerprint`
    tensor_plans: dict[str, TensorPlan]  # by engine name; empty for dummy weights

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of weights that are not quantized."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """The device on which weights are converted and calibrated: the target's kind of device if this machine has one, else the CPU."""
        return torch.device("cuda" if self.config.target.device == "cuda" and torch.cuda.is_available() else "cpu")

    def converter(self, device: torch.device | None = None, calibrated: PrecomputedTensors | None = None) -> Converter:
        """The converter of the checkpoint's tensors. `calibrated`: tensors that calibration has already quantized."""
        return Converter(self.config, self.tensor_plans, self.checkpoint.weights, device or self.device, calibrated)

    def stored_cache(self) -> StoredCacheTensors | None:
        """The tensors of the KV cache made of scales that the checkpoint stores; None if the recipe does not use them."""
        weights = self.checkpoint.weights
        if self.config.recipe.kv_scales != "stored" or not isinstance(weights, CanonicalWeights):
            return None
        return StoredCacheTensors(self.config, weights)
