"""The shortest time of a throughput run of `benchmarks/gpu.py`, from its steps: what each part of them takes at a given rate.

    PYTHONPATH=src python benchmarks/throughput_floor.py --config benchmarks/models/llama-3.1-8b --run 2048/128:640 --run 1000/1000:640

The steps are those that the scheduler plans for requests that arrive together, so the script needs no device. For a model with one kind
of attention and gated linears or experts it adds up, without overlap:

linears            multiply-adds of every token at `--linear-tflops`, or the bytes of the weights, whichever takes longer in a step
head               the same for the rows of a step that sample
prompt attention   multiply-adds of the causal half at `--attention-tflops`
decode attention   bytes of the keys and values that decode rows read

Nothing else is included: norms, quantization, rotation, sampling, the loop. Tensor-parallel ranks (`--ranks`) divide all of it; their
communication takes no time. The defaults are of one H200 with FP8 weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from stoker.cli.benchmark.results import provenance
from stoker.profiling.batch_run import random_requests
from stoker.runtime.kv.events.log import BlockEventLog
from stoker.runtime.request import Sequence
from stoker.runtime.schedule.group_scheduler import GroupPlan, GroupScheduler

BLOCK = 64  # tokens of a block of the cache


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Operations and bytes per second, and bytes per stored value. The weights of experts have `weight_bytes` without `expert_bytes`."""

    linear_tflops: float
    attention_tflops: float
    memory_tbs: float
    weight_bytes: float
    cache_bytes: float
    expert_bytes: float | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes in a config.json that determine the work of a token. A dense model has one expert.

    Qwen3's mixtures of experts have `num_experts` instead of `num_local_experts`, and `moe_intermediate_size`.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 128
    num_local_experts: int = 1
    num_experts: int | None = None
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.num_local_experts if self.num_experts is None else self.num_experts

    @property
    def attention_weights(self) -> int:
        """Weights of the linears of attention of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.num_hidden_layers * self.hidden_size * heads * self.head_dim

    @property
    def expert_weights(self) -> int:
        """Weights of one expert of each layer."""
        size = self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size
        return 3 * self.num_hidden_layers * self.hidden_size * size

    @property
    def multiplied_weights(self) -> int:
        """Weights of the layers that a token is multiplied by."""
        return self.attention_weights + self.num_experts_per_tok * self.expert_weights

    def experts_read(self, tokens: int) -> float:
        """The mean number of experts of a layer that at least one of `tokens` tokens chooses, if they choose evenly."""
        return self.experts * (1 - (1 - self.num_experts_per_tok / self.experts) ** tokens)

    @property
    def head_weights(self) -> int:
        """Weights of the output projection."""
        return self.hidden_size * self.vocab_size

    @property
    def cached_values(self) -> int:
        """Values in the cache per token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def pair_operations(self) -> int:
        """Operations of attention for one query token and one key: two products of each query head."""
        return 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim


