"""The launches of every published model can be listed at its full size, so that a build can compile all its kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PUBLISHED = sorted((Path(__file__).parents[1] / "parity" / "published").glob("*.json"))
FORMATS = [{}, {"quantization": "FP8_KV"}, {"quantization": "AWQ", "kv_cache_dtype": "int8"}]
NUM_PARTS = 3  # of a format's models, so that no test takes a minute
FUSED = ("Llama-2-7b-hf", "Mistral-7B-v0.1", "Qwen2.5-7B-Instruct")

# Tracing sets Triton's process-wide target, so it runs in its own process. Prints the number of variants per kernel, a line per model.
LIST = """
import json, sys
from collections import Counter
from pathlib import Path
from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.runtime.worker.aot_trace import kernels_of
limits = Limits(max_batch_size=4, max_input_len=64, max_output_len=64, max_num_tokens=64)
settings = {"device": "cuda", "compute_capability": "9.0", "dtype": "bfloat16", "dummy_weights": True, **json.loads(sys.argv[2])}
config = BuildConfig(limits=limits, **settings)
for file in map(Path, sys.argv[3:]):
    folder = Path(sys.argv[1], file.stem)
    folder.mkdir()
    (folder / "config.json").write_text(file.read_text())
    engine = Engine.open(build(folder, folder / "engine", config, verify="none").path)
    attends = any(layer.attention is not None for layer in engine.config.model.layers)
    print(json.dumps([file.stem, [attends, Counter(job.name for job in kernels_of(engine, 90).values())]]), flush=True)
"""


def models_of(form: int) -> list[Path]:
    """Every third model, since the steps of a model and the kernels of a format depend little on each other, and all of FUSED."""
    return [file for i, file in enumerate(PUBLISHED) if i % len(FORMATS) == form or file.stem in FUSED]


@pytest.mark.parametrize("form", range(len(FORMATS)), ids=lambda form: FORMATS[form].get("quantization", "bfloat16"))
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_launches_of_published_models_are_listed(form: int, part: int, tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    models = models_of(form)[part::NUM_PARTS]
    printed = uninterpreted("-c", LIST, tmp_path, json.dumps(FORMATS[form]), *models)
    listed = {name: Counter(kernels) for name, (_, kernels) in map(json.loads, printed.splitlines())}
    attend = {name for name, (attends, _) in map(json.loads, printed.splitlines()) if attends}
    assert list(listed) == [file.stem for file in models]
    assert all(listed[name]["decode_attention_kernel"] + listed[name]["prefill_attention_kernel"] > 1 for name in attend)
    assert all(kernels.total() > 1 for kernels in listed.values())
    for name in listed.keys() & set(FUSED):
        assert listed[name]["fused_layer_small_batch_kernel"] >= 4, "for one token and for several, between layers and after the last layer"


# Prints the names of the kernels that are launched to find the products of a step and that no build lists, then the products.
PRODUCTS = """
import json, sys
import torch
from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.kernels.triton.aot.compiler import collecting
from stoker.profiling.roofline import products_of
from stoker.runtime.worker import aot_trace
limits = Limits(max_batch_size=16, max_input_len=64, max_output_len=64, max_num_tokens=64)
config = BuildConfig(device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits)
engine = Engine.open(build(sys.argv[1], sys.argv[2], config, verify="none").path)
listed = aot_trace.kernels_of(engine, 90)
with torch.inference_mode(), collecting(90) as jobs:
    products = products_of(aot_trace._runner(engine, RuntimeConfig(), 0))
print(json.dumps([[job.name for folder, job in jobs.items() if folder not in listed], [product.label for product in products]]))
"""


def test_the_step_whose_products_are_found_launches_kernels_of_the_build(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    """Norm, router, choice and sort of few tokens are one launch, also in a step that is observed."""
    config = next(file for file in PUBLISHED if file.stem == "Qwen3-235B-A22B")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    missing, products = json.loads(uninterpreted("-c", PRODUCTS, tmp_path, tmp_path / "engine").splitlines()[-1])
    assert missing == []
    assert products == [
        "linear 9216 × 4096", "linear 4096 × 8192", "linear 128 × 4096", "expert_up 128 of 3072 × 4096", "expert_down 128 of 4096 × 1536",
        "linear 151936 × 4096",
    ]  # fmt: skip


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 1024, "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# Prints [block_m, block_n, 1 or with slices 2, gate, whether it adds a residual, experts] of the variants of the GEMM for many rows.
LARGE_GEMMS = """
import json, sys
from stoker.base.config import Limits
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.kernels.triton.aot.specialization import Specialization
from stoker.kernels.triton.gemm.large.kernel import large_gemm_kernel
from stoker.runtime.worker.aot_trace import kernels_of
limits = Limits(max_batch_size=4, max_input_len=960, max_output_len=64, max_num_tokens=1000)
config = BuildConfig(
    device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits, quantization=sys.argv[3] or None,
)
engine = Engine.open(build(sys.argv[1], sys.argv[2], config, verify="none").path)
tile, gate, residual, experts = (large_gemm_kernel.arg_names.index(name) for name in ("TILE", "GATE", "residual_ptr", "EXPERTS"))
for job in kernels_of(engine, 90).values():
    if job.name == "large_gemm_kernel":
        constants = Specialization.from_json(job.specialization).constants
        sizes = constants[(tile,)]
        found = sizes.block_m, sizes.block_n, sizes.max_slices, constants[(gate,)], (residual,) not in constants, constants[(experts,)]
        print(json.dumps(found))
