"""`stoker serve DIR`: the format of a folder, the engine that is built from it, and the report of --dry-run."""

from __future__ import annotations

import io
import re
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import CheckpointError, ConfigError, EngineError, StokerError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.main import main
from stoker.deploy.deployment import BuildOptions, EngineInfo
from stoker.deploy.prepare import PreparedEngine, build_config, prepare_engine, read_deployment
from stoker.deploy.triton.export import export_triton
from stoker.engine.reader import Engine

PROPERTIES = "option.model_id={}\noption.max_rolling_batch_size=4\noption.tensor_parallel_degree=1\n"
TRUSS = "model_name: tiny\ntrt_llm:\n  build:\n    base_model: llama\n    checkpoint_repository:\n      source: LOCAL\n      repo: {}\n"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lmi", "truss"):
        monkeypatch.setattr(f"stoker.deploy.{name}.load.visible_gpus", lambda environment: 0)


def folder(path: Path, name: str, text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text(text)
    return path


def prepare(path: Path, progress: Any = None, **environment: str) -> PreparedEngine:
    return prepare_engine(read_deployment(path, environment), environment, progress)


def stoker(*args: object) -> int:
    before, sys.argv = sys.argv, ["stoker", *map(str, args)]
    try:
        return main()
    finally:
        sys.argv = before


def test_each_format_is_recognised_and_built_once(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint, an LMI folder and a Truss; then the engine that was built."""
    served = folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint))
    found = prepare(served)
    config = Engine.open(found.engine).config
    assert (found.deployment.format, config.limits.max_batch_size) == ("lmi", 4)
    assert config.limits.max_seq_len == 256, "default lengths are limited to the positions of the model"
    stages: list[str] = []
    assert prepare(served, lambda stage, done, total: stages.append(stage)).engine == found.engine
    assert stages == []
    assert prepare(found.engine).deployment.format == "engine"
    assert prepare(found.engine).engine == found.engine
    assert read_deployment(checkpoint, {}).format == "checkpoint"
    assert read_deployment(folder(tmp_path / "truss", "config.yaml", TRUSS.format(checkpoint)), {}).format == "truss"


def test_ten_replicas_build_once(checkpoint: Path, tmp_path: Path) -> None:
    served = folder(tmp_path / "truss", "config.yaml", TRUSS.format(checkpoint) + "    max_seq_len: 128\n")
    builders: set[int] = set()

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "weights":
            builders.add(threading.get_ident())

    with ThreadPoolExecutor(10) as replicas:
        engines = {found.engine for found in replicas.map(lambda _: prepare(served, progress), range(10))}
    assert (len(engines), len(builders)) == (1, 1)
    assert len(list((tmp_path / "cache" / "engines").glob("*/config.json"))) == 1


def test_model_data_as_a_tar(checkpoint: Path, tmp_path: Path) -> None:
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint)), arcname="model")
    assert read_deployment(archive, {}).format == "lmi"


def test_settings_of_the_build_reach_the_builder(checkpoint: Path, tmp_path: Path) -> None:
    text = PROPERTIES.format(checkpoint) + (
        "option.rotary_base=20000\noption.rotary_dim=8\noption.rotary_scaling_type=linear\noption.rotary_scaling_factor=2\n"
        "option.quantize=smoothquant\noption.smoothquant_alpha=0.7\noption.calib_size=3\noption.max_input_len=100\noption.max_output_len=50\n"
    )
    deployment = read_deployment(folder(tmp_path / "lmi", "serving.properties", text), {})
    config = build_config(deployment)
    assert (config.rotary_base, config.rotary_scaling_type, config.rotary_scaling_factor, config.rotary_dim) == (20000, "linear", 2, 8)
    assert (config.quantization, config.calibration_size, config.quantization_settings["alpha"]) == ("SMOOTH_QUANT", 3, 0.7)
    assert (config.limits.max_input_len, config.limits.max_output_len) == (100, 50)


def test_rotary_settings_are_in_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    text = PROPERTIES.format(checkpoint) + "option.rotary_base=20000\noption.rotary_scaling_type=linear\noption.rotary_scaling_factor=2\n"
    rope = Engine.open(prepare(folder(tmp_path / "lmi", "serving.properties", text)).engine).config.model.layers[0].attention.rope
    assert rope is not None
    assert (rope.theta, rope.scaling, rope.factor) == (20000.0, "linear", 2.0)


def test_the_environment_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("prepare", "lmi.load"):
        monkeypatch.setattr(f"stoker.deploy.{module}.CONTAINER", tmp_path / "none")
    deployment = read_deployment(None, {"HF_MODEL_ID": str(checkpoint), "OPTION_MAX_ROLLING_BATCH_SIZE": "2"})
    assert isinstance(deployment.source, BuildOptions)
    assert (deployment.source.checkpoint, deployment.source.limits.max_batch_size) == (str(checkpoint), 2)
    assert (deployment.server.host, deployment.server.http_port) == ("0.0.0.0", 8080)
    with pytest.raises(ConfigError, match="HF_MODEL_ID is not set"):
        read_deployment(None, {})


def test_other_folders_listen_on_loopback(checkpoint: Path, tmp_path: Path) -> None:
    served = folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint))
    assert read_deployment(served, {}).server.host == "127.0.0.1"
    in_container = read_deployment(served, {"SAGEMAKER_BIND_TO_PORT": "9001"}).server
    assert in_container.host == "0.0.0.0" and in_container.drain_timeout_s == 20.0


def test_dry_run_reports_settings_and_origins(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint) + "option.use_fused_mlp=true\n")
    assert stoker("serve", served, "--dry-run", "--port", "8000", "--policy", "static") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert f"{served / 'serving.properties'}:2" in rows["max_batch_size"]
    assert "8000" in rows["http_port"] and "command line" in rows["http_port"], "an explicit default also takes precedence"
    assert "lmi" in rows["model_name"]
    assert "static" in rows["policy"] and "command line" in rows["policy"]
    assert "default" in rows["max_queue_size"]
    assert "option.use_fused_mlp" in out
    assert not (tmp_path / "cache" / "engines").exists()


@pytest.mark.parametrize("kind", ["engine", "checkpoint", "triton", "lmi", "truss"])
def test_dry_run_of_every_format(kind: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the origin of settings. Nothing is built or served."""
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(device="cpu", dummy_weights=True), verify="none").path
    info = EngineInfo(path=str(engine), architecture="LlamaForCausalLM", vocab_size=320)
    export_triton(info, tmp_path / "triton", {"max_queue_size": "9"})
    folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint))
    folder(tmp_path / "truss", "config.yaml", TRUSS.format(checkpoint) + "    max_seq_len: 128\n")
    cached = sorted((tmp_path / "cache").rglob("*"))
    place = checkpoint if kind == "checkpoint" else tmp_path / kind
    assert stoker("serve", place, "--dry-run") == 0
    out = capsys.readouterr().out
    assert f"is of the format {kind}." in out
    written = {"triton": "config.pbtxt:", "lmi": "serving.properties:", "truss": "config.yaml:"}
    assert written.get(kind, "") in out
    assert sorted((tmp_path / "cache").rglob("*")) == cached