class Floor(msgspec.Struct, kw_only=True):
    """The steps of one run, and the seconds of their parts."""

    isl: int
    osl: int
    requests: int
    steps_with_prompts: int = 0
    full_steps: int = 0  # of which have max_num_tokens tokens
    decode_steps: int = 0
    decode_rows_beside_prompts: float = 0.0  # per step with prompts
    linears_s: float = 0.0
    head_s: float = 0.0
    prompt_attention_s: float = 0.0
    decode_attention_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return self.linears_s + self.head_s + self.prompt_attention_s + self.decode_attention_s

    def add(self, plan: GroupPlan, model: Model, rates: Rates, max_num_tokens: int) -> None:
        """Add the planned steps."""
        count, tokens = plan.num_equal_steps, plan.num_decodes + plan.num_prefill_tokens
        if plan.sequences:
            self.steps_with_prompts += 1
            self.full_steps += tokens == max_num_tokens
            self.decode_rows_beside_prompts += plan.num_decodes
        else:
            self.decode_steps += count
        experts = model.experts_read(tokens) * model.expert_weights
        read = model.attention_weights * rates.weight_bytes
        read += experts * (rates.weight_bytes if rates.expert_bytes is None else rates.expert_bytes)
        self.linears_s += count * _product_s(tokens, model.multiplied_weights, read, rates)
        sampled, head = plan.num_decodes + sum(plan.samples[-len(plan.sequences) :]), model.head_weights
        self.head_s += count * _product_s(sampled, head, head * rates.weight_bytes, rates)
        pairs = sum(new * start + new * (new + 1) // 2 for start, new in zip(plan.starts, plan.num_new, strict=True))
        self.prompt_attention_s += pairs * model.pair_operations / (1e12 * rates.attention_tflops)
        keys = count * (plan.num_context_tokens - sum(plan.starts)) + plan.num_decodes * count * (count - 1) // 2
        self.decode_attention_s += keys * model.cached_values * rates.cache_bytes / (1e12 * rates.memory_tbs)


def _product_s(rows: int, weights: int, read: float, rates: Rates) -> float:
    """Seconds of `rows` tokens times `weights` weights each, where `read` bytes of weights are read."""
    return max(2 * rows * weights / (1e12 * rates.linear_tflops), read / (1e12 * rates.memory_tbs)) if rows else 0.0


def floor_of(isl: int, osl: int, count: int, model: Model, rates: Rates, kv_cache_tokens: int, max_num_tokens: int) -> Floor:
    """The floor of `count` requests that arrive together."""
    scheduler = GroupScheduler(
        num_blocks=kv_cache_tokens // BLOCK,
        tokens_per_block=BLOCK,
        max_batch_size=min(1024, max_num_tokens),
        max_num_tokens=max_num_tokens,
        max_seq_len=isl + osl,
        target_itl_s=None,
        target_ttft_s=None,
        prefix_reuse=False,
        event_log=BlockEventLog(),
    )
    for number, request in enumerate(random_requests(count, isl, osl, vocab_size=1000)):
        scheduler.add(Sequence(number, request, 0, 0.0))
    floor, unfinished = Floor(isl=isl, osl=osl, requests=count), count
    while unfinished:
        plan = scheduler.plan_steps(0.0)
        floor.add(plan, model, rates, max_num_tokens)
        unfinished -= len(scheduler.commit_steps(plan, plan.num_equal_steps).finished)
    floor.decode_rows_beside_prompts /= floor.steps_with_prompts
    return floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--run", action="append", required=True, help="such as 2048/128:640 (prompt/output tokens : requests)")
    parser.add_argument("--linear-tflops", type=float, default=1350.0)
    parser.add_argument("--attention-tflops", type=float, default=420.0, help="of prompts of this length")
    parser.add_argument("--memory-tbs", type=float, default=4.3)
    parser.add_argument("--weight-bytes", type=float, default=1.0, help="bytes per weight")
    parser.add_argument("--expert-bytes", type=float, help="bytes per weight of experts; without it, those of all weights")
    parser.add_argument("--cache-bytes", type=float, default=2.0, help="bytes per key or value")
    parser.add_argument(
        "--kv-cache-gb", type=float, default=125.0, help="of all ranks; an H200 with 8B FP8 weights: 125, with 16 bits: 118"
    )
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = msgspec.json.decode((args.config / "config.json").read_bytes(), type=Model)
    rates = msgspec.convert({name: getattr(args, name) for name in Rates.__struct_fields__}, Rates)
    rates = msgspec.structs.replace(
        rates, **{name: args.ranks * getattr(rates, name) for name in ("linear_tflops", "attention_tflops", "memory_tbs")}
    )
    kv_cache_tokens = int(1e9 * args.kv_cache_gb / (model.cached_values * rates.cache_bytes))
    rows = []
    for run in args.run:
        lengths, count = run.split(":")
        floor = floor_of(*map(int, lengths.split("/")), int(count), model, rates, kv_cache_tokens, args.max_num_tokens)
        rows.append(
            msgspec.to_builtins(floor)
            | {"total_s": floor.total_s, "output_tokens_per_s": floor.requests * floor.osl / floor.total_s}
        )  # fmt: skip
        print({name: round(value, 2) for name, value in rows[-1].items()})
    if args.json:
        result = {
            **provenance(),
            "config": str(args.config),
            "rates": msgspec.to_builtins(rates),
            "kv_cache_gb": args.kv_cache_gb,
            "runs": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
