"""Trains an EAGLE-3 head and Medusa heads for the demo model on its own answers, and measures them on other prompts of the same kind.

PYTHONPATH=src python benchmarks/train_heads.py --out heads --json benchmarks/results/heads.json    # 20 minutes on two quiet cores
PYTHONPATH=src python benchmarks/train_heads.py --out heads --measure --json ...                    # only the measurement

Everything is deterministic for one version of PyTorch and one number of threads. The heads stay in --out: they are not committed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from head_training import draft_vocabulary, read_states, train_eagle, train_medusa

from stoker import LLM, SamplingParams
from stoker.base.config import Limits
from stoker.builder.build import build_cached
from stoker.builder.checkpoint.checkpoint import open_checkpoint
from stoker.builder.config import BuildConfig
from stoker.builder.verification.reference_model import load_reference_model
from stoker.cli.benchmark.results import provenance
from stoker.cli.default_model import default_checkpoint

QUESTIONS = {
    "prose": (
        "What is a {}? Answer in three sentences.",
        "Explain to a child what a {} is.",
        "How is a {} made, and what is it used for?",
    ),
    "records": ("Describe a {} as a JSON object with the keys name, category, material, colour, price and use.",),
}
THINGS = (
    "bicycle", "bridge", "camera", "candle", "castle", "clock", "compass", "desk", "diamond", "drum", "elephant", "engine", "farm",
    "flute", "forest", "fountain", "garden", "glacier", "guitar", "hammer", "harbour", "helicopter", "island", "kettle", "kite",
    "ladder", "lake", "lamp", "lantern", "lens", "library", "lighthouse", "lock", "magnet", "map", "microscope", "mill", "mirror",
    "monument", "motor", "museum", "needle", "newspaper", "ocean", "orchestra", "oven", "painting", "park", "pencil", "piano", "planet",
    "poem", "printer", "pump", "pyramid", "radio", "railway", "river", "robot", "rocket", "sail", "satellite", "saw", "school",
    "scissors", "sculpture", "ship", "shoe", "snowflake", "spoon", "stadium", "star", "station", "statue", "sword", "table",
    "telephone", "telescope", "temple", "tent", "theatre", "thermometer", "tower", "tractor", "train", "tree", "trumpet", "tunnel",
    "umbrella", "valley", "vase", "violin", "volcano", "wagon", "watch", "waterfall", "wheel", "whistle", "windmill", "window", "zoo",
    "airplane", "anchor", "balloon", "barrel", "basket", "battery", "beach", "bell", "blanket", "book", "bottle", "bread", "broom",
    "brush", "bucket", "button", "cable", "cake", "calendar", "canal", "carpet", "cart", "chain", "chair", "cheese", "church", "coat",
    "coin", "computer", "cup", "curtain", "dam", "dress", "envelope", "factory", "fence", "ferry", "field", "fire", "fishing rod",
    "flag", "flower", "fork", "fort", "frame", "furnace", "gate", "glass", "glove", "goat", "greenhouse", "gun", "harp", "hat",
    "helmet", "herb", "hill", "hinge", "horn", "horse", "hospital", "hotel", "house", "ice cream", "ink", "iron", "jacket", "jar",
    "jewel", "jug", "keyboard", "key", "kitchen", "knife", "knot", "laboratory", "lawn mower", "leaf", "lemon", "letter", "lever",
    "lift", "loom", "lorry", "machine", "market", "mask", "mattress", "medal", "metal", "microphone", "milk", "mine", "moon", "mosque",
    "motorway", "mountain", "mouse", "mug", "nail", "necklace", "net", "notebook", "nut", "oar", "office", "oil lamp", "orange",
    "organ", "oven glove", "paddle", "palace", "pan", "paper", "parachute", "passport", "path", "pear", "pebble", "pepper", "perfume",
    "pier", "pillow", "pin", "pipe", "plate", "plough", "pocket", "pond", "port", "pot", "power plant", "prison", "puppet", "purse",
    "puzzle", "quilt", "rake", "raft", "razor", "refrigerator", "ring", "roof", "room", "rope", "rose", "rug", "ruler", "saddle",
    "salt", "sandal", "sauce", "scarf", "screen", "screw", "seed", "sewing machine", "shelf", "shield", "shirt", "shop", "shovel",
    "sink", "skateboard", "ski", "sledge", "soap", "sock", "sofa", "solar panel", "spade", "spider", "sponge", "spring", "stage",
    "staircase", "stamp", "stapler", "stove", "straw", "street", "submarine", "sugar", "suitcase", "sundial", "swimming pool", "switch",
    "syringe", "tape measure", "tap", "taxi", "teapot", "theme park", "thread", "ticket", "tile", "tin", "toaster", "tool box",
    "toothbrush", "torch", "towel", "town hall", "toy", "traffic light", "tram", "trap", "tray", "trolley", "trousers", "truck", "tube",
    "turbine", "typewriter", "tyre", "uniform", "university", "vacuum cleaner", "van", "vegetable", "veil", "vending machine",
    "village", "wall", "wallet", "wardrobe", "washing machine", "waterwheel", "weapon", "well", "wheelbarrow", "wire", "wool",
    "workshop", "yacht", "yoghurt", "zip",
)  # fmt: skip
HELD_OUT_EVERY = 8  # every eighth thing is not in the training data
NEW_TOKENS = 96
DRAFT_TOKENS = {"eagle3": (2, 3, 4), "medusa": (2, 3)}


def prompts(count: int, kind: str, *, held_out: bool) -> list[str]:
    """The questions of one kind about the first `count` things: those of the training data, or the others."""
    things = [thing for i, thing in enumerate(THINGS[:count]) if (i % HELD_OUT_EVERY == 0) is held_out]
    return [question.format(thing) for thing in things for question in QUESTIONS[kind]]


def engine(quantization: str) -> Path:
    limits = Limits(max_batch_size=32, max_input_len=512, max_output_len=512)
    config = BuildConfig(device="cpu", limits=limits, quantization=None if quantization == "AS_STORED" else quantization)
    return build_cached(str(default_checkpoint()), config, verify="none").path


def answers_of_the_model(folder: Path, count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy answer) in token ids, for the training prompts."""
    file = folder / "answers.json"
    if not file.exists():
        texts = [text for kind in QUESTIONS for text in prompts(count, kind, held_out=False)]
        with LLM(str(engine("NO_QUANT")), kv_cache_tokens=32 * 256, max_queue_size=4096) as llm:
            found = llm.chat(
                [[{"role": "user", "content": text}] for text in texts], SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
            )
            pairs = [
                (llm.chat_prompt([{"role": "user", "content": text}]), list(completion.choices[0].token_ids))
                for text, completion in zip(texts, found, strict=True)
            ]
        file.write_text(json.dumps(pairs))
    return [(prompt, answer) for prompt, answer in json.loads(file.read_text())]


