"""Kernels that a build compiles without the GPU, and that launches find in the cache."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import triton.language as tl

from stoker.base.config import Limits, Mapping
from stoker.base.errors import ConfigError, EngineError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.engine.reader import Engine
from stoker.kernels.triton.aot import host_launchers
from stoker.kernels.triton.aot import kernel_cache as cache
from stoker.kernels.triton.aot.compiler import CompileJob, compile_jobs
from stoker.kernels.triton.aot.host_launchers import LaunchSignature
from stoker.kernels.triton.aot.specialization import Specialization
from stoker.runtime import aot
from stoker.runtime.aot import compile_kernels, launches

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 128, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip
MIXTRAL = {
    **MODEL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "bos_token_id": 0, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "hidden_act": "silu",
}  # fmt: skip
LIMITS = Limits(max_batch_size=1, max_input_len=48, max_output_len=16, max_num_tokens=48)
EXPERTS: list[tuple[dict[str, object], str, dict[str, int], Mapping, str]] = [
    (MIXTRAL, "WEIGHTS_ONLY_INT4", {}, Mapping(tensor_parallel=2, expert_parallel=True), "int4"),
    (MIXTRAL, "AWQ", {"group_size": 32}, Mapping(), "int4"),
    (DEEPSEEK, "FP8_BLOCK", {"rows": 32, "columns": 32}, Mapping(data_parallel=2, expert_parallel=True), "block_fp8"),
]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}

# Lists the launches of several engines, one line each, with the code that `launches` runs in a process for one engine.
LIST = """
import sys
from pathlib import Path
import msgspec
from stoker.engine.reader import Engine
from stoker.runtime.worker.aot_trace import kernels_of
for path in sys.argv[1:]:
    print(msgspec.json.encode(list(kernels_of(Engine.open(Path(path)), 90).values())).decode(), flush=True)
"""

# Compiles every launch of an engine with Triton, and prints the numbers of kernels that were in the cache and that were not.
LAUNCH = """
import sys
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.aot import kernel_cache as cache
from stoker.kernels.triton.aot.offline_target import compiling
from stoker.runtime.worker import aot_trace
import torch
cache.use_kernel_cache()
ops.use_launchers()
engine = Engine.open(sys.argv[1])
with torch.inference_mode(), compiling(90):
    aot_trace._trace(aot_trace._runner(engine, aot_trace.RuntimeConfig(), 0))
print(cache.counts.cached, cache.counts.compiled)
"""

# Prints the kernels that decodes beside a prompt launch and that the trace of an engine does not.
BESIDE = """
import sys
import torch
from stoker.engine.reader import Engine
from stoker.kernels import ops
from stoker.kernels.triton.aot.compiler import collecting
from stoker.runtime.worker import aot_trace
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape
ops.use_launchers()
engine = Engine.open(sys.argv[1])
with torch.inference_mode(), collecting(90) as traced:
    runner = aot_trace._runner(engine, aot_trace.RuntimeConfig(), 0)
    aot_trace._trace(runner)
with torch.inference_mode(), collecting(90) as launched:
    for decodes in (5, 37, 71, 111, 171, 251, 400):
        for length in (600, 1204, 1900):
            runner.run_dummy_step_with_sampling(Shape(decodes + 64, decodes + 1, False), Bounds(decodes, 64, length))
assert "decode_attention_kernel" in {job.name for job in launched.values()}
print([job.name for folder, job in launched.items() if folder not in traced])
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine of one layer, which has every kind of kernel: its 30 kernels take as long to compile as all other tests of this file."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1}))
    reported: list[tuple[str, int, int]] = []
    config = BuildConfig(device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "built"))
        engine = build(
            folder, folder / "engine", config, verify="none", kernels=compile_kernels, progress=lambda *each: reported.append(each)
        )
    stages = [each for each in reported if each[0] == "kernels"]
    assert stages[-1][1] == stages[-1][2] > 8
    return engine


