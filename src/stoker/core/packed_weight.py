"""The tensors of one weight, from the build to the kernel launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [N, K] of one linear, or the weights [E, N, K] of stacked experts, plain or quantized.

    A quantization format (`quant.formats`) makes it of stored tensors, `ops.prepare_weight` rearranges it once for its device, and
    `ops.packed_linear`, `ops.expert_up`, `ops.expert_down` and `ops.fused_layer` read it. `format` selects the kernels:

        dense   real = values                                       float32, bfloat16 or float16 [N, K]
        int8    real = values × scale (+ zero)                      int8 [N, K]
        fp8     real = values × scale                               float8_e4m3fn [N, K]
        int4    real = (values − zero) × scale, or values × scale + zero, as `zero_kind` says; two values per byte, uint8 [N, K / 2]:
                feature 2i in the low four bits of byte i, feature 2i + 1 in the high four bits. With `is_fp4` the four bits are
                FP4 values (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), and real = values × scale (× `row_scale`)

    One scale covers `block_rows` rows × `group_size` input features; a group_size of 0 stands for all features of a row. Scales are
    [N] without groups and [ceil(N / block_rows), ceil(K / group_size)] with groups; the last group of a row may be shorter. `zero` has the
    shape of `scale`. Tensors of stacked experts have one more axis in front.

    `layout` says how values and scales are arranged:

        stored   as above, which is also how engine files store them
        paired   int4 on a GPU: byte i of a pair of groups holds feature i of the first group in its low four bits and feature i of the
                 second in its high four bits. A row is padded to whole pairs of groups. Scales and zeros are [groups, N]
        quads    FP4 experts on a GPU: int16 [E, N, K / 4], a word with four values of two rows, in the order of
                 `kernels.triton.gemm.quantized.fp4`. A row is padded to a multiple of 64 features. Scales are int64
        blocks   int8 with groups and int4 on a CPU with AVX512-VNNI: uint8 [ceil(N / 16), size], blocks of 16 rows with their scales and
                 zeros, in the order of `kernels/native/blocks.h`. `shape` is [N, K]

    On a CPU, the values of a prepared fp8 weight are widened to float32, and those of blocks are multiplied by their scales, unless the C
    kernels read them as they are stored.
    """

    format: str  # dense, int8, fp8 or int4. `kernels.reference.quant_<format>` is its reference
    values: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None  # integer: the stored value that means 0.0; float: the real value of the stored value 0
    group_size: int = 0
    block_rows: int = 1
    bias: Tensor | None = None  # [(E,) N]
    # Activation quantization to the dtype of the weight: none; token: with a scale per row of x; static: with `input_scale`;
    # group: with a scale for every `group_size` features of a row.
    activations: str = "none"
    input_scale: Tensor | None = None  # float32 [1]
    column_order: Tensor | None = None  # int32 [(E,) K]: the input feature that each column multiplies; None: column i multiplies feature i
    layout: str = "stored"
    shape: tuple[int, int] | None = None  # of the layout `blocks`, whose values do not have it
    is_fp4: bool = False  # int4 only: the stored values are e2m1, and there is no `zero`
    row_scale: Tensor | None = None  # FP4 only: float32 [(E,) N], a further factor of each row
    device_data: Any = None  # further tensors for the device's kernel, made by `ops.prepare_weight`

    @property
    def num_experts(self) -> int:
        """The number E of stacked experts, or 0 for a single linear."""
        return self.values.shape[0] if self.values.dim() == 3 else 0

    @property
    def out_features(self) -> int:
        """The number N of output features."""
        return self.values.shape[-2] if self.shape is None else self.shape[0]

    @property
    def in_features(self) -> int:
        """The number K of input features, including the padding of the layouts `paired` and `quads`."""
        return self.values.shape[-1] * _VALUES_PER_ELEMENT.get(self.values.dtype, 1) if self.shape is None else self.shape[1]

    @property
    def row_bytes(self) -> int:
        """The size of the values of one row in bytes."""
        return self.values.shape[-1] * self.values.element_size()

    @property
    def zero_kind(self) -> str:
        """How values become real: none (no `zero`; int4 around 8), int (a zero point), float (an offset) or e2m1 (FP4 × scale)."""
        if self.is_fp4:
            return "e2m1"
        return "none" if self.zero is None else "float" if self.zero.is_floating_point() else "int"

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all tensors that a product reads, without the bias and `device_data`."""
        tensors = (self.values, self.scale, self.zero, self.row_scale, self.input_scale, self.column_order)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def expert(self, index: int) -> PackedWeight:
        """The weight of one of the stacked experts. Its tensors are views."""
        stacked = {name: tensor for name in _STACKED if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: tensor[index] for name, tensor in stacked.items()})


_VALUES_PER_ELEMENT = {torch.uint8: 2, torch.int16: 4}  # of the layouts of int4 with two values, and with four
_STACKED = ("values", "scale", "zero", "row_scale", "bias", "column_order")  # fields that have an axis of experts
