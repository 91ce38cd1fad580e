"""Regular expressions of module names in quantization settings. They are matched in a time that is linear in the name (RE2)."""

from __future__ import annotations

from collections.abc import Callable

import re2

from stoker.base.errors import CheckpointError

MAX_PATTERN = 4096  # characters
MAX_MEMORY = 1 << 20  # bytes of a compiled pattern


def compile_pattern(pattern: str, setting: str) -> Callable[[str], bool]:
    """A function that tells whether a name begins with a match of `pattern`, as `re.match` does.

    `setting` is the path of the pattern in quantization_config. Raises CheckpointError for an invalid pattern, and for lookaround and
    backreferences, which cannot be matched in linear time.
    """
    options = re2.Options()
    options.log_errors, options.max_mem = False, MAX_MEMORY
    try:
        if len(pattern) > MAX_PATTERN:
            raise re2.error(f"it is longer than {MAX_PATTERN} characters")
        compiled = re2.compile(pattern, options)
    except re2.error as problem:
        reason = problem.args[0].decode(errors="replace") if isinstance(problem.args[0], bytes) else str(problem)
        raise CheckpointError(
            f"quantization_config: the pattern {pattern[:60]!r} in {setting} is not supported: {reason[:100]}.",
            cure="Use a pattern without lookaround and backreferences, or name the modules.",
        ) from None
    return lambda name: compiled.match(name) is not None
