"""perf_analyzer, which requests all outputs of the metadata: as genai-perf runs it, and as the README of tensorrtllm_backend does.

The inputs and options are those that genai-perf 0.0.16 writes for `genai-perf profile --backend tensorrtllm`. The oracle is the same
engine in this process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from triton_server import RunningServer, running_engine

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.server.protocols.kserve.model_config import TritonOptions
from stoker.server.protocols.kserve.models.catalogue import default_models

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

NUM_TOKENS = 12
PROMPTS = ("pe and love Misshapen", "port speaks goldenly")


@pytest.fixture(scope="module")
def analyzer(script: Callable[[str], ModuleType]) -> Any:
    try:
        return script("real_perf_analyzer").PerfAnalyzer.installed()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"perf_analyzer cannot be installed (a package registry is needed): {error}")


@pytest.fixture(scope="module", params=[True, False], ids=["decoupled", "unary"])
def server(request: pytest.FixtureRequest, engine_with_beams: Path) -> Iterator[tuple[RunningServer, bool]]:
    models = default_models()
    if not request.param:
        models = tuple(msgspec.structs.replace(model, decoupled=False) for model in models)
    with running_engine(engine_with_beams, options=TritonOptions(models=models)) as running_server:
        yield running_server, request.param


@pytest.fixture(scope="module")
def texts(engine_with_beams: Path) -> set[str]:
    with LLM(engine_with_beams, device="cpu", kv_cache_tokens=2048) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
        return {completion.choices[0].text for completion in llm.generate(list(PROMPTS), params)}


def profile(analyzer: Any, folder: Path, data: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """Run perf_analyzer with these inputs, and return the requests of its export.

    Twice, perf_analyzer failed on a busy machine with a command that succeeded in all other runs: it reported success and left its export
    empty, and it printed the list of its options with status 99. Such a run is repeated.
    """
    (folder / "inputs.json").write_text(json.dumps({"data": data}))
    export = folder / "export.json"
    command = [
        analyzer.program, *options, "--stability-percentage", "999", "--request-count", "6", "--concurrency-range", "2",
        "--service-kind", "triton", "--input-data", folder / "inputs.json", "--profile-export-file", export,
    ]  # fmt: skip
    for _ in range(2):
        export.unlink(missing_ok=True)  # perf_analyzer refuses a path that exists
        ran = subprocess.run([*map(str, command)], env=analyzer.environment, capture_output=True, text=True, timeout=120)
        refused = ran.returncode == 99 and "--bls-composing-models" in ran.stdout + ran.stderr
        if not refused and (ran.returncode or export.stat().st_size):
            break
    assert ran.returncode == 0, ran.stderr[:2000] + ran.stdout[:2000]  # the reason is before the list of options
    assert export.stat().st_size, ran.stdout[-2000:] + ran.stderr[-2000:]
    requests: list[dict[str, Any]] = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= 6
    return requests


@pytest.mark.compatibility(
    protocol="Triton",
    client="perf_analyzer",
    version="2.51",
    feature="as genai-perf 0.0.16 runs it: --backend tensorrtllm, unary and streamed",
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_genai_perf(server: tuple[RunningServer, bool], texts: set[str], analyzer: Any, tmp_path: Path, model: str) -> None:
    running_server, decoupled = server
    rows = [
        {"model": model, "text_input": [prompt], "max_tokens": [NUM_TOKENS], "exclude_input_in_output": [True], "min_length": [NUM_TOKENS]}
        for prompt in PROMPTS
    ]
    rows = [row | ({"stream": [True]} if decoupled else {}) for row in rows]
    streaming = ("--streaming",) if decoupled else ()
    requests = profile(analyzer, tmp_path, rows, "-m", model, "-u", running_server.grpc, "-i", "grpc", "--async", *streaming)
    responses = [request["response_outputs"] for request in requests]
    assert {"".join(output["text_output"] for output in outputs) for outputs in responses} == texts
    assert all((len(outputs) > 1) == decoupled for outputs in responses)


@pytest.mark.compatibility(
    protocol="Triton", client="perf_analyzer", version="2.51", feature="batches of token ids, as in the README of tensorrtllm_backend"
)
def test_batches_of_token_ids(server: tuple[RunningServer, bool], analyzer: Any, tmp_path: Path) -> None:
    running_server, decoupled = server
    rows = [
        {
            "input_ids": {"content": [first + i for i in range(8)], "shape": [8]},
            "input_lengths": {"content": [8], "shape": [1]},
            "request_output_len": {"content": [5], "shape": [1]},
        }
        for first in (20, 30)
    ]
    protocol = ("-i", "grpc", "--async", "--streaming", "-u", running_server.grpc) if decoupled else ("-u", running_server.http)
    requests = profile(analyzer, tmp_path, rows, "-m", "tensorrt_llm", "-b", "8", *protocol)
    lengths = [output["sequence_length"] for request in requests for output in request["response_outputs"]]
    assert set(map(str, lengths)) == {"13"} if decoupled else {str([13] * 8)}
