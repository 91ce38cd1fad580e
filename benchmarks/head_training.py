"""Trains an EAGLE-3 head and Medusa heads on answers of a Llama model, and writes them in their published formats.

Both have a draft vocabulary: the most frequent tokens of the answers. An EAGLE-3 head is trained as it is used (training-time test,
arXiv 2503.01840): in unrolled step j it reads its own output of step j - 1 instead of the model's hidden state.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

EAGLE_STEPS = 3  # unrolled draft steps
MEDUSA_HEADS = 4
BATCH = 8  # sequences of one training step
LOSS_DECAY = 0.8  # weight of each further draft token


@dataclass
class Answers:
    """Answers of the model: token ids [N, T], padded with 0, of which `first[i] : length[i]` are the answer; and the model's states.

    `layers` [N, T, 3 H] are the hidden states that an EAGLE-3 head reads, `last` [N, T, H] those after the final norm.
    """

    tokens: Tensor
    first: Tensor
    length: Tensor
    layers: Tensor
    last: Tensor

    def positions(self, ahead: int) -> Tensor:
        """bool [N, T]: the positions from which the token `ahead` positions later is part of the answer."""
        at = torch.arange(self.tokens.shape[1])
        return (at + ahead >= self.first[:, None]) & (at + ahead < self.length[:, None])


def products() -> AbstractContextManager[Any]:
    """Products in bfloat16 where the processor has them, which is twice as fast; weights and their updates are float32.

    Without them, PyTorch needs 15 s instead of 0.9 s for a training step of the Medusa heads on a Zen 3 core.
    """
    return torch.autocast("cpu", torch.bfloat16) if torch.cpu._is_avx512_bf16_supported() else nullcontext()


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers before which the published EAGLE-3 heads read hidden states, if their config.json names none."""
    return 2, num_layers // 2, num_layers - 3


@torch.no_grad()
def read_states(model: Any, sequences: list[tuple[list[int], list[int]]]) -> Answers:
    """Run the model of transformers on (prompt, answer) pairs."""
    longest = max(len(prompt) + len(answer) for prompt, answer in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, (prompt, answer) in zip(tokens, sequences, strict=True):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    chosen = default_layers(model.config.num_hidden_layers)
    layers, last = [], []
    for batch in tokens.split(BATCH):
        with products():
            states = [state.float() for state in model.model(batch, output_hidden_states=True).hidden_states]
        layers.append(torch.cat([states[layer] for layer in chosen], dim=-1))
        last.append(states[-1])
    first = torch.tensor([len(prompt) for prompt, _ in sequences])
    return Answers(tokens, first, first + torch.tensor([len(answer) for _, answer in sequences]), torch.cat(layers), torch.cat(last))


def draft_vocabulary(sequences: list[tuple[list[int], list[int]]], size: int) -> Tensor:
    """The most frequent tokens of the answers, in ascending order: int64 [size]. Other tokens follow in the order of their ids."""
    counts = Counter(token for _, answer in sequences for token in answer)
    frequent = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
    missing = (token for token in range(size * 2) if token not in counts)
    return torch.tensor(sorted(frequent + [next(missing) for _ in range(size - len(frequent))]))


def trimmed(answers: Answers, rows: Tensor) -> Answers:
    """The answers at `rows`, without padding that none of them needs."""
    longest = int(answers.length[rows].max())
    states = (answers.tokens, answers.layers, answers.last)
    tokens, layers, last = (tensor[rows, :longest] for tensor in states)
    return Answers(tokens, answers.first[rows], answers.length[rows], layers, last)


class EagleHead(nn.Module):
    """The EAGLE-3 head of a Llama model, whose last layer it begins with."""

    def __init__(self, model: Any, vocabulary: Tensor) -> None:
        super().__init__()
        config = self.config = model.config
        hidden, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        last = model.model.layers[-1]
        self.embed, self.size, self.rotary = model.model.embed_tokens.weight.detach(), size, model.model.rotary_emb
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.input_layernorm, self.hidden_norm, self.post_norm, self.norm = (nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(4))
        kv = config.num_key_value_heads * size
        self.q, self.k, self.v = (nn.Linear(2 * hidden, out, bias=False) for out in (hidden, kv, kv))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, config.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, len(vocabulary), bias=False)
        with torch.no_grad():
            for linear in (self.fc, self.q, self.k, self.v):
                linear.weight.mul_(0.2)
            self.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
            for mine, theirs in ((self.q, last.self_attn.q_proj), (self.k, last.self_attn.k_proj), (self.v, last.self_attn.v_proj)):
                mine.weight[:, hidden:] += theirs.weight
            for mine, theirs in ((self.o, last.self_attn.o_proj), (self.gate, last.mlp.gate_proj), (self.up, last.mlp.up_proj)):
                mine.weight.copy_(theirs.weight)
            self.down.weight.copy_(last.mlp.down_proj.weight)
            self.hidden_norm.weight.copy_(last.input_layernorm.weight)
            self.post_norm.weight.copy_(last.post_attention_layernorm.weight)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight[vocabulary])
        self.lm_head.requires_grad_(False)  # a third of the parameters, which would fit the few answers and not others

    def forward(self, layers: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """The output [N, T, H] before the norm of each draft step: at t of step j, that from which token t + 2 + j is predicted."""
        hidden = self.fc(layers)
        num_tokens = tokens.shape[1]
        mask = torch.full((num_tokens, num_tokens), float("-inf")).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(EAGLE_STEPS):
            shifted = F.pad(tokens[:, 1 + step :], (0, 1 + step))
            x = torch.cat((self.input_layernorm(F.embedding(shifted, self.embed)), self.hidden_norm(hidden)), dim=-1)
            cos, sin = self.rotary(x, torch.arange(step, step + num_tokens)[None])
            q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
            q, k = (rotated(heads, cos, sin) for heads in (q, k))
            repeats = q.shape[1] // k.shape[1]
            keys.append(k.repeat_interleave(repeats, 1))
            values.append(v.repeat_interleave(repeats, 1))
            scores = [q @ keys[0].transpose(2, 3) + mask * self.size**0.5]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]  # of this position's earlier draft steps
            weights = (torch.cat(scores, dim=-1) * self.size**-0.5).softmax(dim=-1)
            mixed = weights[..., :num_tokens] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + weights[..., num_tokens + i : num_tokens + i + 1] * own
            hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
            y = self.post_norm(hidden)
            hidden = hidden + self.down(F.silu(self.gate(y)) * self.up(y))
            yield hidden

    def tensors(self, vocabulary: Tensor) -> dict[str, Tensor]:
        """The tensors by their published names. `d2t` is the difference between a token's id and its index in the draft vocabulary."""
        names = {
            "fc": self.fc, "midlayer.input_layernorm": self.input_layernorm, "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.post_attention_layernorm": self.post_norm, "midlayer.self_attn.q_proj": self.q, "midlayer.self_attn.k_proj": self.k,
            "midlayer.self_attn.v_proj": self.v, "midlayer.self_attn.o_proj": self.o, "midlayer.mlp.gate_proj": self.gate,
            "midlayer.mlp.up_proj": self.up, "midlayer.mlp.down_proj": self.down, "norm": self.norm, "lm_head": self.lm_head,
        }  # fmt: skip
        chosen = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        chosen[vocabulary] = True
        found = {f"{name}.weight": module.weight.detach().clone() for name, module in names.items()}
        return found | {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": chosen}


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, T, size], in halves."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


