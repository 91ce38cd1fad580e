"""Draft heads: their drafts equal those that transformers' layers compute, answers are those of plain decoding, and misfits are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drive import Driven, request
from head_oracles import ORACLES, MtpOracle, Oracle, per_expert, write
from test_speculation import count_drafts_ahead, overlapped
from torch import Tensor

from stoker.base.config import Limits
from stoker.base.draft_tree import parse_tree
from stoker.base.errors import StokerError
from stoker.builder.build import build
from stoker.builder.config import BuildConfig
from stoker.core.forward_batch import ForwardBatch
from stoker.runtime.worker.dummy_step import Bounds
from stoker.runtime.worker.inputs import Shape, StepInputs
from stoker.runtime.worker.model_runner import ModelRunner

Make = Callable[..., Driven]
DRAFTS = 3
CASES: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "n": 2}, {"frequency_penalty": 0.5}, {"logprobs": 1}]


class Watched:
    """Records the drafts of an executor: (newest token, drafts) in the order of the steps."""

    def __init__(self, driven: Driven) -> None:
        runner = driven.executor.runner
        assert isinstance(runner, ModelRunner) and runner.draft_runner is not None
        self.found: list[tuple[int, list[int]]] = []
        self._run = runner.draft_runner.run
        runner.draft_runner.run = self.run  # type: ignore[method-assign]

    def run(self, batch: ForwardBatch, inputs: StepInputs, newest: Tensor, *others: Any) -> Tensor:
        drafts = self._run(batch, inputs, newest, *others)
        self.found += zip(newest.tolist(), drafts.t().tolist(), strict=True)
        return drafts


@pytest.fixture(scope="module")
def heads(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Oracle]]:
    folder = tmp_path_factory.mktemp("heads")
    oracles = {name: make(model) for name, make in ORACLES.items()}
    return {name: (write(folder / name, oracle.config, oracle.files), oracle) for name, oracle in oracles.items()}


def check_drafts(make: Make, path: Path, oracle: Oracle, prompt: list[int]) -> None:
    """Each step drafts what the reference drafts after the tokens so far, and the answer is that of plain decoding."""
    params: dict[str, Any] = {"max_tokens": 14, "logit_bias": dict.fromkeys((5, 8, 20), 4.0)}  # so that some drafts are accepted
    (plain,) = make().run(request(prompt, **params))
    driven = make(speculate=str(path), draft_tokens=DRAFTS, adaptive_drafts=False)
    watched = Watched(driven)
    (answer,) = driven.run(request(prompt, **params))
    assert answer.tokens == plain.tokens
    tokens, at = [*prompt, *plain.tokens], len(prompt)
    assert len(watched.found) > 3
    for newest, drafts in watched.found[:-1]:
        assert tokens[at] == newest
        assert drafts == oracle.drafts(tokens[: at + 1], DRAFTS)
        at += 1
        while at < len(tokens) and drafts and drafts[0] == tokens[at]:
            at, drafts = at + 1, drafts[1:]


@pytest.mark.parametrize("name", list(ORACLES))
def test_drafts(drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], name: str) -> None:
    for prompt in (prompts[0], prompts[3]):
        check_drafts(drive, *heads[name], prompt)


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_drafts_that_are_planned_before_ids_are_known(
    drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], name: str
) -> None:
    """Answers are those of plain decoding, and as many drafts are accepted as if each step waited for the one before."""
    cases = [request(prompt, max_tokens=50, temperature=0.3 * (i % 2), seed=i) for i, prompt in enumerate(prompts)]
    expected = [answer.tokens for answer in drive().run(*cases)]
    settings: dict[str, Any] = {"speculate": str(heads[name][0]), "draft_tokens": DRAFTS, "adaptive_drafts": False}
    waiting, ahead = drive(**settings), overlapped(drive(**settings), looks_up=False)
    num_ahead = count_drafts_ahead(ahead)
    for driven in (waiting, ahead):
        assert [answer.tokens for answer in driven.run(*cases)] == expected
    assert num_ahead() > 100
    assert abs(ahead.stats.num_accepted_draft_tokens - waiting.stats.num_accepted_draft_tokens) <= len(cases)


@pytest.mark.parametrize("name", ["medusa", "medusa-vllm", "eagle", "eagle3"])
def test_weights_that_a_draft_reads(drive: Make, model: Any, heads: dict[str, tuple[Path, Oracle]], name: str) -> None:
    """One Medusa head, or the linears of the layers and the output head. Copied embeddings are only looked up."""
    path, oracle = heads[name]
    runner = drive(speculate=str(path), draft_tokens=DRAFTS).executor.runner
    assert isinstance(runner, ModelRunner) and runner.draft_runner is not None
    head = runner.draft_runner.drafter.head  # type: ignore[attr-defined]
    counts = {key: tensor.numel() for key, tensor in oracle.files.items() if tensor.dim() == 2 and key != "embed_tokens.weight"}
    table, size = model.lm_head.weight.numel(), runner.model.dtype.itemsize
    assert head.num_bytes == sum(counts.values()) * size
    assert head.draft_bytes == (sum(counts.values()) // (3 if "medusa" in name else 1) + (table if name == "eagle" else 0)) * size
    assert runner.model.lookup_bytes == table * size


def served(model: Any, oracle: MtpOracle, changes: dict[str, Any], folder: Path, *, is_stacked: bool = False) -> tuple[Make, Path]:
    """Executors of an engine that is built without the prediction layer, and the checkpoint with it. `is_stacked`: its experts are."""
    config = json.loads(model.config.to_json_string()) | changes
    tensors = model.state_dict() if is_stacked else per_expert(model.state_dict())
    plain, complete = (write(folder / name, config, tensors | extra) for name, extra in (("plain", {}), ("complete", oracle.files)))
    tiny.save_tokenizer(plain)
    limits = Limits(max_batch_size=4, max_input_len=64, max_output_len=64, tokens_per_block=16)
    engine = build(plain, folder / "engine", BuildConfig(device="cpu", limits=limits), verify="none").path
    return lambda **settings: Driven(engine, None, kv_cache_tokens=512, **settings), complete


@torch.no_grad()
def test_multi_token_prediction(prompts: list[list[int]], tmp_path: Path) -> None:
    """The layer of DeepSeek V3, with latent attention and experts, in the checkpoint of its model."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
    sizes |= {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": 8}
    model = tiny.model("deepseek_v3", **sizes, first_k_dense_replace=1, num_key_value_heads=6)
    oracle = MtpOracle(model, DeepseekV3DecoderLayer)
    changes = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    make, path = served(model, oracle, changes, tmp_path)
    check_drafts(make, path, oracle, prompts[0])
    length = make(speculate=str(path)).executor.scheduler.draft_length  # type: ignore[union-attr]
    assert 0.1 < length._draft_share < 0.9  # one of three layers, and the head; the folder also has the model


HYBRID: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip


@torch.no_grad()
def test_multi_token_prediction_of_qwen3_next(prompts: list[list[int]], tmp_path: Path) -> None:
    """The layer has gated attention and experts, and the model recurrent states that follow its accepted drafts."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    model = tiny.model("qwen3_next", **HYBRID, **experts)
    oracle = MtpOracle(model, Qwen3NextDecoderLayer, qwen_norm=Qwen3NextRMSNorm)
    make, path = served(model, oracle, {"architectures": ["Qwen3NextForCausalLM"]}, tmp_path)
    check_drafts(make, path, oracle, prompts[0])


@torch.no_grad()
def test_multi_token_prediction_of_qwen3_5(prompts: list[list[int]], tmp_path: Path) -> None:
    """The dense form: the layer has the feed-forward of the model."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

    model = tiny.model("qwen3_5_text", **HYBRID)
    oracle = MtpOracle(model, Qwen3_5DecoderLayer, qwen_norm=Qwen3_5RMSNorm)
    make, path = served(model, oracle, {"architectures": ["Qwen3_5ForCausalLM"]}, tmp_path)
    check_drafts(make, path, oracle, prompts[0])


@torch.no_grad()
@pytest.mark.parametrize("is_stacked", [False, True], ids=["single", "stacked"])
def test_multi_token_prediction_of_qwen3_5_moe(prompts: list[list[int]], tmp_path: Path, is_stacked: bool) -> None:
    """The layer has experts, which checkpoints store one by one or stacked."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    model = tiny.model("qwen3_5_moe_text", **HYBRID, **experts)
    oracle = MtpOracle(model, Qwen3_5MoeDecoderLayer, qwen_norm=Qwen3_5MoeRMSNorm, is_stacked=is_stacked)
    make, path = served(model, oracle, {"architectures": ["Qwen3_5MoeForCausalLM"]}, tmp_path, is_stacked=is_stacked)
    check_drafts(make, path, oracle, prompts[0])


@torch.no_grad()
def test_multi_token_prediction_of_mimo(prompts: list[list[int]], tmp_path: Path) -> None:
    """Names of its own, and the projection reads the hidden state first."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    model = tiny.model("qwen2")
    oracle = MtpOracle(model, Qwen2DecoderLayer, mimo=True)
    make, path = served(
        model, oracle, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}, tmp_path
    )
    check_drafts(make, path, oracle, prompts[0])
    tree = "[0],[1],[0,0],[1,0],[1,1],[1,1,0]"
    driven = make(speculate=str(path), draft_tree=tree, adaptive_drafts=False)
    watched = Watched(driven)
    driven.run(request(prompts[0], max_tokens=9))
    newest, drafts = watched.found[0]
    assert drafts == oracle.tree([*prompts[0], newest], parse_tree(tree))
    with pytest.raises(StokerError, match="num_layers of its heads is 2, and that of the model is 3"):
        config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
        (path / "config.json").write_text(json.dumps(config))
        make(speculate=str(path))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_heads_run_in_dummy_steps(drive: Make, heads: dict[str, tuple[Path, Oracle]], name: str) -> None:
    """So that their activations are a part of the memory that is measured. No slot of a cache is written."""
    driven = drive(speculate=str(heads[name][0]), draft_tokens=DRAFTS)
    runner = driven.executor.runner
    assert isinstance(runner, ModelRunner) and runner.draft_runner is not None
    drafter = runner.draft_runner.drafter
    head, logits = drafter.head, list[int]()  # type: ignore[attr-defined]
    compute = head.logits
    head.logits = lambda *arguments: (logits.append(len(arguments[-1])), compute(*arguments))[1]
    for cache in drafter.caches:
        cache.keys.fill_(3.0)
    runner.run_dummy_step_with_sampling(Shape(24, 6, is_decode=False), Bounds(5, 19, 64))
    assert logits == [6] * DRAFTS
    assert all(bool((cache.keys == 3.0).all()) for cache in drafter.caches)


