"""Prints docs/architectures.md from the architecture table: `python scripts/architectures.py > docs/architectures.md`."""

from __future__ import annotations

import sys
import textwrap

from stoker.builder.checkpoint.gguf.registry import ARCHITECTURES
from stoker.builder.tokenizers.gguf_pre_tokenizers import PATTERNS
from stoker.builder.tokenizers.published import TOKENIZERS
from stoker.models import Architecture, all_architectures
from stoker.quant.named_recipes import RECIPES

_HEAD = """# Architectures

This page is generated from the table in `src/stoker/models/` with `python scripts/architectures.py`; a test compares the two. The build
selects the row of a checkpoint by `architectures` in its config.json, or by `model_type` where `architectures` is absent.

Every row is tested with a tiny checkpoint of random weights in the layout that its publisher uses (`tests/parity/`). The engine runs in
float32. All logits must be within 1e-4 of the oracle's and 64 greedy tokens must be equal: with chunked prefill, in a batch with other
sequences, after a preemption, and with shared prefix blocks. On a GPU the same checkpoints run in float32, bfloat16, INT8 and FP8, eagerly
and in captured graphs (`tests/gpu/test_gpu_architectures.py`). All rows passed on an H200 or an H100, except InternLM 3, whose oracle was
not installed on those machines. Their transformers (5.17) normalizes the groups of Mamba 2 blocks together, unlike the published models and
transformers 5.23, so that Mamba 2 with several groups was compared there kernel by kernel.

Each row has at least four models: beside a plain one, three with unusual settings of its configuration class, such as other numbers and
sizes of heads, biases, tied heads, rotary methods, windows, layer types and routing. Those in `tests/parity/variants/` are compared in
memory, with 16 greedy tokens. Of 80 rows, the config.json of a published model is in `tests/parity/published/`, and its number of
parameters is compared; the others are listed with a reason in `tests/parity/published_files.py`.

Every architecture can be built with every quantization, because formats apply to linears and all architectures consist of the same linears:
{recipes}.
[Formats by architecture](matrix.md) lists all combinations, the formats of checkpoints included. Routers, embeddings, output heads and the
up-projections of latent attention are stored in the engine's dtype, except for the output heads of small models on a CPU.

Every key of a config.json is used, known to have no effect on the logits (`models/config_data.py`, and `ignored_keys` of a row), or
rejected by name; so is every tensor of a checkpoint. `tests/parity/test_config_keys.py` changes each key of each architecture that
transformers has a configuration class for, adds the keys of the others, and compares with transformers: the logits are equal, or the build
is refused. `tests/parity/test_refusals.py` removes each tensor of each architecture and adds a bias to each module. A
`partial_rotary_factor` is read where transformers reads it
(Phi, Phi-3, GLM, GPT-NeoX, Nemotron, StableLM, MiniMax M2). Elsewhere a factor other than 1 is refused: for Llama, transformers ignores it
and vLLM rotates a part of each head, so a file with it has two meanings. `stoker build --ignore-config-key NAME` accepts a key that you
know to have no effect.

A model can be split over any number of ranks. Heads that the ranks do not divide evenly are padded with zeros, and a key-value head that
several ranks need is stored on each of them. Layers with a [recurrent state](concepts/recurrent-states.md) require a number of ranks that
divides their heads.

The column GGUF has the values of `general.architecture` with which a row is read from a GGUF file. Every key of the metadata of that
architecture and every tensor is used, known to have no effect, or rejected by name. `tests/parity/test_gguf_architectures.py` writes such
a file from a tiny model of transformers, with the keys and names of the gguf library, and compares the logits: they are within 1e-4, and
the greedy tokens are equal. The format does not have a few settings. Sliding windows of Mistral and StarCoder 2 are used if a file has
them, the head of Baichuan 2 is used as it is stored, Qwen 1 is computed as within its trained length, bounds of the time steps of Mamba 2
are not known, and all norms of Falcon Mamba have the epsilon of the file. The multipliers of Falcon-H1 are part of the stored weights.

| family | `architectures` | GGUF | oracle | tensor parallel |
|---|---|---|---|---|
"""

_VERSIONS = """
## Model versions in the settings of other systems

A version setting is checked against config.json, and a contradiction is refused. It is given as `stoker build --model-version NAME=VALUE`
or as `option.NAME` of LMI.

| setting | architecture |
|---|---|
"""

