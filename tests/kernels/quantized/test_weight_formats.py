"""Each format of quantized weights is one module per implementation, with the functions of its reference."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

from stoker.kernels import ops, reference

FORMATS = [module.name.removeprefix("quant_") for module in pkgutil.iter_modules(reference.__path__) if module.name.startswith("quant_")]
FUNCTIONS = ("prepare_weight", "packed_linear", "packed_embedding")


def test_formats_are_found_by_name() -> None:
    assert {"fp8", "int4", "int8"} <= set(FORMATS)
    launchers = ops._by_format("stoker.kernels.triton.gemm.quantized", "")
    kernels = ops._by_format("stoker.kernels.native", "quant_")
    assert {"fp8", "int4", "int8"} <= {module.__name__.rpartition(".")[2] for module in launchers.values()}
    assert {"quant_int4", "quant_int8"} <= {module.__name__.rpartition(".")[2] for module in kernels.values()}


@pytest.mark.parametrize(("package", "prefix"), [("stoker.kernels.triton.gemm.quantized", ""), ("stoker.kernels.native", "quant_")])
def test_implementations_have_the_functions_of_the_reference(package: str, prefix: str) -> None:
    for format_reference, implementation in ops._by_format(package, prefix).items():
        for name in FUNCTIONS:
            expected = getattr(format_reference, name, None)
            found = getattr(implementation, name, None)
            assert (found is None) == (expected is None), (implementation, name)
            if expected is not None and found is not None:
                assert inspect.signature(found).parameters.keys() == inspect.signature(expected).parameters.keys(), (implementation, name)