class MedusaHeads(nn.Module):
    """Heads with one residual block each. Head i predicts the token i + 2 positions later."""

    def __init__(self, model: Any, vocabulary: Tensor) -> None:
        super().__init__()
        hidden = model.config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(MEDUSA_HEADS))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, len(vocabulary), bias=False) for _ in range(MEDUSA_HEADS))
        with torch.no_grad():
            for block, head in zip(self.blocks, self.lm_heads, strict=True):
                block.weight.zero_()
                head.weight.copy_(model.lm_head.weight[vocabulary])

    def forward(self, i: int, last: Tensor) -> Tensor:
        return self.lm_heads[i](last + F.silu(self.blocks[i](last)))

    def tensors(self, vocabulary: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {"token_map": vocabulary}
        for i, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            found |= {f"blocks.{i}.layers.0.weight": block.weight.detach().clone(), f"lm_heads.{i}.weight": head.weight.detach().clone()}
        return found


def train(module: nn.Module, steps: int, rate: float, loss_of: Callable[[Tensor], Tensor], count: int, name: str) -> dict[str, Any]:
    """Minimize `loss_of(indices of sequences)` with AdamW. The order depends on the seed 0 only."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    started, cpu_started = time.monotonic(), time.process_time()
    order, losses = torch.empty(0, dtype=torch.long), []
    for step in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(count)
        with products():
            loss = loss_of(order[:BATCH])
        order = order[BATCH:]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 20 == 19:
            print(f"{name}: step {step + 1}, loss {sum(losses[-20:]) / 20:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return {
        "steps": steps,
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu_started,  # of all threads; a shared machine needs more time than these
        "first_loss": losses[0],
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
    }


def soft_loss(logits: Tensor, last: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy with the distribution of the model over the draft vocabulary, whose head rows are `weight`."""
    with torch.no_grad():
        target = (last @ weight.T).float().softmax(dim=-1)
    return -(target * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def train_eagle(model: Any, answers: Answers, vocabulary: Tensor, steps: int, folder: Path) -> dict[str, Any]:
    """Train an EAGLE-3 head and write it to `folder` in the format of SafeAILab. Returns how the training went."""
    head, weight = EagleHead(model, vocabulary), model.lm_head.weight.detach()[vocabulary]

    def loss_of(rows: Tensor) -> Tensor:
        total, batch = torch.zeros(()), trimmed(answers, rows)
        for step, hidden in enumerate(head(batch.layers, batch.tokens)):
            mask = batch.positions(2 + step)[:, : -1 - step]
            logits = head.lm_head(head.norm(hidden[:, : -1 - step][mask]))
            total = total + LOSS_DECAY**step * soft_loss(logits, batch.last[:, 1 + step :][mask], weight)
        return total

    found = train(head, steps, 6e-4, loss_of, len(answers.tokens), "eagle3")
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
    }  # fmt: skip
    write(folder, config, head.tensors(vocabulary))
    return found


def train_medusa(model: Any, answers: Answers, vocabulary: Tensor, steps: int, folder: Path) -> dict[str, Any]:
    """Train Medusa heads and write them to `folder` in the format of vLLM, which has a draft vocabulary."""
    heads, weight = MedusaHeads(model, vocabulary), model.lm_head.weight.detach()[vocabulary]

    def loss_of(rows: Tensor) -> Tensor:
        total, batch = torch.zeros(()), trimmed(answers, rows)
        for i in range(MEDUSA_HEADS):
            mask = batch.positions(2 + i)[:, : -1 - i]
            logits = heads(i, batch.last[:, : -1 - i][mask])
            total = total + LOSS_DECAY**i * soft_loss(logits, batch.last[:, 1 + i :][mask], weight)
        return total

    found = train(heads, steps, 1e-3, loss_of, len(answers.tokens), "medusa")
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size, "truncated_vocab_size": len(vocabulary), "num_heads": MEDUSA_HEADS, "num_hidden_layers": 1,
    }  # fmt: skip
    write(folder, config, heads.tensors(vocabulary))
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
