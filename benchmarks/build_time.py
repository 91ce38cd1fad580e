"""Measures the time and host memory of a quantized build from local files: writes a checkpoint of random weights, then builds it.

    PYTHONPATH=src python benchmarks/build_time.py --config benchmarks/models/llama-3.1-8b --quantize FP8 --folder scratch [--json FILE]

The checkpoint (16 GB of bfloat16 for 8B) is written to --folder, stays in the page cache if it fits, and is deleted at the end. Its
tokenizer encodes a byte as a token. The build runs all steps of a normal build, including the accuracy check: once with kernels that are
compiled ahead of time, and once without. With --engine DIR, there is only the first build, whose engine remains there, for start_up.py and
load_weights.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from first_token import save_tokenizer
from safetensors.torch import save_file

from stoker.cli.benchmark.results import provenance

LAYERS_PER_FILE = 8


def write_checkpoint(config: dict[str, int], folder: Path) -> int:
    """Write random weights of a Llama in files of LAYERS_PER_FILE layers. Returns the number of bytes."""
    hidden, size, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (size, hidden),
        "mlp.up_proj": (size, hidden),
        "mlp.down_proj": (hidden, size),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, dtype=torch.bfloat16, device=device) * hidden**-0.5).cpu()

    total, layers, where = 0, config["num_hidden_layers"], {}
    for first in range(0, layers, LAYERS_PER_FILE):
        tensors = {}
        for layer in range(first, min(first + LAYERS_PER_FILE, layers)):
            name = f"model.layers.{layer}."
            tensors |= {f"{name}{part}.weight": weight(*shape) for part, shape in shapes.items()}
            tensors |= {f"{name}{norm}.weight": torch.ones(hidden, dtype=torch.bfloat16) for norm in norms}
        if first == 0:
            tensors["model.embed_tokens.weight"] = weight(vocab, hidden)
        if first + LAYERS_PER_FILE >= layers:
            tensors["lm_head.weight"], tensors["model.norm.weight"] = weight(vocab, hidden), torch.ones(hidden, dtype=torch.bfloat16)
        file = f"model-{first:03}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


def build_in_stages(folder: str, engine: str, quantize: str, *, kernels: bool) -> None:
    """The build of `stoker build` in this process. Prints the seconds at which each stage began."""
    began = time.monotonic()
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig
    from stoker.runtime.aot import compile_kernels

    stages = {"imported": round(time.monotonic() - began, 1)}

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, round(time.monotonic() - began, 1))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = BuildConfig(quantization=quantize, device=device)
    build(folder, engine, config, force=True, progress=progress, kernels=compile_kernels if kernels and device == "cuda" else None)
    print(json.dumps(stages | {"done": round(time.monotonic() - began, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--quantize", default="FP8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--engine", type=Path, help="build once, and keep the engine here")
    parser.add_argument("--json")
    parser.add_argument("--build", choices=["kernels", "plain"], help=argparse.SUPPRESS)  # run only the build in this process
    args = parser.parse_args()
    folder, engine = Path(args.folder, "checkpoint"), args.engine or Path(args.folder, "engine")
    if args.build:
        build_in_stages(str(folder), str(engine), args.quantize, kernels=args.build == "kernels")
        return
    config = json.loads(Path(args.config, "config.json").read_text())
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    size = write_checkpoint(config, folder)
    print(f"{size / 1e9:.1f} GB written in {time.monotonic() - began:.1f} s", flush=True)
    results = []
    for kind in ("kernels",) if args.engine else ("kernels", "plain"):
        began = time.monotonic()
        cache = {"STOKER_CACHE": str(Path(args.folder, f"cache-{kind}"))}  # an empty cache: no digest is known and no kernel is compiled
        command = [sys.executable, __file__, "--config", args.config, "--quantize", args.quantize, "--folder", args.folder, "--build", kind]
        command += ["--engine", str(engine)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | cache) as build:
            assert build.stdout is not None
            output = build.stdout.read()
            _, status, usage = os.wait4(build.pid, 0)
            build.returncode = os.waitstatus_to_exitcode(status)
        row = {
            "kernels": kind == "kernels",
            "exit": build.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "peak_host_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
            "began_s": json.loads(output.splitlines()[-1]) if output else None,
            "engine_gb": round(sum(f.stat().st_size for f in engine.rglob("*") if f.is_file()) / 1e9, 2),
        }
        print(json.dumps(row), flush=True)
        results.append(row)
    shutil.rmtree(args.folder)
    if args.json:
        found = {**provenance(), "config": args.config, "quantize": args.quantize, "checkpoint_gb": size / 1e9, "builds": results}
        Path(args.json).write_text(json.dumps(found, indent=1))
    sys.exit(max(row["exit"] for row in results))


if __name__ == "__main__":
    main()
