"""The commands for Triton on the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from small_tokenizers import small
from test_triton_clients import tensors
from triton_server import TEXT, RunningServer, running, tokenizer

from stoker.cli.main import main

PROMPT = "The dog"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(limits={"max_input_len": 200, "max_output_len": 256}) as running_server:
        yield running_server


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process. Returns (status, standard output, standard error)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, args)])
        status = main()
        output = capfd.readouterr()
        return status, output.out, output.err

    return call


def test_the_client(server: RunningServer, run: Run, tmp_path: Path) -> None:
    status, out, _ = run("client", PROMPT, "-u", server.grpc, "-S", "--expected-outputs", TEXT)
    assert status == 0 and out.startswith(TEXT) and "[INFO] Latency: " in out
    status, out, _ = run("client", PROMPT, "-u", server.http, "-i", "http", "--top-k", 5, "--stop-words", "zebra", "--random-seed", 3)
    assert (status, out.strip()) == (0, PROMPT + TEXT)
    params = server.executor.requests[-1].params
    assert (params.top_k, params.stop, params.seed) == (5, ("zebra",), 3)
    (tmp_path / "ids.csv").write_text("5, 6\n7")
    status, out, _ = run("client", "-u", server.grpc, "--model-name", "tensorrt_llm", "--input-tokens-csv", tmp_path / "ids.csv", "-o", 4)
    assert status == 0 and re.match(r"5,6,7(,\d+){4}\n", out)
    assert server.executor.requests[-1].prompt_ids == [5, 6, 7]
    status, out, _ = run("client", PROMPT, "-u", server.grpc, "--model-name", "ensemble", "--random-seed", 4)
    assert status == 0 and server.executor.requests[-1].params.seed == 4
    status, out, _ = run("client", PROMPT, "-u", server.grpc, "--num-return-sequences", 2, "-S")
    first, second = out.splitlines()[:2]
    assert status == 0 and first == f"0: {TEXT}" and second.startswith("1: ") and TEXT.startswith(second.removeprefix("1: "))
    status, out, err = run(
        "client", "-u", server.grpc, "--model-name", "tensorrt_llm", "--input-tokens-csv", tmp_path / "ids.csv", "-S", "--stop-after-ms", 1
    )
    assert (status, "Latency" in out) == (0, True), err
    for args, error in [
        (("-u", server.grpc, "--model-name", "postprocessing", "--stop-after-ms", 5), "the model postprocessing has no input named stop."),
        (("-u", server.http), "is an HTTP port. Name the server's gRPC port"),
        (("-u", server.grpc, "-i", "http"), "is a gRPC port. Name the server's HTTP port"),
        (("-u", server.grpc, "--model-name", "nope"), "Request for unknown model: 'nope' is not found"),
        (("-u", server.grpc, "--model-name", "tensorrt_llm"), "--input-tokens-csv"),
        (("-i", "http", "-S"), "--protocol grpc"),
        (("-u", server.grpc, "--expected-outputs", "no"), "the answer is "),
    ]:
        status, _, err = run("client", PROMPT, *args)
        assert status and error in err and "Traceback" not in err


def test_replicas_of_a_server_that_is_no_router(server: RunningServer, run: Run) -> None:
    for port, reason in ((server.http, "it answers 404 to this path"), (server.grpc, "")):
        status, _, err = run("replicas", f"http://{port}", "--add", "http://replica:8000")
        assert status == 1 and f"http://{port} is not a router that answers: {reason}" in err and err.count("\n") == 1


def test_clients_send_the_api_key_of_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(api_keys=("a-key-of-this-server",)) as protected:
        for args in (("client", PROMPT, "-u", protected.grpc), ("client", PROMPT, "-u", protected.http, "-i", "http")):
            status, _, err = run(*args)
            assert (status, "API key" in err) == (1, True)
        monkeypatch.setenv("STOKER_API_KEY", "a-key-of-this-server")
        for args in (("client", PROMPT, "-u", protected.grpc), ("client", PROMPT, "-u", protected.http, "-i", "http")):
            status, out, err = run(*args)
            assert (status, TEXT in out) == (0, True), err
        assert run("triton", "identity", "-u", protected.grpc, "--start_len", 4, "--output_len", 2, "--vocab-size", 500)[0] == 0


@pytest.mark.compatibility(
    protocol="Triton", client="client.py of the gpt model", version="0.5", feature="its options, as options of stoker client"
)
def test_the_options_of_the_gpt_client(server: RunningServer, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    small("byte_level").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    options = (
        f"--text={PROMPT}",
        "--output_len=50",
        "--tokenizer_dir",
        folder,
        "--tokenizer_type",
        "auto",
        "-u",
        server.http,
        "-i",
        "http",
    )
    status, out, err = run("client", *options, "-c", 4, "-v", "-beam", 1, "-topk", 5, "-topp", 0.5)
    assert status == 0, err
    assert TEXT in out and "/v2/models/tensorrt_llm/infer" in out  # -v prints the requests
    sent = server.executor.requests[-1]
    assert sent.prompt_ids == tokenizer().encode(PROMPT) and (sent.params.top_k, sent.params.top_p) == (5, 0.5)
    assert sent.params.max_tokens == 50 and sent.params.stop_token_ids == (2,)
    status, out, err = run("client", "-t", PROMPT, "--tokenizer_dir", folder, "-u", server.grpc, "-S", "-o", 50)
    assert (status, out.splitlines()[0]) == (0, TEXT), err
    for args, error in [
        ((PROMPT, "-t", PROMPT), "the prompt is given twice"),
        (("--tokenizer_dir", folder, "--model-name", "ensemble"), "ensemble takes text"),
        (("--tokenizer_type", "bert"), "--tokenizer-type bert is refused"),
        (("-c", 0), "concurrency"),
    ]:
        status, _, err = run("client", "-u", server.grpc, *args)
        assert status and error in err and "Traceback" not in err


def test_identity_input_data_and_sweep(server: RunningServer, run: Run, tmp_path: Path) -> None:
    sizes = ("--batch_size", 8, "--start_len", 128, "--output_len", 20, "--vocab-size", 500)
    status, out, err = run("triton", "identity", "-u", server.grpc, *sizes, "-n", 2, "-m", "async")
    assert status == 0, err
    assert re.fullmatch(
        r"\[INFO\] Batch size: 8, Start len: 128, Output len: 20\n\[INFO\] Latency: \d+\.\d{3} ms\n"
        r"\[INFO\] Throughput: \d+\.\d{3} sentences / sec\n",
        out,
    )
    assert sum(len(request.prompt_ids) == 128 for request in server.executor.requests) == 24
    status, out, err = run("triton", "sweep", "-u", server.grpc, "--concurrency-range", "1:3:2", "--seconds", "0.2", "--vocab-size", 500)
    assert status == 0, err
    lines = re.findall(r"Concurrency: (\d+), throughput: ([\d.]+) infer/sec, latency (\d+) usec\n", out)
    assert [line[0] for line in lines] == ["1", "3"] and all(float(rate) > 0 for _, rate, _ in lines)
    file = tmp_path / "input_data.json"
    assert run("triton", "input-data", "--output", file, "--requests", 3, "--vocab-size", 500)[0] == 0
    row = json.loads(file.read_text())["data"][2]
    assert row["input_ids"]["shape"] == [8] and len(row["input_ids"]["content"]) == 8 and row["request_output_len"]["content"] == [10]
    assert run("triton", "sweep", "--concurrency-range", "9:1")[0] == 2
    status, _, err = run("triton", "identity", "-u", "127.0.0.1:1")
    assert status == 1 and "127.0.0.1:1 does not answer: no grpc server listens there" in err and "Traceback" not in err


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    checkpoint = tiny.save(tiny.model(), tmp_path_factory.mktemp("checkpoint"))
    limits = Limits(max_batch_size=8, max_input_len=128, max_output_len=128, max_num_tokens=256, tokens_per_block=16, max_beam_width=2)
    out = tmp_path_factory.mktemp("engines") / "tiny"
    build(checkpoint, out, BuildConfig(dtype="float32", limits=limits), verify="files")
    return out


def test_export_lint_and_fill(engine: Path, run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "repo"
    status, out, err = run("export", "triton", engine, repository, "--set", "decoupled_mode:true,max_queue_size:7")
    assert status == 0, err
    assert f"{repository}/tensorrt_llm/1/model.py" in out.splitlines() and not (repository / "ensemble" / "1" / "model.py").exists()
    assert run("triton", "lint", repository)[0] == 0
    assert run("export", "triton", engine, repository)[0] == 2
    assert run("export", "triton", engine, tmp_path / "other", "--set", "nonsense")[0] == 2
    config = repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('"true"', '"${flag}"').replace("max_beam_width", "max_beam_widht"))
    status, out, _ = run("triton", "lint", repository)
    assert status == 1 and "max_beam_widht" in out and "max_beam_width" in out
    template = tmp_path / "t.pbtxt"
    template.write_text('value: "${a}" ${b}')
    assert run("triton", "fill", template, "a:1")[1] == 'value: "1" ${b}'
    assert run("triton", "fill", "-i", template, "a:1,b:2")[0] == 0 and template.read_text() == 'value: "1" 2'


@pytest.mark.parametrize("kind", ["launch", "serve"])
def test_a_repository_and_an_engine_are_served_on_tritons_ports(engine: Path, tmp_path: Path, kind: str) -> None:
    """The log lines of a Triton server, the same text over HTTP and gRPC, metrics, and a clean end."""
    import tritonclient.grpc as tgrpc
    import tritonclient.http as thttp

    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    if kind == "launch":
        from stoker.cli.prepare_server import engine_info
        from stoker.deploy.triton.export import export_triton

        export_triton(engine_info(engine), tmp_path / "repo", {"decoupled_mode": "true", "max_tokens_in_paged_kv_cache": "4096"})
        command = ["launch", "--model_repo", str(tmp_path / "repo"), "--host", "127.0.0.1", "--world_size", "1", "--force", *ports]
    else:
        command = ["serve", str(engine), "--kv-cache-tokens", "4096", *["--port" if item == "--http-port" else item for item in ports]]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        announced = process.stdout.readline()
        addresses: dict[str, str] = {}
        while len(addresses) < 3:
            line = process.stderr.readline()
            assert line, "the server ended"
            if found := re.search(r"Started (\w+)(?: Service)? at (127\.0\.0\.1:\d+)", line):
                addresses[found[1]] = found[2]
        assert set(addresses) == {"GRPCInferenceService", "HTTPService", "Metrics"} and addresses["HTTPService"] in announced
        inputs = {"text_input": "the quick", "max_tokens": 5}
        body = {**inputs, "exclude_input_in_output": True}
        answer = httpx.post(f"http://{addresses['HTTPService']}/v2/models/ensemble/generate", json=body, timeout=30).json()
        events = httpx.post(
            f"http://{addresses['HTTPService']}/v2/models/tensorrt_llm_bls/generate_stream", json={**inputs, "stream": True}, timeout=30
        )
        parts = [json.loads(event[6:])["text_output"] for event in events.text.split("\n\n")[:-1]]
        assert "".join(parts) == answer["text_output"]
        grpc = tgrpc.InferenceServerClient(addresses["GRPCInferenceService"])
        config = grpc.get_model_config("ensemble", as_json=True)["config"]
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["preprocessing", "tensorrt_llm", "postprocessing"]
        if kind == "serve":  # an engine without a repository also accepts calls that do not stream
            assert grpc.infer("ensemble", tensors(tgrpc, **body)).as_numpy("text_output").item().decode() == answer["text_output"]
        grpc.close()
        http = thttp.InferenceServerClient(addresses["HTTPService"])
        assert http.get_server_metadata()["name"] == ("triton" if kind == "launch" else "stoker")
        assert http.get_model_config("tensorrt_llm")["parameters"]["gpt_model_path"]["string_value"] == str(engine)
        http.close()
        metrics = httpx.get(f"http://{addresses['Metrics']}/metrics").text
        assert 'nv_inference_request_success{model="ensemble",version="1"}' in metrics and "nv_trt_llm_kv_cache_block_metrics" in metrics
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in log, log


def test_launch_checks_its_options_before_the_start(engine: Path, run: Run, tmp_path: Path) -> None:
    run("export", "triton", engine, tmp_path / "repo")
    for args, error in [
        (("--world_size", 2), "the engine has 1 rank."),
        (("--tensorrt_llm_model_name", "other"), "the repository's model is tensorrt_llm"),
        (("--http_port", 99999), "http_port"),
        (("--multimodal_gpu0_cuda_mem_pool_bytes", 8), "Stoker serves text models only"),
        (("--exit_timeout", 100_000, "--no-mpi", "--oversubscribe", "--multi-model"), "drain_timeout_s"),
    ]:
        status, _, err = run("launch", "--model_repo", tmp_path / "repo", "--force", *args)
        assert status == 2 and error in err
    config = tmp_path / "repo" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace(str(engine), str(tmp_path / "nowhere")))
    status, _, err = run("launch", "--model_repo", tmp_path / "repo", "--force")
    assert status == 2 and "which does not exist" in err