def without(files: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in files.items() if name not in names}


# (heads, changes of config.json, function of the tensors, parts of the error)
MISFITS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]], tuple[str, ...]]] = {
    "hidden size": ("eagle", {"hidden_size": 64, "head_dim": 8}, dict, ("hidden_size", "is 64", "is 48")),
    "vocabulary": ("eagle3", {"vocab_size": 400}, dict, ("vocabulary", "is 400", "is 320")),
    "layer": ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, dict, ("layer 9", "3 layers")),
    "number of layers": ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1]}, dict, ("is 144", "is 96")),
    "token ids": ("eagle3", {}, lambda files: files | {"d2t": files["d2t"] + 10}, ("d2t", "325", "320")),
    "Medusa's hidden size": ("medusa-vllm", {"hidden_size": 40}, dict, ("hidden_size", "is 40", "is 48")),
    "Medusa's vocabulary": ("medusa", {}, lambda files: files | {"0.2.weight": files["0.2.weight"][:300]}, ("is 300", "is 320")),
    "number of heads": ("medusa", {"medusa_num_heads": 5}, dict, ("medusa_num_heads=5", "have 3")),
    "missing tensor": ("eagle3", {}, lambda files: without(files, "midlayer.mlp.up_proj.weight"), ("mlp.up_proj.weight", "missing")),
    "unknown tensor": ("eagle", {}, lambda files: files | {"gate.weight": torch.ones(3)}, ("'gate.weight' would not be used",)),
    "wrong shape": ("eagle", {"intermediate_size": 60}, dict, ("up_proj", "[80, 48]", "[120, 48]")),
    "integers": ("eagle", {}, lambda files: files | {"fc.bias": torch.ones(48, dtype=torch.int64)}, ("fc.bias", "int64")),
    "huge": ("eagle", {"num_hidden_layers": 10**9}, dict, ("num_hidden_layers=1000000000", "4096")),
    "type": ("eagle3", {"eagle_aux_hidden_state_layer_ids": "all"}, dict, ("'all'", "not a list")),
    "unknown key": ("eagle", {"rotary_embedding_base": 5}, dict, ("rotary_embedding_base",)),
    "draft vocabulary": ("eagle3", {"draft_vocab_size": "4"}, dict, ("draft_vocab_size='4'", "whole number")),
    "no matrix": ("eagle3", {}, lambda files: files | {"fc.weight": torch.ones(())}, ("fc.weight has shape []",)),
    "flag": ("eagle3", {"norm_before_residual": "yes"}, dict, ("norm_before_residual='yes'", "true or false")),
    "last layer only": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, dict, ("use_aux_hidden_state='False'", "only true")),
    "unknown setting": ("eagle3", {"eagle_config": {"parallel": 2}}, dict, ("eagle_config.parallel='2' is not supported",)),
    "wildcard": ("eagle3", {"eagle_config_2": 1}, dict, ("eagle_config_2",)),
    "algorithm": ("eagle3", {"speculators_config": {"algorithm": "dflash"}}, dict, ("speculators_config.algorithm='dflash'",)),
    "window": ("eagle", {"use_sliding_window": True}, dict, ("use_sliding_window='True' is not supported",)),
    "layer types": ("eagle", {"layer_types": ["sliding_attention"] * 2}, dict, ("layer_types", "only full_attention")),
    "EAGLE-3 setting": ("eagle", {"norm_output": True}, dict, ("norm_output='True' of an EAGLE head",)),
    "Medusa's count": ("medusa", {"medusa_num_heads": [3]}, dict, ("medusa_num_heads='[3]'", "whole number")),
    "Medusa's token map": ("medusa-vllm", {"truncated_vocab_size": "40"}, dict, ("truncated_vocab_size='40'", "whole number")),
    "no heads": (
        "eagle",
        {},
        lambda files: {"wte.weight": torch.ones(2, 2)},
        ("no draft heads", "wte.weight", "medusa, eagle3, eagle, mtp"),
    ),
}


