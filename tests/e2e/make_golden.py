"""Writes golden.json: greedy outputs of transformers for the embedded default model, loaded from the same GGUF file.

    python tests/e2e/make_golden.py

Needs the package accelerate. The result is committed, because it takes long (about 20 tokens per second). `margin` is the smallest
difference of the two best logits of a prompt. It must be far above the rounding of float32 for the test to be valid.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from stoker.cli.default_model import SHA256, default_checkpoint

GOLDEN = Path(__file__).with_name("golden.json")
CHATS = ("What is the capital of Japan?", "Write a haiku about the sea.", "Explain why the sky is blue in one sentence.")
TEXTS = (
    "The capital of Japan is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "La Révolution française a commencé en",
)
CHAT_TOKENS, TEXT_TOKENS = 40, 24


def main() -> None:
    path = default_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    chats = [{"message": text, **generate(model, tokenizer, chat_ids(tokenizer, text), CHAT_TOKENS)} for text in CHATS]
    texts = [{"prompt": text, **generate(model, tokenizer, tokenizer(text).input_ids, TEXT_TOKENS)} for text in TEXTS]
    golden = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "checkpoint_sha256": SHA256,
        "dtype": "float32",
        "chats": chats,
        "texts": texts,
    }
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    lists = re.compile(r"\[\s+((?:\d+,\s+)*\d+)\s+\]")  # a list of token ids in one line
    GOLDEN.write_text(lists.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n")


def chat_ids(tokenizer: Any, message: str) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy ids with the end id, text without special tokens, and the smallest margin."""
    ids: list[int] = []
    cache, margin = None, float("inf")
    step = torch.tensor([prompt_ids])
    while len(ids) < max_tokens and (not ids or ids[-1] != tokenizer.eos_token_id):
        out = model(step, past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
        cache, step = out.past_key_values, torch.tensor([[ids[-1]]])
    return {
        "prompt_ids": prompt_ids,
        "token_ids": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=True),
        "margin": round(margin, 4),
    }


if __name__ == "__main__":
    main()
