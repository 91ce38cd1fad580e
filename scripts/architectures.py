"""The table of architectures as a page: `python scripts/architectures.py > docs/architectures.md`."""

from __future__ import annotations

import sys

from stoker.builder.published_tokenizers import TOKENIZERS
from stoker.models import Architecture, rows
from stoker.quant.names import RECIPES

_HEAD = """# Architectures

Made from the table in `src/stoker/models/` by `python scripts/architectures.py`; a test compares it. `architectures` of config.json
decides which row reads a checkpoint, or `model_type` where that is absent. The proof of each row is a tiny random checkpoint in its own
layout, built and run in float32: all logits within 2e-4 of the oracle's and 64 greedy tokens equal, prefilled in chunks, in a crowd,
after a preemption and on top of shared blocks (`tests/parity/`). On a GPU the same checkpoints run in float32, bfloat16, INT8 and FP8,
by hand and through captured steps (`tests/gpu/test_gpu_architectures.py`); all did on an H200 but InternLM 3, whose oracle that machine
lacked.

Each architecture can be built with every quantization: formats own linears, and all rows are made of the same ones. They are
{recipes}.
Each row is built and run in eight bits by the tests. FP8_BLOCK wants fused parts of multiples of 128 rows, which falcon-7b, gpt-oss,
DeepSeek-V2-Lite and DeepSeek-MoE lack; they are refused by name. Routers, embeddings, heads and latent attention's up-projections stay
in the engine's dtype, but for small models' heads on a CPU.

Any number of ranks can share a model: heads that don't divide are filled up with zeros, and a key/value head that several ranks need is
copied.

| family | `architectures` | oracle | tensor parallel |
|---|---|---|---|
"""

_FOOT = """
## Versions that other systems' settings name

A setting is checked against config.json; a contradiction is refused. `stoker build --model-version NAME=VALUE` gives it, or LMI's
`option.NAME`.

| setting | architecture |
|---|---|
"""

_NOTES = """
## What differs from the reference on purpose

- Rotary tables are fixed at load. `dynamic`, Qwen 1's NTK and `longrope` look at the length the engine was built for, not at each
  sequence's: cached keys keep the angles they were stored with, so anything else makes an answer depend on how it was scheduled. An
  engine whose `max_input_len` + `max_output_len` stays within the trained length has the reference's tables exactly.
- Prefix language models (ChatGLM 1, GLM) see their prompt in both directions: it is prefilled in one step and shares no prefix. The
  prompt holds a mask token and ends in the token that starts the answer, at whose place all later tokens sit: ChatGLM takes [gMASK] before
  [MASK], GLM the first mask of any kind.
- `rope_ratio` stretches positions in ChatGLM 2 and the rotary base in ChatGLM 3 and GLM-4, and no field of config.json tells them
  apart: `chatglm_model_version` does, or `_name_or_path`.
- FP8 block-scaled checkpoints (DeepSeek V3) stay as they are unless another quantization is asked for; MXFP4 ones (gpt-oss) are
  widened as they are read, and the build chooses the engine's format.
- Falcon's ALiBi is exact; transformers rounds it to bfloat16, which shows from position 256 on or where heads are no power of two.
- Experts are routed in float32 whatever the engine's dtype.

## Tokenizers

Each becomes a tokenizer.json in the engine that gives texts back as they were, or the build refuses and names the file that it lacks.

| what the checkpoint has | how it is read |
|---|---|
| tokenizer.json | as it is |
| tokenizer.model of sentencepiece (Llama, Baichuan, InternLM, ...) | converted here; splits are compared with the sentencepiece library's |
{classes}
| vocab.json and merges.txt, tiktoken.model, spiece.model, vocab.txt | by the converters of transformers |

The classes are Python code beside the weights. None of it is run: the vocabulary file is enough. Any other class that a checkpoint brings
itself needs `--trust-remote-code`, or a tokenizer.json from elsewhere (`--tokenizer`).
"""


def markdown() -> str:
    """The whole page."""
    table = [_row(row) for row in sorted(rows(), key=lambda row: row.family.lower())]
    versions = [f"| `{option}` | {row.name} |" for row in rows() for option in row.versions]
    recipes = ", ".join(name for name in RECIPES if name != "NO_QUANT")
    return (
        _HEAD.format(recipes=recipes)
        + "\n".join(table)
        + "\n"
        + _FOOT
        + "\n".join(versions)
        + "\n"
        + _NOTES.format(classes="\n".join(_classes()))
    )


def _classes() -> list[str]:
    found = ((name, " and ".join(files)) for name, kinds in TOKENIZERS.items() for files, _ in kinds)
    return [f"| {files} of {name} | converted here |" for name, files in found]


def _row(row: Architecture) -> str:
    names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
    return f"| {row.family} | {names} | {row.oracle} | {row.tensor_parallel} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
