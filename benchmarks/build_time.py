"""How long a quantized build takes from local files, and how much host memory: a checkpoint of random weights, then `stoker build`.

    PYTHONPATH=src python benchmarks/build_time.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --folder scratch [--json FILE]

The checkpoint (16 GB of bfloat16 for 8B) is written to --folder, stays in the page cache if there is room, and is deleted in the end. Its
tokenizer has a token for each byte. The build does all that one of real weights does, the accuracy gate included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stoker.cli.bench.report import origin

LAYERS_A_FILE = 8


def write_checkpoint(config: dict[str, int], folder: Path) -> int:
    """Random weights of a Llama in files of some layers each. Returns their bytes."""
    hidden, size, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden), "mlp.down_proj": (hidden, size),
    }  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=torch.bfloat16, device=device) * hidden**-0.5).cpu()

    total, layers, where = 0, config["num_hidden_layers"], {}
    for first in range(0, layers, LAYERS_A_FILE):
        tensors = {}
        for layer in range(first, min(first + LAYERS_A_FILE, layers)):
            name = f"model.layers.{layer}."
            tensors |= {f"{name}{part}.weight": weight(*shape) for part, shape in shapes.items()}
            tensors |= {f"{name}{norm}.weight": torch.ones(hidden, dtype=torch.bfloat16) for norm in norms}
        if first == 0:
            tensors["model.embed_tokens.weight"] = weight(vocab, hidden)
        if first + LAYERS_A_FILE >= layers:
            tensors["lm_head.weight"], tensors["model.norm.weight"] = weight(vocab, hidden), torch.ones(hidden, dtype=torch.bfloat16)
        file = f"model-{first:03}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


def write_tokenizer(folder: Path) -> None:
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize", default="FP8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = json.loads(Path(args.config, "config.json").read_text())
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    folder, engine = Path(args.folder, "checkpoint"), Path(args.folder, "engine")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    write_tokenizer(folder)
    size = write_checkpoint(config, folder)
    print(f"{size / 1e9:.1f} GB written in {time.monotonic() - began:.1f} s", flush=True)
    results = []
    for kernels in (["--no-kernels"], []):
        began = time.monotonic()
        command = ["-m", "stoker", "build", str(folder), "-o", str(engine), "--quantize", args.quantize, "--force"]
        with subprocess.Popen([sys.executable, *command, *kernels]) as build:
            _, status, usage = os.wait4(build.pid, 0)
        row = {
            "command": " ".join(command[1:3] + command[6:] + kernels), "exit": os.waitstatus_to_exitcode(status),
            "seconds": round(time.monotonic() - began, 1), "peak_host_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
            "engine_gb": round(sum(f.stat().st_size for f in engine.rglob("*") if f.is_file()) / 1e9, 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        results.append(row)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    shutil.rmtree(args.folder)
    if args.json:
        found = {
            **origin(),
            "config": args.config,
            "quantize": args.quantize,
            "checkpoint_gb": size / 1e9,
            "peak_of_any_child_gb": children,
        }
        Path(args.json).write_text(json.dumps(found | {"builds": results}, indent=1))


if __name__ == "__main__":
    main()
