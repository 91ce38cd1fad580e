"""Replaces parts of Triton's interpreter, so that it computes what a device computes.

Triton's own interpreter truncates float32 → bfloat16 and float8 instead of rounding to nearest even, multiplies the bit patterns of
bfloat16 operands in `dot`, and cannot turn its one-element scalars into loop bounds under NumPy >= 2.4. The replacements use torch.
Others save time and change no result: they skip work that Triton's own interpreter repeats in each call or whose result it discards.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# Types that NumPy lacks are stored as bit patterns: (dtype of the bit patterns, torch dtype of the values).
BIT_PATTERNS = {
    tl.bfloat16: (np.int16, torch.bfloat16),
    tl.float8e4nv: (np.int8, torch.float8_e4m3fn),
    tl.float8e5: (np.int8, torch.float8_e5m2),
}
_stock_cast = InterpreterBuilder.cast_impl
_stock_dot = InterpreterBuilder.create_dot
_stock_patch_lang = interpreter._patch_lang
_stock_patch_tensor = interpreter._patch_lang_tensor
_stock_np_dtype = interpreter._get_np_dtype
_stock_block_type_init = tl.block_type.__init__
_np_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_stock_broadcast = TritonSemantic.broadcast_impl_value
_stock_cast_in_language = TritonSemantic.cast
_stock_unwrap = tl.core._unwrap_if_constexpr
_SCALAR_SHAPE = (tl.constexpr(1), tl.tuple([]))


def _as_float(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype not in BIT_PATTERNS:
        return data
    bits, torch_dtype = BIT_PATTERNS[dtype]
    return torch.from_numpy(np.ascontiguousarray(data).view(bits)).view(torch_dtype).float().numpy()


def _cast(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype, *_: Any) -> TensorHandle:
    source, target = src.dtype.scalar, dst_type.scalar
    if source not in BIT_PATTERNS and target not in BIT_PATTERNS:
        return _stock_cast(self, src, dst_type)
    data = _as_float(src.data, source)
    if target not in BIT_PATTERNS:
        return TensorHandle(data.astype(interpreter._get_np_dtype(target)), target)
    bits, torch_dtype = BIT_PATTERNS[target]
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch_dtype)
    return TensorHandle(
        rounded.view(torch.int16 if bits is np.int16 else torch.int8).numpy().view(interpreter._get_np_dtype(target)), target
    )


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
    """Products of types with at most 16 bits are summed in float64: NumPy's float32 sums of a row depend on its place in the tile on some
    processors, and those of a device do not."""
    wide = [TensorHandle(_as_float(x.data, x.dtype.scalar), tl.float32) if x.dtype.scalar in BIT_PATTERNS else x for x in (a, b)]
    if d.dtype.scalar == tl.float32 and all(x.dtype.scalar.primitive_bitwidth <= 16 for x in (a, b)):
        product = np.matmul(*(x.data.astype(np.float64) for x in wide)).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)
    return _stock_dot(self, *(TensorHandle(x.data.astype(d.data.dtype), d.dtype.scalar) for x in wide), d, *rest)


def _patch_tensor(tensor: type, scope: Any) -> None:
    _stock_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_lang(fn: Any) -> Any:
    """Replace the functions of Triton's language for one launch, also those that its own library calls in `tl.core`."""
    return _stock_patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call_device_function(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call the function without replacing Triton's language again: the launch has done it, and restores it at its end."""
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as problem:
        raise interpreter.InterpreterError(repr(problem)) from problem


def _get_np_dtype(dtype: tl.dtype) -> np.dtype:
    """The NumPy dtype of a scalar, pointer or block type. Triton's function makes its table in each call."""
    scalar = dtype.scalar
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = _stock_np_dtype(scalar)
    return found


def _block_type_init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Fill in the attributes of an equal type that exists. Triton checks the shape again and makes the name of each type of its tuple.

    `tensor_shape`: (numel, shape) of tensors of this type, as compile-time constants. `sizes`: the shape as integers.
    """
    key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    found = _block_types.get(key)
    if found is None:
        _stock_block_type_init(self, element_ty, shape)
        self.tensor_shape = tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in self.shape])
        self.sizes = key[1:]
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(found)
        self.element_ty = element_ty


def _tensor_init(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.tensor_shape if type.is_block() else _SCALAR_SHAPE


def _with_element_ty(self: tl.block_type, scalar: tl.dtype) -> tl.block_type:
    """The type of blocks of this shape with elements of type `scalar`, without the checks of its constructor if one was made before."""
    found = _block_types.get((scalar.name, *self.sizes))
    if found is None:
        return tl.block_type(scalar, self.shape)
    made = tl.block_type.__new__(tl.block_type)
    vars(made).update(found)
    made.element_ty = scalar
    return made


def _unwrap_if_constexpr(value: Any) -> Any:
    """The kinds of values that are most frequent first."""
    if value.__class__ is tl.constexpr:
        return value.value
    return value if value.__class__ is tl.tensor else _stock_unwrap(value)


def _cast_in_language(self: TritonSemantic, x: tl.tensor, kind: tl.dtype, *rounding: Any) -> tl.tensor:
    """Without Triton's comparison of the types if the same object says that nothing is to be cast. `rounding`: `fp_downcast_rounding`."""
    return x if x.dtype is kind else _stock_cast_in_language(self, x, kind, *rounding)


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Triton compares each size as an object of its own, also of two equal shapes."""
    left, right = (x.type.sizes if x.type.is_block() else None for x in (lhs, rhs))
    if left == right:
        return lhs, rhs
    if left is None:
        return _splat(lhs, rhs.type), rhs
    if right is None:
        return lhs, _splat(rhs, lhs.type)
    if len(left) == len(right):
        sizes = tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
        if all(b in (1, size) for b, size in zip(right, sizes, strict=True)):
            return _expand(lhs, sizes), _expand(rhs, sizes)
    broadcast: tuple[tl.tensor, tl.tensor] = _stock_broadcast(self, lhs, rhs)
    return broadcast


def _expand(x: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    """A block of the shape `sizes` that repeats `x` along its sizes of 1."""
    if x.type.sizes == sizes:
        return x
    return tl.tensor(TensorHandle(np.broadcast_to(x.handle.data, sizes), x.dtype), tl.block_type(x.dtype, list(sizes)))


def _splat(scalar: tl.tensor, like: tl.block_type) -> tl.tensor:
    """A block of the shape of `like` whose elements all have the value and the type of `scalar`."""
    data = np.full(like.sizes, scalar.handle.data, scalar.handle.data.dtype)
    return tl.tensor(TensorHandle(data, scalar.dtype), like.with_element_ty(scalar.dtype))


def _sum(self: interpreter.ReduceOps, x: tl.tensor) -> tl.tensor:
    """Integers wrap: NumPy's sum of int32 is int64."""
    data = x.handle.data
    return self.to_tensor(np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype), x.dtype)


def _patch_attr(obj: Any, name: str, member: Any, builder: InterpreterBuilder, scope: Any) -> None:
    """Replace a function of the language by one that has the interpreter's semantics, without the check that it has some."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def install() -> None:
    np.seterr(all="ignore")  # float arithmetic on a device gives no warnings
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_fp_to_fp = _cast
    InterpreterBuilder.create_dot = _dot
    interpreter._patch_lang = _patch_lang
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._patch_attr = _patch_attr
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.cast = _cast_in_language
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
    tl.block_type.__init__ = _block_type_init
    tl.block_type.with_element_ty = _with_element_ty
    tl.tensor.__init__ = _tensor_init
    interpreter.ReduceOps.sum = _sum
    interpreter.InterpretedFunction.__call__ = _call_device_function
    # The assertion that an integer does not overflow is computed in int64 and then discarded, because `debug` is off.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    if not isinstance(tl.cdiv, interpreter.InterpretedFunction):
        raise RuntimeError("triton was imported without its interpreter: set TRITON_INTERPRET=1, or run tests/kernels alone")
