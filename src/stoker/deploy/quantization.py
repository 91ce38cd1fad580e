"""Names of quantization formats in Truss and LMI configurations."""

from __future__ import annotations

from stoker.base.fields.values import Choice

_FP4 = "weights of FP4 are not supported"
# Name in a Truss → (quantization format, dtype of the KV cache). Names of the first generation are in upper case and have the prefix
# WEIGHTS_ONLY_, which later generations omit.
_TRUSS: dict[str, tuple[str | None, str | None]] = {
    "no_quant": (None, None),
    "weights_only_int8": ("WEIGHTS_ONLY_INT8", None),
    "weights_int8": ("WEIGHTS_ONLY_INT8", None),
    "weights_kv_int8": ("WEIGHTS_ONLY_INT8", "int8"),
    "weights_only_int4": ("WEIGHTS_ONLY_INT4", None),
    "weights_int4": ("WEIGHTS_ONLY_INT4", None),
    "weights_kv_int4": ("WEIGHTS_ONLY_INT4", "int8"),
    "weights_int4_kv_int8": ("WEIGHTS_ONLY_INT4", "int8"),
    "smooth_quant": ("SMOOTH_QUANT", None),
    "fp8": ("FP8", None),
    "fp8_kv": ("FP8", "float8_e4m3fn"),
}
TRUSS = Choice(_TRUSS, unsupported={"fp8_mlp_only": "FP8 is applied to all linears", "fp4": _FP4, "fp4_kv": _FP4, "fp4_mlp_only": _FP4})

LMI = Choice({"smoothquant": "SMOOTH_QUANT", "awq": "AWQ", "fp8": "FP8", "gptq": "GPTQ"})

KV_CACHE = Choice({"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"})
