"""Small random checkpoints in every supported layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
CHAT = (
    "{% for t in tools or [] %}{{ t['function']['name'] }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)


def model(model_type: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A model of transformers with random weights, biases and norms included. `changes` replace those SIZES that its config has."""
    torch.manual_seed(seed)
    default = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if hasattr(default, name)}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | changes)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in name else 0.0))
    return made


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with VOCAB tokens."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    return core


def save_tokenizer(path: Path) -> None:
    byte_level().save(str(path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": "<unk>", "chat_template": CHAT}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def save(made: Any, path: Path, layout: str = "safetensors") -> Path:
    """Save a model with its tokenizer. `layout`: safetensors, safetensors-sharded, bin or bin-sharded."""
    path.mkdir(parents=True, exist_ok=True)
    made.config.architectures = [type(made).__name__]
    made.config.save_pretrained(path)
    save_tokenizer(path)
    tensors = {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    kind, _, is_sharded = layout.partition("-")
    write, stem, suffix = (save_file, "model", "safetensors") if kind == "safetensors" else (torch.save, "pytorch_model", "bin")
    if not is_sharded:
        write(tensors, path / f"{stem}.{suffix}")
        return path
    names = sorted(tensors)
    weight_map = {name: f"{stem}-{i % 3 + 1:05}-of-00003.{suffix}" for i, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        write({name: tensors[name] for name in names if weight_map[name] == shard}, path / shard)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
