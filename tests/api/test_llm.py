"""stoker.LLM with real engines: any location as the model, settings of the build, results, and errors of wrong arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_hub import local_hub

from stoker import LLM, ConfigError, EngineError, RequestError, SamplingParams
from stoker.engine.reader import Engine

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
KV = {"kv_cache_tokens": 512, "num_threads": 1}


@pytest.fixture(scope="module")
def checkpoint(tiny_engine: Path) -> Path:
    return tiny_engine.parent / "checkpoint"


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> Iterator[LLM]:
    """An engine with lower lengths than it was built for, and with settings that it was built with."""
    with LLM(tiny_engine, max_model_len=60, max_num_seqs=4, dtype="float", tensor_parallel_size=1, quantization="NO_QUANT", **KV) as loaded:
        yield loaded


def texts(completions: list[Any]) -> list[str]:
    return [completion.choices[0].text for completion in completions]


def test_a_checkpoint_is_built_once_with_the_settings_of_vllm(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    stages: list[set[str]] = []
    seeded = []
    for _ in range(2):
        stages.append(set())
        with LLM(
            checkpoint, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True, seed=5,
            progress=lambda stage, done, total: stages[-1].add(stage), **KV,
        ) as llm:  # fmt: skip
            assert not llm.service.info.limits.max_seq_len > 100
            seeded.append(texts([llm.generate("the quick", SamplingParams(max_tokens=8, temperature=2.0)) for _ in range(3)]))
            with pytest.raises(RequestError, match=r"limit of a sequence is 100\."):
                llm.generate([1] * 60, SamplingParams(max_tokens=41))
    (engine,) = (path.parent for path in (tmp_path / "engines").glob("*/config.json"))
    assert Engine.open(engine).config.limits.max_total_len == 100
    assert "weights" in stages[0] and "weights" not in stages[1]
    assert seeded[0] == seeded[1] and len(set(seeded[0])) == 3  # requests differ, runs do not


def test_an_archive_and_no_progress(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "tiny.tar", "w") as archive:
        archive.add(tiny_engine, "tiny")
    with LLM(tmp_path / "tiny.tar", progress=False, **KV) as llm:
        assert llm.generate([1, 2], PARAMS).usage.completion_tokens == 6
        assert llm.service.model_name == "tiny"
    assert capfd.readouterr().err == ""


def test_a_hub_id_with_a_revision(checkpoint: Path, tmp_path: Path, new_cache: Callable[[Path], Path]) -> None:
    """In a process of its own, because huggingface_hub reads its variables when it is imported. Progress is shown by default."""
    script = "import sys; from stoker import LLM\nwith LLM('acme/tiny', revision='v1', max_num_seqs=2, kv_cache_tokens=512) as llm:\n"
    script += "    print(llm.service.model_name, llm.generate([1, 2]).usage.prompt_tokens)"
    with local_hub({"acme/tiny": checkpoint}) as hub:
        cache = {"STOKER_CACHE": str(new_cache(tmp_path))}
        environment = os.environ | hub.environment(tmp_path / "hub") | cache | {"PYTHONPATH": ":".join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=110)
        assert ran.stdout == "tiny 2\n", ran.stderr
        assert any(path.startswith("/api/models/acme/tiny/revision/v1") for path in hub.requested)
    assert "stoker: weights: 100 %" in ran.stderr


def test_a_method_of_a_quantized_checkpoint_means_as_it_is_stored(checkpoint: Path, tmp_path: Path) -> None:
    from stoker.api.prepare import _without_stored_method
    from stoker.deploy.build_settings import BuildSettings
    from stoker.deploy.deployment import BuildOptions

    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    stored, plain = BuildOptions(checkpoint=str(tmp_path)), BuildOptions(checkpoint=str(checkpoint))
    for name in ("awq", "awq_marlin", "AWQ"):
        assert _without_stored_method(BuildSettings(quantization=name), stored).quantization is None
    assert _without_stored_method(BuildSettings(quantization="fp8"), stored).quantization == "fp8"
    assert _without_stored_method(BuildSettings(quantization="awq"), plain).quantization == "awq"


def test_lengths_below_those_of_the_engine(llm: LLM) -> None:
    assert llm.generate([1] * 54, PARAMS).usage.completion_tokens == 6
    with pytest.raises(RequestError, match=r"limit of a sequence is 60\."):
        llm.generate([1] * 55, PARAMS)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "float16"}, r"dtype=float16 is refused: .* is an engine, and only a build can change it\. Leave it out"),
        ({"tensor_parallel_size": 2}, "tensor_parallel=2 is refused: .* is an engine"),
        ({"quantization": "fp8"}, "quantization=fp8 is refused: .* is an engine"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=float8_e4m3fn is refused: .* is an engine"),
        ({"max_model_len": 5000}, r"max_total_len=5000 is refused: the engine was built for 244\. Use 1 to 244"),
        ({"max_num_seqs": 9}, "max_batch_size=9 is above the engine's 8"),
        ({"quantization": "int9"}, r"unknown quantization 'int9'\. Use one of"),
        ({"revision": "main"}, "revision='main' is refused: .* is not a hub id"),
        ({"tokenizer": "no/such/folder"}, "no/such/folder"),
    ],
    ids=str,
)
def test_settings_that_an_engine_does_not_have(tiny_engine: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as refused:
        LLM(tiny_engine, **setting)
    assert isinstance(refused.value, (ConfigError, EngineError)) or "no/such" in message


def test_a_tokenizer_of_its_own(tiny_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"it has no tokenizer\.json"):
        LLM(tiny_engine, tmp_path / "empty")
    shutil.copy(tiny_engine / "tokenizer.json", tmp_path)
    with LLM(tiny_engine, str(tmp_path), **KV) as llm:  # without tokenizer_config.json it has no chat template
        assert llm.generate("the quick", PARAMS).usage.completion_tokens == 6
        with pytest.raises(RequestError, match="has no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_one_prompt_or_several(llm: LLM) -> None:
    one = llm.generate("the quick", PARAMS)
    ids = llm.service.encode("the quick")
    assert one.choices[0].text == llm.generate(ids, PARAMS).choices[0].text
    finished: list[Any] = []
    several = llm.generate(["the quick", ids, tuple(ids)], [PARAMS, PARAMS, SamplingParams(max_tokens=2, ignore_eos=True)], finished.append)
    assert [len(completion.choices[0].token_ids) for completion in several] == [6, 6, 2]
    assert texts(several)[:2] == [one.choices[0].text] * 2
    assert sorted(c.request_id for c in finished) == sorted(c.request_id for c in several)
    assert llm.generate([], PARAMS) == []


def test_conversations(llm: LLM) -> None:
    first = [{"role": "user", "content": "one"}]
    second = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "three"}]
    both = llm.chat([first, second], PARAMS)
    assert isinstance(both, list)
    assert texts(both) == texts([llm.chat(first, PARAMS), llm.chat(second, PARAMS)])
    assert both[0].prompt_token_ids == llm.chat_prompt(first) != both[1].prompt_token_ids
    tool = {"type": "function", "function": {"name": "heat"}}
    assert len(llm.chat_prompt(first, tools=[tool])) > len(llm.chat_prompt(first))


def test_results_have_timings(llm: LLM) -> None:
    timings = llm.generate("the quick", PARAMS).timings
    assert timings is not None
    assert 0 <= timings.queue_s < timings.time_to_first_token_s <= timings.total_s
    assert timings.tokens_per_s == pytest.approx(6 / timings.total_s) and timings.time_per_output_token_s > 0


async def test_streams(llm: LLM) -> None:
    deltas = [delta async for delta in llm.stream("the quick", PARAMS)]
    assert "".join(delta.text for delta in deltas) == llm.generate("the quick", PARAMS).choices[0].text
    assert deltas[-1].timings is not None and deltas[-1].usage is not None
    with pytest.raises(TypeError, match="params="):
        _ = [delta async for delta in llm.stream("a", "greedy")]  # type: ignore[arg-type]


def test_strings_for_stop_and_bad_words(llm: LLM) -> None:
    text = llm.generate("the quick", PARAMS).choices[0].text
    stopped = llm.generate("the quick", SamplingParams(max_tokens=6, ignore_eos=True, stop=text[2])).choices[0]
    assert stopped.text == text[: text.index(text[2])] and stopped.stop_reason == text[2]
    first = llm.generate("the quick", PARAMS).choices[0].token_ids[0]
    word = llm.tokenizer.decode([first])
    banned = SamplingParams(max_tokens=6, ignore_eos=True, bad_words=[(first,)])
    assert first not in llm.generate("the quick", banned).choices[0].token_ids
    if llm.service.encode(word, add_special_tokens=False) == [first]:
        assert first not in llm.generate("the quick", SamplingParams(max_tokens=6, ignore_eos=True, bad_words=word)).choices[0].token_ids


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("generate", (5,), r"prompts=5 is refused: it must be a string"),
        ("generate", (["a", 5],), r"prompts\[1\]=5 is refused: it must be a string or a list of token ids"),
        ("generate", ([[1, "a"]],), r"prompts\[0\]=.* is refused"),
        ("generate", ([1, "a"],), r"prompts=.* is refused"),
        ("generate", ("a", {"max_tokens": 5}), r"params=.* is refused: it must be SamplingParams"),
        ("chat", ("hello",), r"messages='hello' is refused: it must be a list of messages"),
        ("chat", ([["hello"]],), r"messages\[0\]=.* is refused: it must be a list of messages"),
        ("chat", ([[{"role": "user", "content": "a"}], "b"],), r"messages\[1\]='b' is refused"),
    ],
)
def test_wrong_types(llm: LLM, method: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message) as refused:
        getattr(llm, method)(*arguments)
    assert isinstance(refused.value, RequestError)


def test_wrong_values(llm: LLM) -> None:
    with pytest.raises(RequestError, match="there are 2 values for 1 prompts"):
        llm.generate(["a"], [PARAMS, PARAMS])
    with pytest.raises(RequestError, match="messages="):
        llm.chat([], PARAMS)
