"""What each quantization costs SmolLM2-135M-Instruct: bytes and perplexity, built as `stoker build` builds and read as `stoker eval` reads.

The text is any file; the figures of docs/quantization.md are of the beginning of Debian's package anarchism 15.3-3 (apt-get download
anarchism; dpkg-deb -x; zcat usr/share/doc/anarchism/markdown/secA[12].md.gz > book.md), in windows of 1,024 tokens without BOS.
Calibration reads the text that Stoker ships.

PYTHONPATH=src python benchmarks/accuracy.py --text book.md --json benchmarks/results/accuracy.json

What a cache costs in longer contexts:

PYTHONPATH=src python benchmarks/accuracy.py --text book.md --window 8192 --only "NO_QUANT, int8 KV" "NO_QUANT, FP8 KV" \\
    --json benchmarks/results/accuracy_long_context.json

--untied gives the model a head of its own, a copy of the embedding, as larger models have one, and measures what the head's format costs:

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
from stoker.cli.default_model import default_checkpoint
from stoker.engine.layerwise import LayerwiseModel, Scores, split_windows
from stoker.engine.reader import Engine
from stoker.layers.loader import Loader


def int4(name: str, size: int, **settings: Any) -> dict[str, Any]:
    return {"quantization": name, "quantization_settings": {"group_size": size, **settings}}


def smooth(**settings: Any) -> dict[str, Any]:
    return {"quantization": "SMOOTH_QUANT", "quantization_settings": settings}


# name: (what is built, the most that perplexity may grow; None where nothing is asked, a name where it is that row's increase, halved)
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
    "SMOOTH_QUANT per tensor, weights too": (smooth(per_token=False, per_channel=False), 0.08),  # what LMI takes for granted
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
UNTIED = ("NO_QUANT", "WEIGHTS_ONLY_INT8", "FP8", "WEIGHTS_ONLY_INT4", "AWQ g128")  # the rows whose head has a format of its own


def untied(out: Path) -> Path:
    """The model as a Hugging Face directory in bfloat16, with a copy of the embedding for its head."""
    checkpoint = open_checkpoint(default_checkpoint())
    tensors = {name: checkpoint.weights.read(name).bfloat16() for name in checkpoint.weights.tensors}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(checkpoint.config | {"tie_word_embeddings": False}))
    write_tokenizer(checkpoint, None, out, trust_remote_code=False)
    return out


def built(source: Path, asked: dict[str, Any], out: Path) -> tuple[Engine, float]:
    """The engine, in place of one that is there, and the seconds that it took."""
    started = time.perf_counter()
    engine = build(source, out, BuildConfig(device="cpu", **asked), force=True, verify="files")
    return engine, time.perf_counter() - started


@dataclass
class Measured:
    """The stream after the engine's last layer, and what its own head makes of each window."""

    engine: Engine
    stream: LayerwiseModel
    scores: list[Scores]

    @property
    def total(self) -> Scores:
        return total(self.scores)


def measured(engine: Engine, text: str, window: int) -> Measured:
    ids = Tokenizer.from_file(str(engine.path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    stream, loader = LayerwiseModel(engine.config.model, split_windows(ids, window)), engine.loader()
    stream.embed(loader)
    for _ in range(engine.config.model.num_layers):
        stream.run_layer(loader)
    return Measured(engine, stream, scored(stream, loader))


def scored(stream: LayerwiseModel, loader: Loader) -> list[Scores]:
    """What the loader's head makes of each window."""
    found = []
    for window, hidden in zip(stream.tokens, stream.hidden, strict=True):
        one = LayerwiseModel(stream.config, [window])
        one.hidden = [hidden]
        found.append(one.score(loader))
    return found


def total(scores: list[Scores]) -> Scores:
    return Scores(sum(one.nll for one in scores), sum(one.count for one in scores), [best for one in scores for best in one.best])


def head_costs(plain: Measured, row: Measured) -> dict[str, dict[str, float]]:
    """What the row's head adds: to the row's own layers under the head as built, and to layers as built.

    No format measures the head or changes the norm before it, so an engine that is built with another head has these very layers.
    """
    below, above = scored(row.stream, plain.engine.loader()), scored(plain.stream, row.engine.loader())
    return {
        "head_as_built": {"perplexity": total(below).perplexity, **added(below, row.scores)},
        "head_only": {"perplexity": total(above).perplexity, **added(plain.scores, above)},
    }


def added(before: list[Scores], after: list[Scores]) -> dict[str, float]:
    """The share by which a head lets perplexity grow, and the standard error of that share by windows."""
    growth = torch.tensor([b.nll - a.nll for a, b in zip(before, after, strict=True)], dtype=torch.float64)
    count = total(before).count
    error = float(growth.std()) * math.sqrt(len(growth)) / count
    share = math.expm1(float(growth.sum()) / count)
    return {"head_adds": share, "standard_error": error, "greedy_agreement": total(before).agreement(total(after))}


def bound(asked: float | str | None, rows: dict[str, Any]) -> float | None:
    if not isinstance(asked, str):
        return asked
    return rows[asked]["increase"] / 2 if asked in rows else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--max-bytes", type=int, default=100_000)
    parser.add_argument("--only", nargs="*", help="rows to measure (again), after NO_QUANT; without it, those that the JSON file lacks")
    parser.add_argument("--commit", default=head(), help="of what is measured")
    parser.add_argument("--calibration-size", type=int, default=32, help="windows of 512 tokens")
    parser.add_argument("--window", type=int, default=1024, help="tokens that each is foretold from at most (%(default)s)")
    parser.add_argument("--untied", action="store_true", help="a head apart from the embedding, and what its format costs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    raw = args.text.read_bytes()[: args.max_bytes]
    about = {
        "model": "SmolLM2-135M-Instruct" + (" in bfloat16, with a copy of the embedding for its head" if args.untied else ""),
        "text_sha256": hashlib.sha256(raw).hexdigest(), "text_bytes": len(raw),
        "calibration_size": args.calibration_size, "window": args.window, "torch": torch.__version__,
    }  # fmt: skip
    rows, table = earlier(args.json, about), {name: ROWS[name] for name in UNTIED} if args.untied else ROWS
    plain: Measured | None = None
    with tempfile.TemporaryDirectory() as folder:
        source = untied(Path(folder) / "untied") if args.untied else default_checkpoint()
        for name, (asked, _) in table.items():
            if name != "NO_QUANT" and (name in rows if args.only is None else name not in args.only):
                continue
            out = Path(folder) / ("plain" if plain is None else "engine")
            engine, seconds = built(source, {"calibration_size": args.calibration_size, **asked}, out)
            row = measured(engine, raw.decode(errors="ignore"), args.window)
            plain, scores = plain or row, row.total
            rows[name] = {
                "bytes": (engine.path / "rank0.safetensors").stat().st_size, "tokens": scores.count, "perplexity": scores.perplexity,
                "increase": scores.perplexity / plain.total.perplexity - 1, "greedy_agreement": plain.total.agreement(scores),
                "standard_error": added(plain.scores, row.scores)["standard_error"],
                "build_s": seconds, "commit": args.commit,
            }  # fmt: skip
            if args.untied and row is not plain:
                rows[name] |= head_costs(plain, row)
            print(f"{name:36}", json.dumps(rows[name]), flush=True)
            if args.json:
                found = {row: rows[row] | {"asked": bound(most, rows)} for row, (_, most) in table.items() if row in rows}
                args.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


def earlier(path: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """The rows that a run of the same text and calibration has left: they take minutes each."""
    if path is None or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found["rows"] if all(found.get(key) == value for key, value in about.items()) else {}


def head() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