def test_launches_on_another_machine_find_every_kernel_of_the_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterpreted: Callable[..., str]
) -> None:
    monkeypatch.setattr(cache.triton.knobs.cache, "dir", str(tmp_path))
    assert engine.config.files[cache.ARCHIVE].size > 1000
    engine.verify()
    fresh = cache.install_archive(engine.path / cache.ARCHIVE, tmp_path)
    assert fresh > 8
    libraries = {path.parent.name for path in tmp_path.glob("*/__triton_launcher*.so")}
    assert libraries == {path.parent.name for path in (engine.path.parent / "built").glob("*/__triton_launcher*.so")} != set()
    assert cache.install_archive(engine.path / cache.ARCHIVE, tmp_path) == 0
    cached, compiled = uninterpreted("-c", LAUNCH, engine.path, TRITON_CACHE_DIR=str(tmp_path)).split()
    assert (int(cached), int(compiled)) == (fresh, 0)


def test_an_archive_contains_only_gpu_code(engine: Engine) -> None:
    with zipfile.ZipFile(engine.path / cache.ARCHIVE) as archive:
        kinds = {Path(name).suffix for name in archive.namelist()}
        assert json.loads(archive.read("index.json"))["capability"] == 90
    assert kinds == {".cubin", ".json"}


def constants(job: CompileJob) -> dict[str, object]:
    specialization = Specialization.from_json(job.specialization)
    names = list(specialization.signature)
    return {names[index]: value for (index, *_), value in specialization.constants.items()}


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory, uninterpreted: Callable[..., str]) -> dict[str, list[CompileJob]]:
    """The launches of engines by name. One process lists all: half of the time of a process is the import of torch."""
    paths: dict[str, Path] = {}

    def add(name: str, model: dict[str, object], **settings: object) -> None:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(model))
        common = {"device": "cuda", "compute_capability": "9.0", "dtype": "bfloat16", "dummy_weights": True, "limits": LIMITS}
        paths[name] = build(folder, folder / "engine", BuildConfig(**common, **settings), verify="none").path  # type: ignore[arg-type]

    for model, quantization, settings, mapping, _ in EXPERTS:
        add(quantization, model, quantization=quantization, quantization_settings=settings, mapping=mapping)
    add("fused", {**MODEL, **WIDE}, quantization="FP8", mapping=Mapping(tensor_parallel=2))
    add("sums", {**MODEL, **HEADS}, mapping=Mapping(tensor_parallel=2))
    lines = uninterpreted("-c", LIST, *paths.values()).splitlines()
    return {name: msgspec.json.decode(line, type=list[CompileJob]) for name, line in zip(paths, lines, strict=True)}


@pytest.mark.parametrize(("model", "quantization", "settings", "mapping", "form"), EXPERTS)
def test_steps_of_quantized_experts_do_not_wait_for_the_device(
    listed: dict[str, list[CompileJob]], model: dict[str, object], quantization: str, settings: dict[str, int], mapping: Mapping, form: str
) -> None:
    """A meta tensor has no values, so the trace fails where the host would wait for one."""
    found = [constants(job) for job in listed[quantization] if job.name == "expert_linear_kernel"]
    experts = int(model.get("num_local_experts", 8)) // mapping.stage_size  # type: ignore[call-overload]
    assert found and {kernel["EXPERTS"].count for kernel in found} == {experts}  # type: ignore[attr-defined]
    assert {kernel["FORMAT"].form for kernel in found} == {form}  # type: ignore[attr-defined]
    assert {kernel["EXPERTS"].scatter for kernel in found} == {True, False}  # type: ignore[attr-defined]


