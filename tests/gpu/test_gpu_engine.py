"""Engines on the device: tokens equal those of transformers, do not depend on the batch, and many steps leak no memory."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from stoker import LLM, SamplingParams
from stoker.base.config import Limits, RuntimeConfig
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.cli.default_model import default_checkpoint
from stoker.profiling.batch_run import random_requests, run_batch
from stoker.profiling.mailbox import SynchronousMailbox
from stoker.runtime.load import load_executor

GOLDEN = Path(__file__).parents[1] / "e2e" / "golden.json"
LIMITS = Limits(max_batch_size=32, max_input_len=512, max_output_len=512, max_num_tokens=2048)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smol") / "engine"
    # float32: the best two logits of the golden answers differ by as little as 0.003.
    config = BuildConfig(device="cuda", dtype="float32", quantization="NO_QUANT", limits=LIMITS)
    build(default_checkpoint(), path, config, verify="files")
    return path


def test_golden_answers(smol: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    with LLM(smol) as llm:
        for chat in golden["chats"]:
            prompt = llm.chat_prompt([{"role": "user", "content": chat["message"]}])
            answer = llm.generate(prompt, SamplingParams(max_tokens=len(chat["token_ids"])))
            assert answer.choices[0].token_ids == chat["token_ids"]


def test_tokens_do_not_depend_on_the_batch(smol: Path) -> None:
    generator = random.Random(3)
    prompts = [[generator.randrange(100, 49000) for _ in range(generator.randrange(2, 300))] for _ in range(24)]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    with LLM(smol) as llm:
        together = [answer.choices[0].token_ids for answer in llm.generate(prompts, params)]
        alone = [llm.generate(prompt, params).choices[0].token_ids for prompt in prompts[:6]]
    assert together[:6] == alone


def test_ten_thousand_steps_leak_no_memory(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    build(tmp_path, tmp_path / "engine", BuildConfig(device="cuda", dtype="bfloat16", dummy_weights=True, limits=LIMITS), verify="none")
    executor = load_executor(tmp_path / "engine", RuntimeConfig(kv_cache_tokens=8192), SynchronousMailbox)
    run_batch(executor, random_requests(40, 60, 100, 1000), 100)
    torch.cuda.synchronize()
    before, pages = torch.cuda.memory_allocated(), resident_pages()
    while executor.stats.num_steps < 10_000:
        run_batch(executor, random_requests(40, 60, 200, 1000, seed=executor.stats.num_steps), 200)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert resident_pages() <= pages + 8192  # 32 MiB
    assert executor.scheduler.kv_cache.pool.num_free == executor.scheduler.kv_cache.pool.num_blocks


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
