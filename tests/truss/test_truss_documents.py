"""Every configuration in Truss's documentation, unchanged, and the verdict of the truss package on each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.base.errors import CheckpointError, ConfigError, StokerError
from stoker.cli.main import main
from stoker.deploy.deployment import BuildOptions, EngineSource
from stoker.deploy.prepare import build_config, prepare_engine, read_deployment
from stoker.deploy.secrets import Secret
from stoker.deploy.sources import hub

PACKAGE = pytest.mark.compatibility(
    protocol="Truss", client="truss, recorded", version="0.18.35", feature="the package's verdict on configurations, and its defaults"
)
DOCUMENTED = pytest.mark.compatibility(
    protocol="Truss",
    client="configurations of Truss's documentation",
    version="trt_llm.build, trt_llm.serve",
    feature="each section, every quantization, secrets, packages",
)

DOCUMENTS = Path(__file__).parent / "documents"
SECRET = "hf_abcdefghijklmnop"


@pytest.fixture(autouse=True)
def _isolated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 0)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def folder(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "truss"
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(text)
    return path


def document(name: str) -> str:
    return (DOCUMENTS / name).read_text()


def dry_run(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    return stoker(["serve", str(path), "--dry-run"], monkeypatch, capsys)


def stoker(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the output of a `stoker` command."""
    monkeypatch.setattr(sys, "argv", ["stoker", *arguments])
    status = main()
    output = capsys.readouterr()
    return status, output.out + output.err


BOTH = "build_and_serve.yaml"
BUILD, SERVE = document(BOTH).split("  serve:")[0], "trt_llm:\n  serve:" + document(BOTH).split("  serve:")[1]
OLDEST = "model_metadata:\n  tensor_parallelism: 1\n  engine_repository: org/engine\n  tokenizer_repository: org/tok\n"


@DOCUMENTED
def test_the_build_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = dry_run(folder(tmp_path, BUILD), monkeypatch, capsys)
    assert status == 0
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for name, value, line in (("max_input_len", 2048, 4), ("max_batch_size", 8, 6), ("max_beam_width", 4, 7), ("quantization", "INT8", 9)):
        assert str(value) in rows[name] and f"config.yaml:{line}" in rows[name]
    assert "decaplusplus/llama-7b-hf" in rows["checkpoint"] and "built, or taken from the cache" in rows["then"]
    assert all(f"plugin_configuration.{name}" in shown for name in ("multi_block_mode", "paged_kv_cache", "use_fused_mlp"))


@DOCUMENTED
def test_the_serve_section(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    built = SERVE.replace("/path/to/engine", str(tiny_engine)).replace("/path/to/tokenizer", str(tiny_engine))
    status, shown = dry_run(folder(tmp_path, built), monkeypatch, capsys)
    assert status == 0 and str(tiny_engine) in shown and "served as it is" in shown
    status, shown = dry_run(folder(tmp_path, SERVE), monkeypatch, capsys)
    assert status == 2 and "/path/to/engine, which does not exist" in shown
    with pytest.raises(ConfigError, match="/path/to/engine, which does not exist"):
        prepare_engine(read_deployment(folder(tmp_path, SERVE), {}), {})


@DOCUMENTED
def test_both_sections_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = dry_run(folder(tmp_path, document(BOTH)), monkeypatch, capsys)
    assert status == 2 and "exclude each other" in shown and "line 2" in shown and "line 17" in shown


@pytest.mark.parametrize("name", [
    "NO_QUANT", "WEIGHTS_ONLY_INT8", "WEIGHTS_KV_INT8", "WEIGHTS_ONLY_INT4", "WEIGHTS_KV_INT4", "SMOOTH_QUANT", "FP8", "FP8_KV",
])  # fmt: skip
@DOCUMENTED
def test_every_documented_quantization_reaches_the_builder(tmp_path: Path, name: str) -> None:
    deployment = read_deployment(folder(tmp_path, BUILD.replace("WEIGHTS_KV_INT8", name)), {})
    config = build_config(deployment)
    expected = {"WEIGHTS_KV_INT8": "WEIGHTS_ONLY_INT8", "WEIGHTS_KV_INT4": "WEIGHTS_ONLY_INT4", "FP8_KV": "FP8", "NO_QUANT": None}
    assert config.quantization == expected.get(name, name)
    assert config.kv_cache_dtype == {"WEIGHTS_KV_INT8": "int8", "WEIGHTS_KV_INT4": "int8", "FP8_KV": "float8_e4m3fn"}.get(name)


@DOCUMENTED
def test_the_oldest_with_its_secrets_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, OLDEST + document("secrets.yaml"))
    packages = path / "packages" / "inflight_batcher_llm" / "tensorrt_llm"
    packages.mkdir(parents=True)
    (packages / "config.pbtxt").write_text('name: "tensorrt_llm"\nbackend: "tensorrtllm"\n' + document("parameters.pbtxt"))
    runtime = read_deployment(path, {}).runtime
    assert (runtime.kv_cache_tokens, runtime.kv_cache_fraction, runtime.max_num_sequences) == (10_000, 0.1, 64)
    status, shown = dry_run(path, monkeypatch, capsys)
    assert status == 0 and "org/engine" in shown and "my_hf_api_key" not in shown
    assert "warning: " in shown and "/secrets/hf_access_token, TRUSS_SECRET_hf_access_token or HF_TOKEN" in shown


