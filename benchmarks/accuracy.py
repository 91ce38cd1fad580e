"""Measures file size and perplexity of each quantization of SmolLM2-135M-Instruct, with the code of `stoker build` and `stoker eval`.

The text is any file. docs/quantization.md quotes results for the beginning of the Debian package anarchism 15.3-3 (apt-get download
anarchism; dpkg-deb -x; zcat usr/share/doc/anarchism/markdown/secA[12].md.gz > book.md), in windows of 1,024 tokens without BOS.
Calibration uses the default text of Stoker.

PYTHONPATH=src python benchmarks/accuracy.py --text book.md --json benchmarks/results/accuracy.json

The KV cache formats in longer contexts:

PYTHONPATH=src python benchmarks/accuracy.py --text book.md --window 8192 --only "NO_QUANT, int8 KV" "NO_QUANT, FP8 KV" \\
    --json benchmarks/results/accuracy_long_context.json

--untied gives the model a separate output head, a copy of the embedding, as larger models have one, and measures the format of the head:

PYTHONPATH=src python benchmarks/accuracy.py --text book.md --max-bytes 40000 --untied --json benchmarks/results/accuracy_untied_head.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from stoker.builder.build import build
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.tokenizers.tokenizer_files import write_tokenizer
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint
from stoker.engine.layerwise import LayerwiseModel, Scores, split_windows
from stoker.engine.reader import Engine
from stoker.layers.loader import Loader


def int4(name: str, size: int, **settings: Any) -> dict[str, Any]:
    return {"quantization": name, "quantization_settings": {"group_size": size, **settings}}


def smooth(**settings: Any) -> dict[str, Any]:
    return {"quantization": "SMOOTH_QUANT", "quantization_settings": settings}


# name: (build settings, target of the perplexity increase: None for no target, a name for half of the increase of that row)
ROWS: dict[str, tuple[dict[str, Any], float | str | None]] = {
    "NO_QUANT": ({"quantization": "NO_QUANT"}, None),
    "AS_STORED": ({"quantization": "AS_STORED"}, None),
    "WEIGHTS_ONLY_INT8": ({"quantization": "WEIGHTS_ONLY_INT8"}, 0.005),
    "NO_QUANT, int8 KV": ({"quantization": "NO_QUANT", "kv_cache_dtype": "int8"}, 0.005),
    "NO_QUANT, FP8 KV": ({"quantization": "NO_QUANT", "kv_cache_dtype": "float8_e4m3fn"}, 0.005),
    "FP8": ({"quantization": "FP8"}, 0.02),
    "FP8 static": ({"quantization": "FP8", "quantization_settings": {"activations": "static"}}, 0.02),
    "FP8 static per tensor": ({"quantization": "FP8", "quantization_settings": {"weights": "tensor", "activations": "static"}}, 0.02),
    "FP8_BLOCK": ({"quantization": "FP8_BLOCK"}, 0.02),
    "SMOOTH_QUANT": ({"quantization": "SMOOTH_QUANT"}, 0.02),
    "SMOOTH_QUANT per tensor": (smooth(per_token=False), 0.08),
    "SMOOTH_QUANT per tensor, weights too": (smooth(per_token=False, per_channel=False), 0.08),  # the default of LMI
    "RTN g128 symmetric": (int4("WEIGHTS_ONLY_INT4", 128, zero="none", clip=False), None),
    "RTN g128": (int4("WEIGHTS_ONLY_INT4", 128, clip=False), None),
    "RTN g64": (int4("WEIGHTS_ONLY_INT4", 64, clip=False), None),
    "RTN g32": (int4("WEIGHTS_ONLY_INT4", 32, clip=False), None),
    "WEIGHTS_ONLY_INT4 g128": (int4("WEIGHTS_ONLY_INT4", 128), None),
    "WEIGHTS_ONLY_INT4": ({"quantization": "WEIGHTS_ONLY_INT4"}, None),
    "AWQ g128": (int4("AWQ", 128), "RTN g128"),
    "AWQ g128 symmetric": (int4("AWQ", 128, zero="none"), "RTN g128 symmetric"),
    "AWQ g64": (int4("AWQ", 64), "RTN g64"),
    "AWQ g32": (int4("AWQ", 32), 0.12),
    "GPTQ g128": (int4("GPTQ", 128), "RTN g128"),
    "GPTQ g128 symmetric": (int4("GPTQ", 128, zero="none"), "RTN g128 symmetric"),
    "GPTQ g64": (int4("GPTQ", 64), "RTN g64"),
    "GPTQ g32": (int4("GPTQ", 32), 0.12),
}
UNTIED = ("NO_QUANT", "WEIGHTS_ONLY_INT8", "FP8", "WEIGHTS_ONLY_INT4", "AWQ g128")  # the rows whose output head has its own format


def untied(out: Path) -> Path:
    """The model as a Hugging Face directory in bfloat16, with a copy of the embedding as output head."""
    checkpoint = open_checkpoint(default_checkpoint())
    tensors = {name: checkpoint.weights.read(name).bfloat16() for name in checkpoint.weights.tensors}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(checkpoint.config | {"tie_word_embeddings": False}))
    write_tokenizer(checkpoint, None, out, trust_remote_code=False)
    return out


def build_engine(source: Path, settings: dict[str, Any], out: Path) -> tuple[Engine, float]:
    """The engine, which replaces an existing one, and the seconds of its build."""
    started = time.perf_counter()
    engine = build(source, out, BuildConfig(device="cpu", **settings), force=True, verify="files")
    return engine, time.perf_counter() - started


@dataclass
class Measured:
    """The hidden states after the last layer of an engine, and the scores of each window with its output head."""

    engine: Engine
    stream: LayerwiseModel
    scores: list[Scores]

    @property
    def total(self) -> Scores:
        return total(self.scores)


def measure(engine: Engine, text: str, window: int) -> Measured:
    ids = Tokenizer.from_file(str(engine.path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    stream, loader = LayerwiseModel(engine.config.model, split_windows(ids, window)), engine.loader()
    stream.embed(loader)
    for _ in range(engine.config.model.num_layers):
        stream.run_layer(loader)
    return Measured(engine, stream, score_windows(stream, loader))


def score_windows(stream: LayerwiseModel, loader: Loader) -> list[Scores]:
    """The scores of each window with the output head of the loader."""
    found = []
    for window, hidden in zip(stream.tokens, stream.hidden, strict=True):
        one = LayerwiseModel(stream.config, [window])
        one.hidden = [hidden]
        found.append(one.score(loader))
    return found


def total(scores: list[Scores]) -> Scores:
    return Scores(sum(one.nll for one in scores), sum(one.count for one in scores), [best for one in scores for best in one.best])


def head_costs(plain: Measured, row: Measured) -> dict[str, dict[str, float]]:
    """The increase of perplexity by the output head of the row: on top of its own layers, and on top of unquantized layers.

    No format calibrates the head or changes the norm before it, so that engines with different heads have the same layers.
    """
    below, above = score_windows(row.stream, plain.engine.loader()), score_windows(plain.stream, row.engine.loader())
    return {
        "head_as_built": {"perplexity": total(below).perplexity, **increase_of(below, row.scores)},
        "head_only": {"perplexity": total(above).perplexity, **increase_of(plain.scores, above)},
    }


def increase_of(before: list[Scores], after: list[Scores]) -> dict[str, float]:
    """The relative increase of perplexity, and its standard error over windows."""
    growth = torch.tensor([b.nll - a.nll for a, b in zip(before, after, strict=True)], dtype=torch.float64)
    count = total(before).count
    error = float(growth.std()) * math.sqrt(len(growth)) / count
    increase = math.expm1(float(growth.sum()) / count)
    return {"head_adds": increase, "standard_error": error, "greedy_agreement": total(before).agreement(total(after))}


def target_of(target: float | str | None, rows: dict[str, Any]) -> float | None:
    """The target of the perplexity increase as a number."""
    if not isinstance(target, str):
        return target
    return rows[target]["increase"] / 2 if target in rows else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--max-bytes", type=int, default=100_000)
    parser.add_argument("--only", nargs="*", help="rows to measure again, after NO_QUANT; default: the rows that are not in the JSON file")
    parser.add_argument("--commit", default=head(), help="commit of the measured code")
    parser.add_argument("--calibration-size", type=int, default=32, help="windows of 512 tokens")
    parser.add_argument("--window", type=int, default=1024, help="tokens of context at most (%(default)s)")
    parser.add_argument("--untied", action="store_true", help="use a separate output head, and measure its format")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    raw = args.text.read_bytes()[: args.max_bytes]
    about = {
        "model": "SmolLM2-135M-Instruct" + (" in bfloat16, with a copy of the embedding as output head" if args.untied else ""),
        "text_sha256": hashlib.sha256(raw).hexdigest(),
        "text_bytes": len(raw),
        "calibration_size": args.calibration_size,
        "window": args.window,
    }
    rows, table = earlier(args.json, about), {name: ROWS[name] for name in UNTIED} if args.untied else ROWS
    plain: Measured | None = None
    with tempfile.TemporaryDirectory() as folder:
        source = untied(Path(folder) / "untied") if args.untied else default_checkpoint()
        for name, (settings, _) in table.items():
            if name != "NO_QUANT" and (name in rows if args.only is None else name not in args.only):
                continue
            out = Path(folder) / ("plain" if plain is None else "engine")
            engine, seconds = build_engine(source, {"calibration_size": args.calibration_size, **settings}, out)
            row = measure(engine, raw.decode(errors="ignore"), args.window)
            plain, scores = plain or row, row.total
            rows[name] = {
                "bytes": (engine.path / "rank0.safetensors").stat().st_size,
                "tokens": scores.count,
                "perplexity": scores.perplexity,
                "increase": scores.perplexity / plain.total.perplexity - 1,
                "greedy_agreement": plain.total.agreement(scores),
                "standard_error": increase_of(plain.scores, row.scores)["standard_error"],
                "build_s": seconds,
                **provenance(),
                "commit": args.commit,
            }
            if args.untied and row is not plain:
                rows[name] |= head_costs(plain, row)
            print(f"{name:36}", json.dumps(rows[name]), flush=True)
            if args.json:
                found = {row: rows[row] | {"target": target_of(target, rows)} for row, (_, target) in table.items() if row in rows}
                args.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


def earlier(path: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """The rows of an earlier run with the same text and calibration, which take minutes each."""
    if path is None or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found["rows"] if all(found.get(key) == value for key, value in about.items()) else {}


def head() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