@pytest.mark.parametrize("case", list(MISFITS))
def test_misfits_are_refused(drive: Make, heads: dict[str, tuple[Path, Oracle]], case: str, tmp_path: Path) -> None:
    name, changes, change, parts = MISFITS[case]
    oracle = heads[name][1]
    path = write(tmp_path / "heads", oracle.config | changes, change(oracle.files))
    with pytest.raises(StokerError) as caught:
        drive(speculate=str(path))
    assert all(part in str(caught.value) for part in (*parts, str(path) if "config.json:" not in str(caught.value) else "")), caught.value


@pytest.mark.parametrize(("name", "file"), [("eagle", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")])
def test_pickles_of_tensors(
    drive: Make, prompts: list[list[int]], heads: dict[str, tuple[Path, Oracle]], tmp_path: Path, name: str, file: str
) -> None:
    """The files of SafeAILab and FasterDecoding. One that contains code is refused, and the code is not run."""
    oracle = heads[name][1]
    path = write(tmp_path / "heads", oracle.config, oracle.files)
    (path / "model.safetensors").unlink()
    torch.save(oracle.files, path / file)
    check_drafts(drive, path, oracle, prompts[0])

    class Code:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    torch.save(oracle.files | {"code": Code()}, path / file)
    with pytest.raises(StokerError, match="contains Python objects other than tensors"):
        drive(speculate=str(path))
    assert not (tmp_path / "ran").exists()
    torch.save({key: tensor.t() if tensor.dim() == 2 else tensor for key, tensor in oracle.files.items()}, path / file)
    with pytest.raises(StokerError, match=r"in another order\. Convert it: python -c "):
        drive(speculate=str(path))
    torch.save(oracle.files, path / file, _use_new_zipfile_serialization=False)
    with pytest.raises(StokerError, match=r"was written by a torch before 1\.6\. Convert it"):
        drive(speculate=str(path))


def test_damaged_files_are_refused(drive: Make, heads: dict[str, tuple[Path, Oracle]], tmp_path: Path) -> None:
    path = write(tmp_path / "heads", heads["eagle"][1].config, heads["eagle"][1].files)
    weights, config = path / "model.safetensors", path / "config.json"
    content, text = weights.read_bytes(), config.read_text()

    def error() -> str:
        with pytest.raises(StokerError) as caught:
            drive(speculate=str(path))
        return str(caught.value)

    weights.write_bytes(content[:-8])
    assert "truncated" in error()
    weights.rename(path / "pytorch_model.bin")
    assert "pytorch_model.bin contains Python objects other than tensors" in error()
    (path / "pytorch_model.bin").rename(path / "training_args.bin")
    assert "training_args.bin is not a name of weights of heads" in error()
    for wrong in (text[:-9], "[]", '{"a":' * 30000, " " * (2 << 20)):
        config.write_text(wrong)
        assert str(config) in error()
    config.unlink()
    assert f"{config} does not exist" in error()
    with pytest.raises(StokerError, match="speculate='/nowhere/heads'"):
        drive(speculate="/nowhere/heads")


@pytest.mark.parametrize("path", [(), ("speculators_config",), ("transformer_layer_config",), ("eagle_config",)])
def test_unknown_keys_of_each_object_are_refused(
    drive: Make, heads: dict[str, tuple[Path, Oracle]], tmp_path: Path, path: tuple[str, ...]
) -> None:
    oracle = heads["eagle3-speculators"][1]
    config = json.loads(json.dumps(oracle.config)) | {"eagle_config": {"use_last_layernorm": True}}
    section = config
    for key in path:
        section = section[key]
    section["unheard_of"] = 1
    with pytest.raises(StokerError, match="unheard_of"):
        drive(speculate=str(write(tmp_path / "heads", config, oracle.files)))


def test_published_keys_of_speculators_are_accepted(drive: Make, heads: dict[str, tuple[Path, Oracle]], tmp_path: Path) -> None:
    oracle = heads["eagle3-speculators"][1]
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    published = {
        "speculators_version": "0.1.0", "has_no_defaults_at_init": False, "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "transformers_version": "4.55.4", "target_hidden_size": None, "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
    }  # fmt: skip
    drive(speculate=str(write(tmp_path / "heads", oracle.config | published, oracle.files)))
