"""The engines and repositories of the chaos test: a random Llama of three layers, and damaged copies of its engine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "tests" / "builder"))

import tiny

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.prepare_server import engine_info
from stoker.deploy.triton.export import export_triton

LIMITS = Limits(max_batch_size=32, max_input_len=128, max_output_len=96, max_num_tokens=256, tokens_per_block=16)
KV_CACHE_TOKENS = 8192
GPU_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DAMAGES = ("truncated weights", "damaged weights header", "missing weights", "damaged config.json")


def make_engine(folder: Path, device: str, ranks: int) -> Path:
    """Build an engine in float32, so that the composition of batches changes no token."""
    checkpoint = tiny.save(tiny.model("llama", **(GPU_SIZES if device == "cuda" else {})), folder / f"checkpoint-{ranks}")
    config = BuildConfig(dtype="float32", device=device, limits=LIMITS, mapping=Mapping(tensor_parallel=ranks))
    return build(checkpoint, folder / f"engine-{ranks}", config, verify="files").path


def make_repository(engine: Path, folder: Path) -> Path:
    """A Triton repository of the engine."""
    options = {"decoupled_mode": "true", "max_tokens_in_paged_kv_cache": str(KV_CACHE_TOKENS)}
    export_triton(engine_info(engine), folder, options)
    return folder


def damage(engine: Path, folder: Path, kind: str, random: Random) -> Path:
    """A copy of the engine in `folder`, damaged in the way `kind` of DAMAGES says."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(engine, folder)
    weights = sorted(folder.glob("**/*.safetensors"))[0]
    data = weights.read_bytes()
    match kind:
        case "truncated weights":
            weights.write_bytes(data[: random.randrange(64, len(data) - 64)])
        case "damaged weights header":
            weights.write_bytes(random.randbytes(64) + data[64:])
        case "missing weights":
            weights.unlink()
        case "damaged config.json":
            config = folder / "config.json"
            config.write_bytes(config.read_bytes()[: random.randrange(1, 200)])
    return folder
