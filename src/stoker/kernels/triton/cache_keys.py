"""Cache keys of kernels that do not depend on which kernels were compiled before.

Triton names a compiled kernel by a digest of its source, of the functions it calls and of the constants (`tl.constexpr` globals) that these
use. `DependenciesFinder._update_hash` (Triton 3.6) merges the constants of a called function before it computes that function's own digest,
which is what finds them: a function that is reached for the first time contributes none. So a kernel's digest depends on whether another
kernel with the same helper functions was hashed before, and a start would look for other names than the build has compiled.

`install` computes the digest of a called function first. The package's __init__ calls it before any kernel is hashed.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder, JITCallable

_merge = DependenciesFinder._update_hash


def _update_hash(self: DependenciesFinder, func: JITCallable[Any]) -> None:
    """Replaces Triton's method: compute the called function's own digest, then merge its constants."""
    func.cache_key  # noqa: B018 - a property that fills func.used_global_vals
    _merge(self, func)


def install() -> None:
    """Replace Triton's method. `tests/kernels/compiled/test_cache_keys.py` fails for a version of Triton that needs another fix."""
    DependenciesFinder._update_hash = _update_hash  # type: ignore[method-assign]
