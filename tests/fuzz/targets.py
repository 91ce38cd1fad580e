"""What is fuzzed: each target reads bytes with a reader of Stoker, and returns if they are valid or refused in the documented way.

Any other exception is a defect, as is a result that contradicts an independent reader. `fuzz.py` runs the targets with coverage-guided
inputs, and `test_fuzz_corpus.py` with the inputs in `corpus/`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from stoker.base.errors import CheckpointError, StokerError

CORPUS = Path(__file__).parent / "corpus"
MAX_MESSAGE = 4000  # characters of an error message
MAX_RENDER_S = 1
MAX_CHARS = 10_000

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    """Add a function to TARGETS under its name."""
    TARGETS[function.__name__] = function
    return function


@cache
def folder() -> Path:
    """A directory for the files that readers open by path, in memory if possible."""
    memory = Path("/dev/shm")
    opened = tempfile.TemporaryDirectory(prefix="stoker-fuzz-", dir=memory if memory.is_dir() else None)
    _opened.append(opened)
    return Path(opened.name)


_opened: list[tempfile.TemporaryDirectory[str]] = []  # deleted when the process ends


def written(name: str, data: bytes) -> Path:
    """A file below `folder` with this content."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def refusals(*kinds: type[BaseException]) -> Iterator[None]:
    """Errors of Stoker, and of `kinds`, are allowed in the block if their message is not empty and of limited length."""
    try:
        yield
    except (StokerError, *kinds) as error:
        assert 0 < len(str(error)) <= MAX_MESSAGE, f"a message of {len(str(error))} characters: {error!r:.200}"


@target
def pbtxt(data: bytes) -> None:
    """The text format of protobuf. What is read is equal after it is written and read again."""
    from stoker.deploy.syntax.pbtxt import parse

    with refusals():
        message = parse(data.decode("utf-8", "replace"))
        for field in message.walk():
            assert field.line >= 1


@target
def triton_config(data: bytes) -> None:
    """config.pbtxt of the model tensorrt_llm, as a repository of this model alone."""
    from stoker.deploy.triton.load import load_repository

    written("triton/tensorrt_llm/config.pbtxt", data)
    with refusals():
        load_repository(folder() / "triton", {})


@target
def serving_properties(data: bytes) -> None:
    """serving.properties of LMI."""
    from stoker.deploy.lmi.load import load_lmi

    written("lmi/serving.properties", data)
    with refusals():
        load_lmi(folder() / "lmi", {})


@target
def truss_config(data: bytes) -> None:
    """config.yaml of a Truss."""
    from stoker.deploy.truss.load import load_truss

    written("truss/config.yaml", data)
    with refusals():
        load_truss(folder() / "truss", {})


@target
def kserve_infer(data: bytes) -> None:
    """The body of an /infer request. Its first two bytes are the length of its JSON; 0: the whole body is JSON."""
    from stoker.server.protocols.kserve.http.infer import read_infer_request

    if len(data) < 2:
        return
    (length,), body = struct.unpack("<H", data[:2]), data[2:]
    served, memory = kserve_model()
    with refusals():
        read_infer_request(body, b"%d" % length if length else None, served, memory)


@target
def kserve_message(data: bytes) -> None:
    """A ModelInferRequest of gRPC."""
    from stoker.server.protocols.kserve.grpc.messages import parse, pb, read_infer_message

    served, memory = kserve_model()
    with refusals():
        read_infer_message(parse(pb.ModelInferRequest, data), served, memory)


@cache
def kserve_model() -> tuple[Any, Any]:
    """The model `ensemble` as it is served without a repository, and the registry of shared memory."""
    from stoker.frontend.repository import ModelRepository
    from stoker.server.metrics.frontend import FrontendMetrics
    from stoker.server.protocol import Context
    from stoker.server.protocols.kserve.inference import ServedModel
    from stoker.server.protocols.kserve.models.catalogue import default_models
    from stoker.server.protocols.kserve.shared_memory.registry import SharedMemory
    from stoker.server.settings import ServerSettings

    model = next(model for model in default_models() if model.name == "ensemble")
    context = Context(ModelRepository(), ServerSettings(max_request_bytes=1 << 16), FrontendMetrics())
    return ServedModel(model=model, run=lambda inference: None, ready=lambda: True), SharedMemory(context)  # type: ignore[arg-type]


@target
def gguf(data: bytes) -> None:
    """A GGUF file: its header, and the model config and tokenizer that its metadata describes."""
    from stoker.builder.checkpoint.gguf.weights import GGUFWeights
    from stoker.builder.tokenizers.gguf import convert_gguf_tokenizer

    with refusals():
        convert_gguf_tokenizer(GGUFWeights(written("fuzz.gguf", data)))


@target
def safetensors(data: bytes) -> None:
    """A safetensors file. Stoker accepts no file that the library of the format refuses."""
    import safetensors as library

    from stoker.engine.safetensors_header import read_header, read_metadata

    path = written("fuzz.safetensors", data)
    with refusals():
        read_metadata(path, CheckpointError, "Download it again.")
        entries = read_header(path, CheckpointError, "Download it again.")
        with library.safe_open(path, "pt") as opened:
            assert set(opened.keys()) == set(entries)


@target
def tokenizer_json(data: bytes) -> None:
    """tokenizer.json. A tokenizer that loads encodes and decodes text."""
    from stoker.frontend.tokenizer import Tokenizer

    path = written("tokenizer/tokenizer.json", data).parent
    with refusals():
        tokenizer = Tokenizer.load(path)
        ids = tokenizer.encode("the quick brown fox 你好 \U0001f389")
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        detokenizer = tokenizer.detokenizer()
        text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
        assert isinstance(text, str)


class Slow(Exception):
    """A template was interrupted, as its process in the server is."""


@target
def chat_template(data: bytes) -> None:
    """A chat template: its source is parsed or refused at once; rendering may raise any exception, and is limited in time."""
    from stoker.frontend.chat_template import ChatTemplate, PromptTooLongError

    source = data.decode("utf-8", "replace")
    with refusals():
        template = ChatTemplate(source, {"bos_token": "<s>"})
        tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        variables = template.variables(messages, max_chars=MAX_CHARS, tools=tools if "tools" in source else None)

        def interrupt(number: int, frame: Any) -> None:
            raise Slow

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, MAX_RENDER_S)
        try:
            text = template.run(variables, MAX_CHARS)
        except (Slow, PromptTooLongError, Exception):
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert len(text) <= MAX_CHARS


@target
def config_json(data: bytes) -> None:
    """config.json of a checkpoint: it becomes a model config, or is refused."""
    from stoker.models.config_reader import read_model_config
    from stoker.models.registry import resolve_architecture

    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(config, dict):
        with refusals():
            read_model_config(resolve_architecture(config), config)
