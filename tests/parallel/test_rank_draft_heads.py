"""Draft heads on engines of several ranks draft as on one rank, and drafts are accepted.

The models count: their layers add little to the embedding, and the head of token n + 1 is the embedding of n. The heads predict that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import GROUPED, MLA
from head_oracles import ORACLES, Files, MtpOracle, per_expert, write
from oracles import hf_model
from rank_executors import generate, load
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from stoker.base.config import Limits, Mapping
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.runtime.worker.model_runner import ModelRunner

MAPPINGS = {
    "one": Mapping(),
    "tp2": Mapping(tensor_parallel=2),
    "pp2": Mapping(pipeline_parallel=2),
    "tp2pp2": Mapping(tensor_parallel=2, pipeline_parallel=2),
}
# 9 and 3 heads are not divisible by 2. EAGLE-3 reads the states before layers 2, 3 and 3, and the second stage begins at layer 3.
LLAMA = GROUPED | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8, "num_hidden_layers": 6}
DEEPSEEK = MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1}
PROMPTS = [[5, 9, 61, 33, 8, 70, 12], [40, 41, 3, 90, 17] * 6]
COUNT = 24
DYNAMIC = "dynamic:3,2,6"
TREE = "[0],[1],[0,0],[1,0],[0,0,0]"


class Found(NamedTuple):
    tokens: list[list[int]]
    drafts: list[list[int]]  # of all sequences and steps
    num_accepted: int


@torch.no_grad()
def make_counting(model: Any) -> None:
    """Make the outputs of all layers small, and each token the successor of the one before."""
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.05)


@torch.no_grad()
def counting_head(kind: str, files: Files, embedding: Tensor) -> Files:
    """The files of a head that counts. The EAGLE-3 head reads the state of the token before the newest one, so that only its first draft
    is right."""
    files, size = {name: tensor.detach().clone() for name, tensor in files.items()}, embedding.shape[1]
    for name, tensor in files.items():
        if "o_proj" in name or "down_proj" in name or name.endswith(("fc.bias", ".linear.weight", ".linear.bias")):
            tensor.mul_(0.002)
        elif kind == "medusa":
            tensor.copy_(embedding.roll(2 + int(name.split(".")[0]), 0))
        elif name == "norm.weight":
            tensor.fill_(1.0)
        elif kind == "eagle3" and name == "lm_head.weight":
            tensor.copy_(embedding.roll(2, 0)[: len(tensor)])
        elif name.endswith(("fc.weight", "eh_proj.weight")):  # of [embedding, state], or of three states
            at = tensor.shape[1] - size if kind == "eagle3" else 0
            tensor.mul_(0.005)[:, at : at + size] += torch.eye(size)
    return files


def build_all(checkpoint: Path, folder: Path, tokenizer: Path, *names: str, device: str = "cpu") -> None:
    limits = Limits(max_input_len=64, max_output_len=64, max_num_tokens=64, max_batch_size=8, tokens_per_block=16)
    for name in names:
        config = BuildConfig(tokenizer=str(tokenizer), device=device, dtype="float32", limits=limits, mapping=MAPPINGS[name])
        build(checkpoint, folder / name, config, verify="none")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return build_llama(tmp_path_factory.mktemp("llama"), tokenizer, *MAPPINGS)


def build_llama(folder: Path, tokenizer: Path, *names: str, device: str = "cpu") -> Path:
    """The engines of these mappings, and all heads, in `folder`."""
    model = hf_model("Llama", **LLAMA, tie_word_embeddings=False)
    make_counting(model)
    model.save_pretrained(folder / "hf")
    build_all(folder / "hf", folder, tokenizer, *names, device=device)
    for kind in ("medusa", "eagle", "eagle3"):
        oracle = ORACLES[kind](model)
        write(folder / kind, oracle.config, counting_head(kind, oracle.files, model.model.embed_tokens.weight))
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """The prediction layer has latent attention and experts."""
    folder = tmp_path_factory.mktemp("deepseek")
    model = hf_model("DeepseekV3", **DEEPSEEK)
    make_counting(model)
    oracle = MtpOracle(model, DeepseekV3DecoderLayer)
    config = json.loads(model.config.to_json_string()) | {"num_nextn_predict_layers": 1, "architectures": ["DeepseekV3ForCausalLM"]}
    tensors = per_expert(model.state_dict())
    write(folder / "hf", config, tensors)
    write(folder / "mtp", config, tensors | counting_head("mtp", oracle.files, model.model.embed_tokens.weight))
    build_all(folder / "hf", folder, tokenizer, "one", "tp2", "pp2")
    return folder


def run(engine: Path, heads: Path, tree: str | None) -> Found:
    executor = load(engine, speculate=str(heads), draft_tokens=5, adaptive_drafts=False, kv_cache_tokens=256, draft_tree=tree)
    drafts: list[list[int]] = []
    try:
        assert isinstance(executor.runner, ModelRunner) and executor.runner.draft_runner is not None
        compute = executor.runner.draft_runner.run

        def watched(*args: Any) -> Tensor:
            found = compute(*args)
            drafts.extend(found.t().tolist())
            return found

        executor.runner.draft_runner.run = watched  # type: ignore[method-assign]
        tokens = generate(executor, PROMPTS, COUNT)
        return Found(tokens, drafts, executor.snapshot().num_accepted_draft_tokens)
    finally:
        executor.close()


def check(folder: Path, name: str, kind: str, tree: str | None) -> None:
    one, found = (run(folder / engine, folder / kind, tree) for engine in ("one", name))
    assert found == one
    assert found.tokens == [[prompt[-1] + 1 + i for i in range(COUNT)] for prompt in PROMPTS]  # as without drafts
    assert found.num_accepted > 0.8 * len(found.drafts) > 5


@pytest.mark.parametrize(
    ("name", "kind", "tree"),
    [
        ("tp2", "medusa", TREE),
        ("tp2", "eagle3", None),
        ("pp2", "eagle", None),
        ("pp2", "eagle", TREE),
        ("tp2", "eagle", DYNAMIC),
        ("tp2pp2", "eagle3", None),
        ("pp2", "eagle3", TREE),
    ],
)
def test_heads(llama: Path, name: str, kind: str, tree: str | None) -> None:
    check(llama, name, kind, tree)


@pytest.mark.parametrize(("name", "tree"), [("tp2", TREE), ("pp2", DYNAMIC)])
def test_multi_token_prediction(deepseek: Path, name: str, tree: str | None) -> None:
    check(deepseek, name, "mtp", tree)