SHAPES = [
    (title, re.search(r"^config.yaml:\n((?:  .*\n|\n)+?)->", block, re.M), "TrussConfig.from_yaml(config.yaml): ACCEPTED" in block)
    for title, block in re.findall(
        r"^== \d+\. (.*)\n((?:(?!== ).*\n)+)", next((DOCUMENTS.parent / "recorded").glob("16-*")).read_text(), re.M
    )
]
# Shapes that Stoker accepts and the package rejects; shapes that Stoker rejects and the package accepts, with the message.
ACCEPTED = ("only its build section", "only its serve section", "its build + a", "the same with base_model: llama", "base_model: LLAMA")
REJECTED = {"encoder": "base_model=encoder"}


@pytest.mark.parametrize("title, shape, accepted", [s for s in SHAPES if s[1]], ids=[s[0] for s in SHAPES if s[1]])
@PACKAGE
def test_recorded_shapes(tmp_path: Path, title: str, shape: re.Match[str], accepted: bool) -> None:
    path = folder(tmp_path, re.sub(r"^  ", "", shape[1], flags=re.M))
    message = next((text for name, text in REJECTED.items() if title.startswith(name)), None)
    if message is None and (accepted or title.startswith(ACCEPTED)):
        assert read_deployment(path, {}).format == "truss"
        return
    with pytest.raises(ConfigError, match=message or r"config\.yaml:\d+") as caught:
        read_deployment(path, {})
    assert "config.yaml" in str(caught.value)


def test_number_of_shapes() -> None:
    assert len([s for s in SHAPES if s[1]]) >= 17


@PACKAGE
def test_the_package_s_dump_of_all_defaults(tmp_path: Path) -> None:
    text = next((DOCUMENTS.parent / "recorded").glob("16-*")).read_text()
    dumps = [json.loads(found) for found in re.findall(r"dump, with defaults: (\{.*\})$", text, re.M)]
    kinds = {read_deployment(folder(tmp_path, yaml.safe_dump({"trt_llm": dump})), {}).format for dump in dumps if _is_supported(dump)}
    assert kinds == {"truss"} and {dump["inference_stack"] for dump in dumps} == {"v1", "v2"}


def _is_supported(dump: dict[str, Any]) -> bool:
    return not dump["build"].get("speculator") and dump["build"].get("base_model") not in ("encoder", "encoder_bert")


@pytest.mark.parametrize("name", ["hf_access_token", "my_token"])
def test_a_private_repository_without_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tokens: list[Secret | None] = []

    def fetch_forbidden(repository: str, revision: str | None, token: Secret | None, *others: Any) -> Path:
        tokens.append(token)
        raise hub._access_error(repository, False, token)

    monkeypatch.setattr(hub, "fetch", fetch_forbidden)
    checkpoint = f"    checkpoint_repository: {{source: HF, repo: org/private, runtime_secret_name: {name}}}\n"
    path = folder(tmp_path, "trt_llm:\n  build:\n" + checkpoint)
    with pytest.raises(CheckpointError, match=f"org/private .*the secret {name} is not set. .*/secrets/{name}, TRUSS_SECRET_{name}"):
        prepare_engine(read_deployment(path, {}), {})
    environment = {f"TRUSS_SECRET_{name}": SECRET}
    with pytest.raises(CheckpointError, match="The token has no access to it") as caught:
        prepare_engine(read_deployment(path, environment), environment)
    assert tokens[0] is None and tokens[1] is not None and tokens[1].reveal() == SECRET
    assert SECRET not in str(caught.value)