def test_a_fused_layer_kernel_is_compiled_into_the_cache_entry_of_its_launch(tmp_path: Path) -> None:
    """It is written in Gluon, which Triton compiles from another kind of source. Equal layers launch two kinds, because no QKV
    projection follows the last layer."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4}))
    config = BuildConfig(
        device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=LIMITS, quantization="WEIGHTS_ONLY_INT8"
    )
    engine = build(tmp_path, tmp_path / "engine", config, verify="none")
    found = [job for job in launches(engine.path, 90) if job.name == "fused_layer_small_batch_kernel"]
    assert {str(constants(job)["GATED"]) for job in found} == {"0 1 0", "0 1 0 0"}
    compile_jobs(found[:1], tmp_path / "cache", 90, 1)
    assert found[0].is_cached(tmp_path / "cache")


def test_fused_layers_of_ranks_are_listed_and_their_linears(listed: dict[str, list[CompileJob]]) -> None:
    """GPUs that cannot access each other's memory launch the linears."""
    found = listed["fused"]
    fused = [constants(job) for job in found if job.name == "fused_layer_small_batch_kernel"]
    assert {str(values["GATED"]) for values in fused} == {"0 1 0", "0 1 0 0"} and all(values["UNITS"] for values in fused)
    assert any(not constants(job)["NORM"] for job in found if job.name == "fp8_gemv_kernel")  # of `out` and `down`