_NOTES = """
## Intended differences from the reference

- Rotary tables are computed at load. `dynamic`, Qwen 1's NTK and `longrope` use the length that the engine was built for instead of the
  length of each sequence: cached keys keep the angles they were stored with, so otherwise an answer would depend on how it was scheduled.
  An engine whose `max_input_len` + `max_output_len` is within the trained length has exactly the tables of the reference.
- The prompt of a prefix LM (ChatGLM 1, GLM) attends in both directions. It is prefilled in one step and shares no prefix blocks. The prompt
  contains a mask token and ends in the token that starts the answer; all later tokens have the position of the mask token. ChatGLM uses
  [gMASK] before [MASK], GLM the first mask token of any kind.
- `rope_ratio` divides positions in ChatGLM 2 and multiplies the rotary base in ChatGLM 3 and GLM-4. No other field of config.json
  distinguishes them; `chatglm_model_version` or `_name_or_path` does.
- Checkpoints in FP8 blocks (DeepSeek V3) are imported without a change unless another quantization is requested. So are MXFP4
  checkpoints (gpt-oss).
- Falcon's ALiBi is exact. transformers rounds it to bfloat16, which changes results from position 256 on, or where the number of heads is
  not a power of two.
- Phi-3.5-MoE beyond its original context has the long frequencies of its publisher's code. transformers 5 uses the short ones there.
- Experts are routed in float32, whatever the dtype of the engine.

## Tokenizers

The build converts the tokenizer of a checkpoint to tokenizer.json and checks that texts survive encoding and decoding. If that is not
possible, it stops and names the missing file.

| files in the checkpoint | conversion |
|---|---|
| tokenizer.json | used unchanged |
| tokenizer.model of sentencepiece (Llama, Baichuan, InternLM, ...) | by Stoker; splits are compared with the sentencepiece library |
{classes}
| vocab.json and merges.txt, tiktoken.model, spiece.model, vocab.txt | by the converters of transformers |
| tokenizer.ggml.* of a GGUF file: `gpt2` (byte-level BPE) and `llama` (sentencepiece BPE) | by Stoker |

Keys under `tokenizer.` in a GGUF file that are not known are refused by name, and so are `precompiled_charsmap`,
`remove_extra_whitespaces`, `normalizer.lowercase` and `normalizer.strip_accents`, unless they are empty or false.

Pre-tokenizers of GGUF files (`tokenizer.ggml.pre`): {pre}.
Other names, and the kinds `bert`, `t5`, `rwkv` and `plamo2`, which no architecture of the table has, are rejected by name.

The tokenizer classes in this table are published as Python code with the weights. Stoker converts their vocabulary files and never runs
that code. Any other tokenizer class that is part of a checkpoint needs `--trust-remote-code`, or a tokenizer.json given with `--tokenizer`.
"""


def markdown() -> str:
    """The text of docs/architectures.md."""
    table = [_row(row) for row in sorted(all_architectures(), key=lambda row: row.family.lower())]
    versions = [f"| `{option}` | {row.name} |" for row in all_architectures() for option in row.version_options]
    recipes = ", ".join(name for name in RECIPES if name != "NO_QUANT")
    return (
        _HEAD.format(recipes=recipes)
        + "\n".join(table)
        + "\n"
        + _VERSIONS
        + "\n".join(versions)
        + "\n"
        + _NOTES.format(classes="\n".join(_classes()), pre=textwrap.fill(", ".join(sorted(PATTERNS)), 100))
    )


def _classes() -> list[str]:
    found = ((name, " and ".join(files)) for name, kinds in TOKENIZERS.items() for files, _ in kinds)
    return [f"| {files} of {name} | by Stoker |" for name, files in found]


def _row(row: Architecture) -> str:
    names = ", ".join(f"`{name}`" for name in (row.name, *row.aliases))
    return f"| {row.family} | {names} | {_gguf_names(row)} | {row.oracle} | {row.tensor_parallel} |"


def _gguf_names(row: Architecture) -> str:
    """The values of general.architecture that are read with this row."""
    found = (name for name, kind in sorted(ARCHITECTURES.items()) if set(kind.model_types) & set(row.model_types))
    return ", ".join(f"`{name}`" for name in found) or "–"


if __name__ == "__main__":
    sys.stdout.write(markdown())