def test_dry_run_refuses_what_a_start_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = folder(tmp_path / "engine", "config.json", '{"format_version": 999}')
    assert stoker("serve", engine, "--dry-run") == 1
    assert "engine format 999" in capsys.readouterr().err


def test_dry_run_refuses_settings_that_the_engine_does_not_accept(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = build(checkpoint, tmp_path / "engine", BuildConfig(device="cpu", dummy_weights=True), verify="none").path
    info = EngineInfo(path=str(engine), architecture="LlamaForCausalLM", vocab_size=320)
    config = export_triton(info, tmp_path / "triton", {}) and tmp_path / "triton" / "tensorrt_llm" / "config.pbtxt"
    written = config.read_text()
    beams = re.sub(r'("max_beam_width".*?string_value: )"1"', r'\1"9"', written, count=1, flags=re.DOTALL)
    for text, options, error in [
        (beams, (), "max_beam_width=9 is above 1, the limit of the engine"),
        (written, ("--devices", "0,1"), "devices=[0, 1] name GPUs, and"),
        (written, ("--max-batch-size", "100000"), "max_batch_size=100000 is above the engine's"),
        (written.replace(str(engine), str(tmp_path / "nowhere")), (), "which does not exist"),
    ]:
        config.write_text(text)
        for dry_run in (("--dry-run",), ()):
            assert stoker("serve", tmp_path / "triton", *options, *dry_run, "--port", "0", "--grpc-port", "0", "--metrics-port", "0")
            assert error in capsys.readouterr().err, (error, dry_run)


QUANTIZED = {
    "smoothquant": ("alpha=0.8\nper_token=true\nper_channel=true\nmulti_query_mode=true\n", "SMOOTH_QUANT"),
    "awq": ("awq_format=int4_awq\nawq_calib_size=4\n", "AWQ"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_documented_quantizations_are_built(name: str, checkpoint: Path, tmp_path: Path) -> None:
    keys, recipe = QUANTIZED[name]
    lines = [line if line[:3] in ("awq", "mul") else f"smoothquant_{line}" for line in keys.splitlines()]
    text = PROPERTIES.format(checkpoint) + f"option.quantize={name}\n" + "".join(f"option.{line}\n" for line in lines)
    config = Engine.open(prepare(folder(tmp_path / "lmi", "serving.properties", text)).engine).config
    assert (config.recipe.name, config.limits.max_batch_size) == (recipe, 4)
    assert config.checks["accuracy"]["perplexity_after"] < 1.1 * config.checks["accuracy"]["perplexity_before"]


SECRET = "hf_abcdefghijklmnop"


@pytest.mark.parametrize("address", ["s3://key:{}@bucket/model", "https://user:{}@host/m.tar.gz", "https://host/m.tar?X-Amz-Signature={}"])
def test_credentials_in_addresses_are_refused_and_not_printed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("serve", address.format(SECRET)) == 2
    printed = capsys.readouterr()
    assert "contains a credential" in printed.err and SECRET not in printed.err + printed.out


def test_secrets_are_never_printed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("TRUSS_SECRET_hf_access_token", SECRET)
    text = TRUSS.format(checkpoint) + f"secrets:\n  hf_access_token: {SECRET}\n"
    served = folder(tmp_path / "truss", "config.yaml", text)
    assert stoker("serve", served, "--dry-run") == 0
    keys = tmp_path / "keys"
    keys.write_text("key-that-is-secret\n")
    lmi_folder = folder(tmp_path / "lmi", "serving.properties", f"option.model_id=https://user:{SECRET}@host/x.tar.gz\n")
    assert stoker("serve", lmi_folder, "--dry-run", "--api-keys", keys) == 2
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err + caplog.text
    assert "key-that-is-secret" not in shown.out + shown.err
    assert "access token" in shown.out


def test_a_private_repository_without_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def refuse(location: str, **options: Any) -> Path:
        calls.append((location, options["token"]))
        raise CheckpointError(f"{location} does not exist, or is private.", cure="Set HF_TOKEN.")

    monkeypatch.setattr("stoker.deploy.sources.resolve", refuse)
    served = folder(tmp_path / "lmi", "serving.properties", "option.model_id=org/private\n")
    with pytest.raises(CheckpointError, match="Set HF_TOKEN"):
        prepare(served)
    with pytest.raises(CheckpointError) as caught:
        prepare(served, HF_TOKEN=SECRET)
    assert [location for location, _ in calls] == ["org/private"] * 2
    assert calls[0][1] is None and calls[1][1].reveal() == SECRET
    assert SECRET not in str(caught.value)


BOTH = "trt_llm:\n  build: {checkpoint_repository: {source: HF, repo: a/b}}\n  serve: {engine_repository: c/d}\n"
BAD: dict[str, tuple[str, str, str]] = {
    "both": ("config.yaml", BOTH, "exclude each other"),
    "neither": ("config.yaml", "trt_llm: {runtime: {}}\n", "neither build nor serve"),
    "quantization": ("config.yaml", TRUSS.format("a/b") + "    quantization_type: int3\n", "quantization_type"),
    "unknown key": ("serving.properties", "option.model_id=a/b\noption.dtyp=fp16\n", "option.dtype"),
    "unknown quantize": ("serving.properties", "option.model_id=a/b\noption.quantize=int3\n", "option.quantize=int3"),
    "duplicate": ("serving.properties", "option.model_id=a/b\noption.model_id=c/d\n", "option.model_id"),
    "no checkpoint": ("serving.properties", "option.model_id=/no/such/folder\n", "/no/such/folder does not exist"),
    "no engine": ("config.yaml", "trt_llm:\n  serve: {engine_repository: /no/such, tokenizer_repository: a/b}\n", "/no/such"),
    "ranks": ("config.yaml", TRUSS.format("a/b") + "resources: {accelerator: 'A100:3', use_gpu: true}\n", "A100:3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_with_their_origin(name: str, tmp_path: Path) -> None:
    file, text, message = BAD[name]
    with pytest.raises(StokerError) as caught:
        prepare(folder(tmp_path / "bad", file, text))
    assert message in str(caught.value)


@pytest.mark.parametrize("begin, end", [("", "\r\n"), ("\ufeff", "\n"), ("\ufeff", "\r\n")])
def test_windows_line_ends_and_byte_order_marks(begin: str, end: str, checkpoint: Path, tmp_path: Path) -> None:
    served = tmp_path / "lmi"
    served.mkdir()
    (served / "serving.properties").write_bytes((begin + PROPERTIES.format(checkpoint).replace("\n", end)).encode())
    deployment = read_deployment(served, {})
    assert isinstance(deployment.source, BuildOptions)
    assert (deployment.source.checkpoint, deployment.source.limits.max_batch_size) == (str(checkpoint), 4)


def test_an_archive_with_a_member_outside_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("../escaped")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(StokerError, match="escaped"):
        read_deployment(archive, {})
    assert not (tmp_path / "escaped").exists()


def test_a_misspelt_name_is_not_sent_to_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engin does not exist"):
        read_deployment("engin", {})


def test_a_version_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="baichuan_model_version"):
        read_deployment(
            folder(tmp_path / "lmi", "serving.properties", PROPERTIES.format(checkpoint) + "option.baichuan_model_version=v2_7b\n"), {}
        )


def test_a_damaged_engine_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        prepare(folder(tmp_path / "engine", "config.json", '{"format_version": 2}'))


def test_a_folder_of_no_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is none of: engine, checkpoint, .*lmi"):
        read_deployment(tmp_path, {})