def test_kernels_of_many_decodes_beside_a_prompt_are_traced(tmp_path: Path, uninterpreted: Callable[..., str]) -> None:
    """How their keys are split depends on their number and on their lengths."""
    model = {
        **MODEL,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4608,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    limits = Limits(max_batch_size=448, max_input_len=4544, max_output_len=64, max_num_tokens=512)
    config = BuildConfig(device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=limits)
    engine = build(tmp_path, tmp_path / "engine", config, verify="none")
    assert uninterpreted("-c", BESIDE, engine.path).strip() == "[]"


def archive(path: Path, **files: bytes) -> Path:
    index = json.dumps({"triton": cache.triton.__version__, "capability": 90, "kernels": 1, "launches": []}).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {"index.json": index, **files}.items():
            file.writestr(name, data)
    return path


@pytest.mark.parametrize("name", ["../x.json", "A" * 52 + "/../../x.json", "A" * 52 + "/x.so", "A" * 51 + "/x.json", "/etc/x.json"])
def test_a_path_outside_the_cache_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match="is not the path of a kernel"):
        cache.install_archive(archive(tmp_path / "kernels.zip", **{name: b"{}"}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_is_rejected_with_a_cure(tmp_path: Path) -> None:
    file = archive(tmp_path / "kernels.zip", **{"A" * 52 + "/k.json": b"{}" * 200})
    data = bytearray(file.read_bytes())
    data[data.find(b"{}{}") + 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(EngineError, match="Copy the engine again"):
        cache.install_archive(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/__grp__*"))


def test_any_damage_is_reported_as_damage(tmp_path: Path) -> None:
    """Two bytes of a compressed file are changed: it is reported as damaged, unless the bytes are never read."""
    file = tmp_path / "kernels.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archived:
        archived.writestr("index.json", json.dumps({"triton": cache.triton.__version__, "capability": 90, "kernels": 1, "launches": []}))
        archived.writestr("A" * 52 + "/k.json", json.dumps(list(range(2000))))
    original, rejected = file.read_bytes(), 0
    for seed in range(300):
        pick, data = random.Random(seed), bytearray(original)
        for _ in range(2):
            data[pick.randrange(len(data))] = pick.randrange(256)
        file.write_bytes(data)
        try:
            cache.install_archive(file, tmp_path / f"cache{seed}")
        except EngineError as error:
            rejected += "is damaged" in str(error)
    assert rejected > 250


@pytest.mark.parametrize("kind", ["i32; } int evil() {", "", "tensordesc<evil"])
def test_unknown_argument_types_are_rejected(kind: str, tmp_path: Path) -> None:
    """Argument types become part of C code, so unknown ones must be rejected before."""
    launch = {"types": ["*bf16", kind], "descriptors": "null"}
    index = {"triton": cache.triton.__version__, "capability": 90, "kernels": 1, "launches": [launch]}
    with zipfile.ZipFile(tmp_path / "kernels.zip", "w") as archived:
        archived.writestr("index.json", json.dumps(index))
        archived.writestr("A" * 52 + "/k.json", b"{}")
    with pytest.raises(EngineError, match="is damaged"):
        cache.install_archive(tmp_path / "kernels.zip", tmp_path / "cache")


def test_kernels_of_another_triton_version_are_not_installed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "kernels.zip", "w") as archived:
        archived.writestr("index.json", json.dumps({"triton": "0.0.1", "capability": 90, "kernels": 1, "launches": []}))
        archived.writestr("A" * 52 + "/k.json", b"{}")
    assert cache.install_archive(tmp_path / "kernels.zip", tmp_path / "cache") == 0


def test_an_engine_for_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    engine = build(
        tmp_path, tmp_path / "engine", BuildConfig(device="cpu", dummy_weights=True, limits=LIMITS), verify="none", kernels=compile_kernels
    )
    assert cache.ARCHIVE not in engine.config.files


def test_an_engine_whose_kernels_cannot_be_listed_is_built_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = BuildConfig(device="cuda", compute_capability="9.0", dtype="bfloat16", dummy_weights=True, limits=LIMITS)

    def fails(path: Path, capability: int) -> list:
        raise RuntimeError("a step reads from the device")

    monkeypatch.setattr(aot, "launches", fails)
    engine = build(tmp_path, tmp_path / "engine", config, verify="none", kernels=compile_kernels)
    assert cache.ARCHIVE not in engine.config.files and "a step reads from the device" in caplog.text


def test_an_invalid_compute_capability_is_rejected() -> None:
    with pytest.raises(ConfigError, match="compute_capability='sm_90'"):
        BuildConfig(compute_capability="sm_90")


def test_launch_signatures_with_tuples_survive_json(listed: dict[str, list[CompileJob]]) -> None:
    """The all-reduce kernel has a tuple of addresses, and a tuple of types becomes a list in JSON."""
    signatures = [Specialization.from_json(job.specialization).signature for job in listed["sums"]]
    assert any(not isinstance(kind, str) for signature in signatures for kind in signature.values())
    launchers = {LaunchSignature.of(signature, {}) for signature in signatures}
    assert set(msgspec.json.decode(msgspec.json.encode(list(launchers)), type=list[LaunchSignature])) == launchers


@pytest.mark.parametrize("has_device", [True, False])
def test_the_driver_is_there_before_host_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_device: bool) -> None:
    """A library that is loaded earlier does not know the driver's type of tensor descriptors, and rejects all of them."""
    order: list[str] = []

    class Config:
        active = property(lambda _: order.append("driver"))

    monkeypatch.setattr(host_launchers.driver.CudaDriver, "is_active", staticmethod(lambda: has_device))
    monkeypatch.setattr(host_launchers.triton.runtime, "driver", Config())
    monkeypatch.setattr(host_launchers, "build_launcher", lambda signature, cache: order.append("library"))
    signatures = [LaunchSignature((kind,), "null") for kind in ("i32", "*fp16")]
    host_launchers.build_launchers(signatures, tmp_path)
    assert order == ["driver"] * has_device + ["library"] * 2


class Shape(NamedTuple):
    """A group of kernel constants."""

    rows: int
    kind: str | None


def test_a_specialization_survives_its_json() -> None:
    """Triton's own JSON turns named tuples into lists, and the string "bf16" into the type."""
    signature = {"x": "*bf16", "sizes": Shape("i32", "constexpr"), "SHAPE": "constexpr", "KIND": "constexpr"}  # type: ignore[arg-type]
    constants = {(1, 1): None, (2,): Shape(16, "bf16"), (3,): "bf16", (4,): tl.bfloat16, (5,): tl.constexpr(2)}
    written = Specialization(signature, constants, {(0,): [["tt.divisibility", 16]]}, {"num_warps": 4, "names": ("a", "b")})
    found = Specialization.from_json(written.to_json())
    assert found == written
    assert isinstance(found.signature["sizes"], Shape) and isinstance(found.constants[2,], Shape)
    assert isinstance(found.constants[3,], str) and isinstance(found.constants[4,], tl.dtype)
    with pytest.raises(TypeError, match="can't be a constant of a kernel"):
        Specialization({}, {(0,): object()}, {}, {}).to_json()
