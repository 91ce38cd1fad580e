"""A build holds at most a few layers in memory, whatever the size of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf_files
import pytest
import tiny
import torch
from safetensors.torch import save_file

from stoker.base.errors import EngineError
from stoker.engine.safetensors_header import num_bytes, read_header

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, MLP = 24, 512, 1536
LAYER_BYTES = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP) * 4  # 13.6 MB in float32; the model has 326 MB

BUILD = """
import sys
from pathlib import Path
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
def field(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024
format_settings = {"compensate": False} if sys.argv[4] == "FP8" else {}  # as for wide models: no calibration
settings = BuildConfig(device="cpu", dtype=sys.argv[5], quantization=sys.argv[4] or None, quantization_settings=format_settings)
build(sys.argv[1], sys.argv[2] + "-warm", settings, verify="files")
before = field("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
build(sys.argv[3], sys.argv[2], settings, verify="files")
print(field("VmHWM") - before)
"""


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint of LAYERS equal layers."""
    path = tmp_path_factory.mktemp("big")
    small = tiny.model(num_hidden_layers=1)
    names = {n: tuple(HIDDEN if s == 48 else MLP if s == 80 else s for s in t.shape) for n, t in small.state_dict().items()}
    wide = {n: (HIDDEN, HIDDEN) if "self_attn" in n else shape for n, shape in names.items()}
    tensors = {
        name.replace(".0.", f".{i}."): torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in wide.items()
        for i in range(LAYERS if ".layers.0." in name else 1)
    }
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "head_dim": 64, "num_attention_heads": 8}
    config = tiny.SIZES | sizes | {"num_key_value_heads": 8, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (path / "config.json").write_text(json.dumps(config))
    tiny.save_tokenizer(path)
    if request.param == "safetensors":
        save_file(tensors, path / "model.safetensors")
    else:
        torch.save(tensors, path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize("quantization", ["NO_QUANT", "FP8", "WEIGHTS_ONLY_INT8"])
def test_peak_memory_is_under_three_layers(quantization: str, big: Path, llama: Path, tmp_path: Path) -> None:
    peak = peak_of_build(big, tmp_path / "engine", llama, quantization, "float32")
    written = (tmp_path / "engine" / "rank0.safetensors").stat().st_size
    assert written > LAYERS * LAYER_BYTES // (4 if quantization != "NO_QUANT" else 1)
    assert peak < 3 * LAYER_BYTES, f"{peak / LAYER_BYTES:.2f} layers"


@pytest.mark.parametrize(
    "kinds",
    [
        {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"},  # Q4_K_M: embeddings become plain numbers
        {"": "IQ4_XS", "output": "Q6_K"},  # stored in 8 bits
        {"": "Q2_K", "attn_v": "Q3_K", "ffn_down": "Q3_K", "output": "Q6_K"},
    ],
    ids=lambda kinds: kinds[""],
)
def test_peak_memory_of_gguf_is_under_three_layers_and_the_vocabulary(kinds: dict[str, str], tmp_path: Path) -> None:
    """Blocks are unpacked in chunks: intermediate results of a whole matrix would have several times its size."""
    small = gguf_files.write_random(tmp_path / "small.gguf", kinds, layers=1, hidden=256, mlp=256, vocab=64)
    source = gguf_files.write_random(tmp_path / "big.gguf", kinds, layers=3, hidden=2048, mlp=5632, vocab=8192)
    peak = peak_of_build(source, tmp_path / "engine", small, "", "bfloat16")
    entries = read_header(tmp_path / "engine" / "rank0.safetensors", EngineError, "")
    sizes = {name: num_bytes(entry.shape, entry.dtype) for name, entry in entries.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    vocabulary = max(sum(size for name, size in sizes.items() if name.startswith(f"{table}.")) for table in ("embed", "head"))
    assert layer > 50e6, "too small for the bound to mean something"
    assert peak < 3 * layer + vocabulary, f"{(peak - vocabulary) / layer:.2f} layers and the vocabulary"


def peak_of_build(source: Path, engine: Path, warm_up: Path, quantization: str, dtype: str) -> int:
    """The bytes that a process needs for a build, beyond those that it has after the build of `warm_up`."""
    command = [sys.executable, "-c", BUILD, str(warm_up), str(engine), str(source), quantization, dtype]
    # Return all freed tensors to the system: malloc would retain tensors as small as these.
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