"""


def test_tiles_of_fp8_steps_of_up_to_1000_tokens_are_listed(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    printed = uninterpreted("-c", LARGE_GEMMS, tmp_path, tmp_path / "engine", "FP8")
    assert {tuple(json.loads(line)) for line in printed.splitlines()} == {
        (128, 128, 1, None, False, 0),  # q, k and v, up to 256 tokens
        (192, 128, 1, None, False, 0),  # up to 384
        (128, 256, 1, None, False, 0),  # with more
        (128, 128, 1, None, True, 0),  # output projection up to 512, and down projection of more than 256 tokens
        (128, 128, 2, None, True, 0),  # down projection of up to 256 tokens
        (192, 128, 1, None, True, 0),  # both up to 768
        (128, 256, 1, None, True, 0),  # with more
        (128, 256, 1, "silu", False, 0),  # gate and up
    }


def test_tiles_of_bfloat16_steps_of_up_to_1000_tokens_are_listed(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    printed = uninterpreted("-c", LARGE_GEMMS, tmp_path, tmp_path / "engine", "")
    assert {tuple(json.loads(line)) for line in printed.splitlines()} == {
        (64, 128, 1, None, False, 0),  # q, k and v, up to 64 tokens
        (64, 256, 1, "silu", False, 0),  # gate and up, up to 64
        (128, 256, 1, "silu", False, 0),  # with more
        (128, 256, 2, "silu", False, 0),
        (128, 128, 1, None, True, 0),  # output and down projection, from 448
        (192, 128, 1, None, True, 0),
        (128, 256, 1, None, True, 0),
    }


def test_every_tile_of_experts_is_listed(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    """Steps of some number of tokens use each tile, and the trace runs few numbers."""
    changed = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    found = {tuple(json.loads(line)) for line in uninterpreted("-c", LARGE_GEMMS, tmp_path, tmp_path / "engine", "FP8").splitlines()}
    tiles = {(128, 128), (192, 128), (128, 256)}
    assert {variant for variant in found if variant[-1]} == {(*tile, 1, None, False, 8) for tile in tiles}


# Prints the numbers of decodes beside a prompt whose attention launches a kernel that no build lists.
UNLISTED_DECODES = """
import itertools, sys
import torch
from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.kernels.triton.aot.compiler import collecting
from stoker.runtime.worker import aot_trace
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape
limits = Limits(max_batch_size=400, max_input_len=4000, max_output_len=96, max_num_tokens=1000)
config = BuildConfig(
    device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits, quantization=sys.argv[3] or None,
)
engine = Engine.open(build(sys.argv[1], sys.argv[2], config, verify="none").path)
listed = aot_trace.kernels_of(engine, 90)
with torch.inference_mode(), collecting(90) as jobs:
    runner = aot_trace._runner(engine, RuntimeConfig(), 0)
    for decodes, length in itertools.product(range(1, 400), (200, 1000, 4000)):
        runner.run_dummy_step_with_sampling(Shape(decodes + 128, decodes + 1, is_decode=False), Bounds(decodes, 128, length))
        for folder in jobs.keys() - listed.keys():
            if "attention" in jobs.pop(folder).name:
                print(decodes, length)
"""


@pytest.mark.parametrize("kv_heads", [32, 8, 1])
def test_tiles_of_decodes_beside_a_prompt_are_listed(kv_heads: int, tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_key_value_heads": kv_heads, "max_position_embeddings": 4096}))
    assert uninterpreted("-c", UNLISTED_DECODES, tmp_path, tmp_path / "engine", "FP8_KV") == ""
