"""Repositories of each release with an engine: the requests of that release's clients, and the shape of every output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as tgrpc
from test_triton_clients import Stream
from triton_server import RunningServer, running_engine

from stoker import LLM
from stoker.base.types import SamplingParams
from stoker.deploy.triton.fill import fill_template
from stoker.deploy.triton.load import load_repository
from stoker.frontend.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
import triton_templates as templates

PROMPT = "the quick brown"
NUM_TOKENS = 6
FILLED = "triton_max_batch_size:8,decoupled_mode:true,batching_strategy:inflight_fused_batching,max_beam_width:1,logits_datatype:TYPE_FP32"


@pytest.fixture(scope="module", params=templates.ERAS)
def served(request: pytest.FixtureRequest, engine_with_beams: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(release, server) of the release's templates, filled in for the engine."""
    pairs = f"{FILLED},engine_dir:{engine_with_beams},tokenizer_dir:{engine_with_beams},encoder_input_features_data_type:TYPE_FP16"
    files = {name: fill_template(text, pairs) for name, text in templates.repository(request.param).items()}
    deployment = load_repository(templates.write(tmp_path_factory.mktemp("repository"), files), {})
    with running_engine(engine_with_beams, options=deployment.server.options) as server:
        yield request.param, server


@pytest.fixture(scope="module")
def generated(engine_with_beams: Path) -> list[int]:
    with LLM(engine_with_beams, device="cpu", kv_cache_tokens=2048) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)).choices[0].token_ids


def arrays(release: str, **values: Any) -> dict[str, np.ndarray]:
    """Inputs of one row. Counts and ids are unsigned in release 0.5."""
    found = {}
    for name, value in values.items():
        array = np.array([value if isinstance(value, list) else [value]])
        if array.dtype.kind == "U":
            array = np.array([[value.encode()]], object)
        elif array.dtype.kind == "i":
            unsigned = release == "0.5" and name not in ("input_ids", "input_lengths")
            array = array.astype(np.uint32 if unsigned else np.int32)
        found[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
    return found


def shapes(result: Any) -> dict[str, tuple[int, ...]]:
    return {output.name: result.as_numpy(output.name).shape for output in result.get_response().outputs}


def expected_shapes(release: str, new: int) -> dict[str, tuple[int, ...]]:
    """Of the outputs that all generating models of a release have, for one sequence of `new` tokens with log-probabilities."""
    if release == "0.5":
        return {}
    common: dict[str, tuple[int, ...]] = {"context_logits": (1, 1, 1), "generation_logits": (1, 1, 1, 1)}
    common |= {"cum_log_probs": (1, 1), "output_log_probs": (1, 1, new)}
    return common if release == "0.8" else common | {"batch_index": (1, 1), "sequence_index": (1, 1)}


@pytest.mark.compatibility(
    protocol="Triton",
    client="inflight_batcher_llm_client.py",
    version="0.5, 0.8, 0.18, 1.x",
    feature="streamed and whole answers of that release's repository",
)
def test_token_ids(served: tuple[str, RunningServer], engine_with_beams: Path, generated: list[int]) -> None:
    """The client joins output_ids[0][0] of a stream, and reads each row of output_ids[0] of a whole answer."""
    release, server = served
    ids = Tokenizer.load(engine_with_beams).encode(PROMPT)
    scored = {} if release == "0.5" else {"return_log_probs": True}
    inputs = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": NUM_TOKENS, "beam_width": 1, "temperature": 1.0, **scored}
    with Stream(server) as stream:
        stream.send("tensorrt_llm", "12345", **arrays(release, **inputs, streaming=True))
        parts = stream.rest()
        stream.send("tensorrt_llm", "12345", **arrays(release, **inputs, streaming=False))
        (whole,) = stream.rest()
    assert [token for part in parts for token in list(part.as_numpy("output_ids")[0][0])] == generated
    assert [list(row) for row in whole.as_numpy("output_ids")[0]] == [[*ids, *generated]]
    size = len(ids) + NUM_TOKENS
    lengths = {} if release == "0.5" else {"sequence_length": (1, 1)}
    assert shapes(whole) == {"output_ids": (1, 1, size), **lengths, **expected_shapes(release, NUM_TOKENS)}
    assert all(shapes(part) == {"output_ids": (1, 1, 1), **lengths, **expected_shapes(release, 1)} for part in parts)


@pytest.mark.compatibility(
    protocol="Triton",
    client="end_to_end_grpc_client.py",
    version="0.5, 0.8, 0.18, 1.x",
    feature="streamed and whole answers of that release's repository",
)
def test_texts(served: tuple[str, RunningServer], engine_with_beams: Path, generated: list[int]) -> None:
    """The client reads text_output[0].decode() of each response."""
    release, server = served
    tokenizer = Tokenizer.load(engine_with_beams)
    scored = {} if release == "0.5" else {"return_log_probs": True}
    inputs = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "beam_width": 1, "temperature": 1.0, "end_id": 50256, **scored}
    whole_text = tokenizer.decode([*tokenizer.encode(PROMPT), *generated])
    for model in ("ensemble",) if release == "0.5" else ("ensemble", "tensorrt_llm_bls"):
        with Stream(server) as stream:
            stream.send(model, **arrays(release, **inputs, stream=True))
            parts = stream.rest()
            stream.send(model, **arrays(release, **inputs, stream=False))
            (whole,) = stream.rest()
        assert PROMPT + "".join(part.as_numpy("text_output")[0].decode() for part in parts) == whole_text
        assert whole.as_numpy("text_output")[0].decode() == whole_text
        assert shapes(whole) == {"text_output": (1,), **expected_shapes(release, NUM_TOKENS)}
        assert all(shapes(part)["text_output"] == (1,) for part in parts)


def test_the_models_of_the_tokenizer(served: tuple[str, RunningServer], engine_with_beams: Path) -> None:
    _, server = served
    tokenizer = Tokenizer.load(engine_with_beams)
    ids = tokenizer.encode(PROMPT)
    with tgrpc.InferenceServerClient(server.grpc) as client:
        words = {name: np.array([[b""]], object) for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT")}
        query = {"QUERY": np.array([[PROMPT.encode()]], object), "REQUEST_OUTPUT_LEN": np.array([[3]], np.int32), **words}
        before = client.infer("preprocessing", _inputs(query))
        assert shapes(before) == {
            "INPUT_ID": (1, len(ids)), "REQUEST_INPUT_LEN": (1, 1), "BAD_WORDS_IDS": (1, 2, 1), "STOP_WORDS_IDS": (1, 2, 1),
            "REQUEST_OUTPUT_LEN": (1, 1),
        }  # fmt: skip
        after = client.infer("postprocessing", _inputs({"TOKENS_BATCH": np.array([[ids, ids[::-1]]], np.int32)}))
    assert [text.decode() for text in after.as_numpy("OUTPUT")] == [tokenizer.decode(ids), tokenizer.decode(ids[::-1])]


def _inputs(values: dict[str, np.ndarray]) -> list[Any]:
    inputs = []
    for name, array in values.items():
        inputs.append(tgrpc.InferInput(name, array.shape, "BYTES" if array.dtype == object else "INT32"))
        inputs[-1].set_data_from_numpy(array)
    return inputs