def train(args: argparse.Namespace) -> dict[str, Any]:
    started, cpu_started = time.monotonic(), time.process_time()
    sequences = answers_of_the_model(args.out, args.things)
    model = load_reference_model(open_checkpoint(default_checkpoint(), "SmolLM2"), "float32", False)
    answers = read_states(model, sequences)
    vocabulary = draft_vocabulary(sequences, args.draft_vocabulary)
    found: dict[str, Any] = {"answers": len(sequences), "tokens": sum(len(answer) for _, answer in sequences)}
    found |= {"prepare_seconds": time.monotonic() - started, "prepare_cpu_seconds": time.process_time() - cpu_started}
    print(found, flush=True)
    for name, function, steps in (("medusa", train_medusa, args.medusa_steps), ("eagle3", train_eagle, args.eagle_steps)):
        record = args.out / f"{name}.json"
        if not record.exists():  # a run that was interrupted continues with the next kind
            record.write_text(json.dumps(function(model, answers, vocabulary, steps, args.out / name), indent=1) + "\n")
        found[name] = json.loads(record.read_text())
    return found | {"threads": torch.get_num_threads(), "draft_vocabulary": args.draft_vocabulary, "things": args.things}


def timed_answers(llm: LLM, texts: list[str]) -> tuple[list[list[int]], list[float]]:
    """(answers, CPU seconds of each) of the texts, one after another. On a shared machine, these are the times on a quiet one."""
    params, answers, seconds = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0), [], []
    for text in texts:
        started = time.process_time()
        completion = llm.chat([{"role": "user", "content": text}], params)
        seconds.append(time.process_time() - started)
        answers.append(list(completion.choices[0].token_ids))
    return answers, seconds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per step and per CPU second of greedy decoding of one request at a time, alternating with plain decoding.

    From the second repeat on, prompts are in the cache. The least time of each answer counts.
    """
    results: list[dict[str, Any]] = []
    settings: dict[str, dict[str, Any]] = {"plain": {}}
    for name, lengths in DRAFT_TOKENS.items():
        if (args.out / name).is_dir():
            chosen = {"speculate": str(args.out / name), "adaptive_drafts": False}
            settings |= {f"{name} {n}": chosen | {"draft_tokens": n} for n in lengths}
    for quantization, kind in itertools.product(args.formats.split(","), QUESTIONS):
        texts = prompts(args.things, kind, held_out=True)[: args.prompts]
        path, answers = str(engine(quantization)), {}
        seconds: dict[str, list[list[float]]] = {name: [] for name in settings}
        models = {name: LLM(path, kv_cache_tokens=1 << 13, **options) for name, options in settings.items()}
        for _ in range(args.repeats):
            for name, llm in models.items():
                answers[name], took = timed_answers(llm, texts)
                seconds[name].append(took)
        fastest = {name: sum(map(min, zip(*repeats, strict=True))) for name, repeats in seconds.items()}
        for name, llm in models.items():
            tokens, stats = sum(map(len, answers[name])), llm.stats()
            result = {"format": quantization, "kind": kind, "proposer": name, "tokens": tokens, "tokens_per_s": tokens / fastest[name]}
            if name != "plain":
                result |= {
                    "tokens_per_step": 1 + stats.num_accepted_draft_tokens / max(stats.num_draft_steps, 1),
                    "acceptance": stats.num_accepted_draft_tokens / max(stats.num_draft_tokens, 1),
                    "equal_answers": sum(a == b for a, b in zip(answers[name], answers["plain"], strict=True)) / len(texts),
                    "speedup": fastest["plain"] / fastest[name],
                }
            results.append(result)
            print(result, flush=True)
            llm.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Folder for the answers and the heads.")
    parser.add_argument("--eagle-steps", type=int, default=600)
    parser.add_argument("--medusa-steps", type=int, default=300)
    parser.add_argument("--things", type=int, default=len(THINGS), help="Number of things that the questions are about.")
    parser.add_argument("--draft-vocabulary", type=int, default=4096)
    parser.add_argument("--formats", default="NO_QUANT,AS_STORED", help="Quantizations of the model to measure.")
    parser.add_argument("--prompts", type=int, default=32, help="Largest number of prompts of each kind to measure.")
    parser.add_argument("--repeats", type=int, default=2, help="Answers to each prompt.")
    parser.add_argument("--measure", action="store_true", help="Do not train: measure the heads in --out.")
    parser.add_argument("--train", action="store_true", help="Do not measure.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "training.json"
    if not args.measure:
        log.write_text(json.dumps(train(args), indent=1) + "\n")
    if not args.train:
        training, held_out = json.loads(log.read_text()), measure(args)
        found = {**provenance(device="cpu"), "training": training, "held_out": held_out}
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
