"""The table of architectures as a page: `python scripts/architectures.py > docs/architectures.md`."""

from __future__ import annotations

import sys

from stoker.models import Architecture, rows

_HEAD = """# Architectures

Made from the table in `src/stoker/models/` by `python scripts/architectures.py`; a test compares it. `architectures` of config.json
decides which row reads a checkpoint, or `model_type` where that is absent. The proof of each row is a tiny random checkpoint in its own
layout, built and run in float32: all logits within 2e-4 of the oracle's and 64 greedy tokens equal, prefilled in chunks, in a crowd,
after a preemption and on top of shared blocks (`tests/parity/`).

Each architecture can be built with every weight format: formats own linears, and all rows are made of the same ones. Routers,
embeddings, heads and latent attention's up-projections stay in the engine's dtype.

Any number of ranks can share a model: heads that don't divide are filled up with zeros, and a key/value head that several ranks need is
copied.

| family | `architectures` | oracle | tensor parallel |
|---|---|---|---|
"""

_FOOT = """
## Versions that other systems' settings name

A setting is checked against config.json, which decides; a contradiction is refused.

| setting | architecture |
|---|---|
"""

_NOTES = """
## What differs from the reference on purpose

- Rotary tables are fixed at load. `dynamic`, Qwen 1's NTK and `longrope` look at the length the engine was built for, not at each
  sequence's: cached keys keep the angles they were stored with, so anything else makes an answer depend on how it was scheduled. An
  engine whose `max_input_len` + `max_output_len` stays within the trained length has the reference's tables exactly.
- Prefix language models (ChatGLM 1, GLM) see their prompt in both directions: it is prefilled in one step and shares no prefix.
- `rope_ratio` stretches positions in ChatGLM 2 and the rotary base in ChatGLM 3 and GLM-4, and no field of config.json tells them
  apart: `chatglm_model_version` does, or `_name_or_path`.
- FP8 block-scaled (DeepSeek V3) and MXFP4 (gpt-oss) checkpoints are widened as they are read; the engine's own format is chosen by
  the build.
- Falcon's ALiBi is exact; transformers rounds it to bfloat16, which shows from position 256 on or where heads are no power of two.
- Experts are routed in float32 whatever the engine's dtype.
"""


def markdown() -> str:
    """The whole page."""
    table = [_row(row) for row in sorted(rows(), key=lambda row: row.family.lower())]
    versions = [f"| `{option}` | {row.name} |" for row in rows() for option in row.versions]
    return _HEAD + "\n".join(table) + "\n" + _FOOT + "\n".join(versions) + "\n" + _NOTES


def _row(row: Architecture) -> str:
    names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
    return f"| {row.family} | {names} | {row.oracle} | {row.tensor_parallel} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
