"""FP4 values (e2m1) and their scales that are powers of two (e8m0), as NVFP4 and MXFP4 checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.base.errors import CheckpointError
from stoker.builder.checkpoint.json_file import DOWNLOAD_AGAIN

E8M0 = (torch.uint8, torch.float8_e8m0fnu)  # dtypes in which scales that are powers of two are stored


def mxfp4_tensors(name: str, values: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The stored tensors of `Fp4` with e8m0 scales, from bytes [..., in / 2] whose low four bits come first, and scales [..., groups].

    Raises CheckpointError for a scale that is NaN; `name` is that of the weight.
    """
    exponents = scales.view(torch.uint8)
    if bool((exponents == 255).any()):
        raise CheckpointError(f"{name} has a scale that is NaN (e8m0 255).", cure=DOWNLOAD_AGAIN)
    return {"weight": values.view(torch.uint8).contiguous(), "scale": exponents.contiguous()}


def nvfp4_tensors(values: Tensor, scales: Tensor, tensor_scale: Tensor) -> dict[str, Tensor]:
    """The stored tensors of `Fp4` with e4m3 scales [out, groups], from bytes [out, in / 2] and one float32 scale of the whole weight."""
    row_scale = tensor_scale.float().reshape(1).expand(values.shape[0]).contiguous()
    return {"weight": values.view(torch.uint8).contiguous(), "scale": scales.contiguous(), "row_scale": row_scale}


def e8m0_values(scales: Tensor) -> Tensor:
    """float32: 2 ** (s - 127) for the bytes s of `scales`; NaN for 255."""
    exponent = scales.view(torch.uint8).to(torch.int32)
    values = torch.ldexp(torch.ones(scales.shape), exponent - 127)
    return values.masked_fill(exponent == 255, torch.nan)