def test_secrets_never_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A secret in the file, in the environment, in the name of a secret or inside a URL is never printed."""
    monkeypatch.setenv("TRUSS_SECRET_hf_access_token", SECRET)
    texts = {
        0: [BUILD + f"secrets: {{hf_access_token: {SECRET}}}\n", OLDEST + f"secrets:\n hf_access_token: {SECRET}\n"],
        2: [
            f"trt_llm: {{build: {{checkpoint_repository: {{source: HF, repo: a/b, runtime_secret_name: '{SECRET * 5}'}}}}}}\n",
            f"trt_llm: {{build: {{checkpoint_repository: {{source: REMOTE_URL, repo: 'https://u:{SECRET}@host/x.tar'}}}}}}\n",
        ],
    }
    for expected, configurations in texts.items():
        for text in configurations:
            status, shown = dry_run(folder(tmp_path, text), monkeypatch, capsys)
            assert (status, SECRET in shown + caplog.text) == (expected, False), shown


INVALID = {
    "neither": ("trt_llm: {runtime: {}}\n", "it has neither build nor serve"),
    "unknown quantization": (BUILD.replace("WEIGHTS_KV_INT8", "WEIGHTS_KV_INT7"), r"config.yaml:9: .*quantization_type=WEIGHTS_KV_INT7"),
    "ranks and accelerators": (BUILD + "resources: {accelerator: 'A100:2'}\n", "make 1 ranks"),
    "oldest: ranks and accelerators": (OLDEST.replace(": 1", ": 4") + "resources: {accelerator: 'A100:2'}\n", "make 4 ranks"),
    "misspelt": (BUILD.replace("max_beam_width", "max_beam_widht"), "Did you mean trt_llm.build.max_beam_width"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_folders(tmp_path: Path, name: str) -> None:
    text, message = INVALID[name]
    with pytest.raises(ConfigError, match=message):
        read_deployment(folder(tmp_path, text), {})


@pytest.mark.parametrize("count", ["tensor_parallel_count: 1 ", "pipeline_parallel_count: 1 "])
def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setattr("stoker.deploy.truss.load.visible_gpus", lambda environment: 1)
    with pytest.raises(ConfigError, match=r"config.yaml:1\d: .*2 ranks in total, and 1 GPU is visible"):
        read_deployment(folder(tmp_path, BUILD.replace(count, count.replace("1", "2"))), {})


def test_ranks_of_an_existing_engine(tiny_engine: Path, tmp_path: Path) -> None:
    text = SERVE.replace("/path/to/engine", str(tiny_engine)).replace("/path/to/tokenizer", str(tiny_engine))
    assert prepare_engine(read_deployment(folder(tmp_path, text), {}), {}).engine == tiny_engine
    two = text.replace("tensor_parallel_count: 1", "tensor_parallel_count: 2")
    with pytest.raises(ConfigError, match=r"tensor 2 × pipeline 1, and the engine .* was built for tensor 1"):
        prepare_engine(read_deployment(folder(tmp_path, two), {}), {})


def test_the_repositories_of_the_documentation_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locations: list[str] = []

    def fetch(location: str, **options: Any) -> Path:
        locations.append(location)
        raise CheckpointError("not here")

    monkeypatch.setattr("stoker.deploy.sources.resolve", fetch)
    for text in (BUILD, OLDEST):
        with pytest.raises(StokerError, match="not here"):
            prepare_engine(read_deployment(folder(tmp_path, text), {}), {})
    assert locations == ["decaplusplus/llama-7b-hf", "org/engine"]
    assert isinstance(read_deployment(folder(tmp_path, BUILD), {}).source, BuildOptions)
    assert isinstance(read_deployment(folder(tmp_path, OLDEST), {}).source, EngineSource)


def test_stoker_export_truss(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, arguments = tmp_path / "exported", ["export", "truss", str(tiny_engine), str(tmp_path / "exported")]
    status, shown = stoker([*arguments, "--accelerator", "none", "--model-name", "mine", "--set", "max_queue_size:7"], monkeypatch, capsys)
    assert status == 0 and str(out / "model" / "model.py") in shown.splitlines()
    status, shown = dry_run(out, monkeypatch, capsys)
    assert status == 0 and "mine" in shown and str(out / "packages/tensorrt_llm_model_repository/tensorrt_llm/1") in shown
    for wrong, message in (
        (["--set", "speed"], "is no pair"),
        (["--set", "speed:1"], "option 'speed' is unknown"),
        ([], "not an empty folder"),
    ):
        assert stoker([*arguments, *wrong], monkeypatch, capsys)[0] == 2, message


PAGE = (Path(__file__).parents[2] / "docs" / "truss.md").read_text()


def test_docs_truss_md_shows_the_documented_configuration(tmp_path: Path) -> None:
    shown = re.search(r"```yaml\n(trt_llm:.*?)```", PAGE, re.S)
    assert shown is not None and yaml.safe_load(shown[1]) == yaml.safe_load(BUILD)
