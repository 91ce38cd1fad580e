"""The operations that models are made of. Only this file selects an implementation by device.

Every op has a function here, a launcher and a kernel in `triton/`, and a reference in plain PyTorch with the same signature in
`reference/`, which is also the test oracle. Some ops have a C kernel for small decode steps in `native/`.

    CUDA tensors     the Triton launcher, or the reference for ops without one
    CPU tensors      the C kernel where there is one and a compiler is installed, else the reference
    meta tensors     after `use_launchers`, the Triton launchers: they list or compile kernels ahead of time (`triton.aot`)

A format of quantized weights (`PackedWeight.format`) is one module per implementation, which is found by its name:
`reference/quant_<format>.py`, `triton/gemm/quantized/<format>.py` and `native/quant_<format>.py`. Each has `prepare_weight` and
`packed_linear`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stoker.core.packed_weight import PackedWeight
from stoker.distributed.group import SINGLE, Group
from stoker.kernels import reference
from stoker.kernels.native.recording import Layers, Recordings
from stoker.kernels.reference import activation as activation_ref
from stoker.kernels.reference import all_reduce as all_reduce_ref
from stoker.kernels.reference import attention as attention_ref
from stoker.kernels.reference import causal_conv as conv_ref
from stoker.kernels.reference import delta_rule as delta_ref
from stoker.kernels.reference import embedding as embedding_ref
from stoker.kernels.reference import fused_layer as fused_layer_ref
from stoker.kernels.reference import gated_norm as gated_norm_ref
from stoker.kernels.reference import linear as linear_ref
from stoker.kernels.reference import mamba2 as mamba2_ref
from stoker.kernels.reference import moe as moe_ref
from stoker.kernels.reference import norm as norm_ref
from stoker.kernels.reference import pages as pages_ref
from stoker.kernels.reference import quant_fp8 as fp8_ref
from stoker.kernels.reference import quant_int8 as int8_ref
from stoker.kernels.reference import rope as rope_ref
from stoker.kernels.reference import router as router_ref
from stoker.kernels.reference import row_tokens as row_tokens_ref
from stoker.kernels.reference import sampling as sampling_ref
from stoker.kernels.reference import scores as scores_ref
from stoker.kernels.reference import selective_scan as selective_scan_ref
from stoker.kernels.reference import state_copy as state_copy_ref
from stoker.kernels.reference import summands as summands_ref
from stoker.kernels.reference.linear import format_reference
from stoker.kernels.routing import Routing, RoutingParams
from stoker.kernels.types import (
    PLAIN,
    AttentionParams,
    DeltaParams,
    DrawParams,
    FusedLayer,
    Fusion,
    Gate,
    Mamba2Params,
    Rotary,
    RowTokens,
    SelectiveScanParams,
    TokenScores,
)

if TYPE_CHECKING:
    from stoker.core.forward_batch import ForwardBatch, KVCache

# The modules of Triton launchers, by the reference that they replace.
_GPU: dict[ModuleType, ModuleType] = {}


def _by_format(package: str, prefix: str) -> dict[ModuleType, ModuleType]:
    """The modules `prefix + format` of a package, for the weight formats that it implements. The key is the format's reference module."""
    names = [module.name for module in pkgutil.iter_modules(reference.__path__) if module.name.startswith("quant_")]
    formats = [name.removeprefix("quant_") for name in names]
    found = {name for module in pkgutil.iter_modules(import_module(package).__path__) if (name := module.name)}
    return {format_reference(name): import_module(f"{package}.{prefix}{name}") for name in formats if prefix + name in found}


def use_launchers() -> None:
    """Use the Triton launchers for all tensors except CPU tensors. Called on import if there is a GPU, and by the ahead-of-time trace."""
    from stoker.kernels.triton import activation, all_reduce, embedding, norm, pages, rope, row_tokens, sampling, summands
    from stoker.kernels.triton.attention import launch as attention
    from stoker.kernels.triton.fused_layer import launch as fused_layer_launcher
    from stoker.kernels.triton.gemm.dense import launch as linear
    from stoker.kernels.triton.moe import launch as moe
    from stoker.kernels.triton.moe import router
    from stoker.kernels.triton.recurrent import causal_conv, delta_rule, gated_norm, mamba2, selective_scan, state_copy

    _GPU.update({
        activation_ref: activation, all_reduce_ref: all_reduce, attention_ref: attention, embedding_ref: embedding, linear_ref: linear,
        moe_ref: moe, norm_ref: norm, pages_ref: pages, rope_ref: rope, router_ref: router, row_tokens_ref: row_tokens,
        sampling_ref: sampling, fused_layer_ref: fused_layer_launcher, conv_ref: causal_conv, delta_ref: delta_rule,
        gated_norm_ref: gated_norm, mamba2_ref: mamba2, selective_scan_ref: selective_scan, state_copy_ref: state_copy,
        summands_ref: summands,
        **_by_format("stoker.kernels.triton.gemm.quantized", ""),
    })  # fmt: skip


if torch.cuda.is_available():
    use_launchers()


@cache
def _cpu() -> dict[ModuleType, ModuleType]:
    """The modules of C kernels, with their reference modules as keys; empty without a compiler. Compiles the kernels at the first call."""
    from stoker.kernels.native import attention, fused_layer, library, linear, norm, rope, sampling, scores

    if isinstance(library.kernels(), str):
        return {}
    return {
        attention_ref: attention, linear_ref: linear, rope_ref: rope, norm_ref: norm, fused_layer_ref: fused_layer, scores_ref: scores,
        sampling_ref: sampling, **_by_format("stoker.kernels.native", "quant_"),
    }  # fmt: skip


def limit_threads(threads: int) -> None:
    """Let the calling thread's CPU ops use `threads` threads, or fewer while other processes use the cores. Called before each step."""
    from stoker.kernels.native import library

    library.limit_threads(threads)


# Called after each op with its name, its positional arguments and its result; None: ops are not observed.
Observer = Callable[[str, tuple[Any, ...], Any], None]
_observer: Observer | None = None


@contextmanager
def observe_ops(observer: Observer) -> Iterator[None]:
    """Call `observer(name, args, result)` after each op of this process until the context ends: for profiling, not during inference.

    `fused_layer` then computes its linears one after the other, so that each is observed. Replaying a CUDA graph calls no op.
    """
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


class _ObservedModule(ModuleType):
    """Wraps an implementation module: each function calls `observer(name, args, result)` after it has run."""

    def __init__(self, implementation: ModuleType, observer: Observer) -> None:
        super().__init__(implementation.__name__)
        self._implementation, self._observer = implementation, observer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, observer = getattr(self._implementation, name), self._observer

        def observed(*args: Any) -> Any:
            """Call the function, and report the call and its result to the observer."""
            result = function(*args)
            observer(name, args, result)
            return result

        return observed


def _pick(x: Tensor, reference: ModuleType) -> ModuleType:
    """The module that implements `reference` on the device of x: C or Triton where available, else `reference` itself."""
    implementation = (_cpu() if x.is_cpu else _GPU).get(reference, reference)
    return implementation if _observer is None else _ObservedModule(implementation, _observer)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """RMS norm (arXiv 1910.07467) or layer norm over the last axis of x, in float32. `kind`: rms or layer. weight, bias [size] or None."""
    return _pick(x, norm_ref).norm(x, weight, bias, eps, kind)


def all_reduce(x: Tensor, group: Group, residual: Tensor | None = None) -> Tensor:
    """The sum of x over the ranks of the group, plus `residual`. The result has the same bits on all ranks. May overwrite x.

    On GPUs with peer access, one kernel sums the small tensors of decode steps and adds the residual.
    """
    return _pick(x, all_reduce_ref).all_reduce(x, group, residual)


def add_summands(summands: tuple[Tensor, ...], residual: Tensor, out: Tensor) -> None:
    """out = the sum of one or two summands (`Group.begin_sum`) + residual. All are contiguous and have the shape and dtype of out."""
    _pick(out, summands_ref).add_summands(summands, residual, out)


def check_inboxes(group: Group) -> None:
    """Test all-reduces through the peer memory of a group, and disable it if they fail.

    Every rank calls this before its first all-reduce.
    """
    if group.inboxes is not None:
        from stoker.kernels.triton import all_reduce

        all_reduce.check_inboxes(group)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """act(gate) × up [..., size], or the gate of gpt-oss. gate_up [..., 2 × size] holds gate, then up."""
    return _pick(gate_up, activation_ref).gated(gate_up, gate)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation function applied to each element of x. `activation` is a key of `reference.activation.ACTIVATIONS`."""
    return _pick(x, activation_ref).activate(x, activation)


def xielu(x: Tensor, parameters: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010) of each element of x, in float32. `parameters` float32 [4]: alpha_p, alpha_n, beta and eps.

    alpha_p x² + beta x for x > 0, otherwise alpha_n (exp(min(x, eps)) - 1 - x) + beta x.
    """
    return _pick(x, activation_ref).xielu(x, parameters)


def resolve(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """int32 token_ids [T] in which every negative id -1 - r is replaced by last_ids[r].

    A negative id stands for the token that the previous step sampled for row r, and that the host has not read yet.
    """
    return _pick(token_ids, embedding_ref).resolve(token_ids, last_ids)


def remember(last_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """last_ids[rows[i]] = token_ids[i], for `resolve`; all int32. -1 (no token) is stored as 0, which is a valid id."""
    _pick(token_ids, embedding_ref).remember(last_ids, rows, token_ids)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """The rows of `table` [vocab, hidden] for int32 `token_ids` [T]: [T, hidden]."""
    return _pick(table, embedding_ref).embedding(token_ids, table)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PLAIN) -> Tensor:
    """x [M, K] × weight [N, K] transposed, + bias [N], with `fusion` applied.

    Returns [M, N], or [M, N / 2] if `fusion` gates the output.
    """
    return _pick(x, linear_ref).linear(x, weight, bias, fusion)


def around(x: Tensor, fusion: Fusion, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear without fused kernels: input gate and norm, then `product`, then output gate and residual, each as a separate op."""
    if fusion.input_gate is not None:
        x = gated(x, fusion.input_gate)
    if fusion.norm_kind is not None:
        x = norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
    y = product(x)
    if fusion.gate is not None:
        y = gated(y, fusion.gate)
    return y if fusion.residual is None else y + fusion.residual


def prepare_weight(weight: PackedWeight) -> PackedWeight:
    """The weight in the form that the kernels of its device read. Called once, at load.

    A GPU reads int4 in the layout `paired`. On a CPU, FP8 values are widened to float32 where no C kernel reads them, because PyTorch
    converts e4m3 slowly, int4 and int8 in groups become `blocks` where the C kernels read these, and int4 weights get `device_data` where
    PyTorch's packed kernel is used.
    """
    if weight.format == "dense":
        return weight
    return _pick(weight.values, format_reference(weight.format)).prepare_weight(weight)


def supports_int8_groups(weight: PackedWeight) -> bool:
    """Whether the device's kernels read an int8 weight with groups as it is stored. Otherwise the weight should be widened once, at load.

    True for linears on a CPU, whose C kernel widens values in registers, and for stacked experts on a GPU.
    """
    if weight.num_experts:
        return not weight.values.is_cpu
    return weight.values.is_cpu and bool(_pick(weight.values, int8_ref).supports_groups(weight))


def packed_linear(x: Tensor, weight: PackedWeight, fusion: Fusion = PLAIN) -> Tensor:
    """`linear` with a packed weight [N, K] and its bias.

    How `weight.format` and `weight.activations` are computed on a GPU:

        int8, none       A tile of the weight is multiplied by two int8 digits of each activation, or widened in registers
        int8, token or static
                         int8 × int8: activations become round(x ÷ s) within ± 127, s being `input_scale` or each row's largest magnitude
                         ÷ 127. The norm or activation before the product rounds, sums are int32, the epilogue multiplies by s × scale
        fp8, token or static
                         e4m3 × e4m3: activations are rounded with s = `input_scale` or each row's largest magnitude ÷ 448; float32 sums
        fp8, group       The same with a scale for every `group_size` features of a row (arXiv 2412.19437, section 3.3.2)
        int4             Values are widened in registers, or for 1 to 16 rows, except FP4, multiplied by int8 digits as they are
    """
    if weight.format == "dense":
        return _pick(x, linear_ref).linear(x, weight.values, weight.bias, fusion)
    module, order = _pick(x, format_reference(weight.format)), weight.column_order
    if order is None:
        return module.packed_linear(x, weight, fusion)
    return around(x, fusion, lambda rows: module.packed_linear(rows.index_select(-1, order), weight))


def gates_output(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the product of x [M, K] and a packed weight would gate its output in its epilogue, and is faster so than without a gate.

    For numbers of rows for which the next linear could gate its input in the launch that quantizes it (`Fusion.input_gate`).
    """
    launcher = _GPU.get(fp8_ref)
    if launcher is None or x.is_cpu or weight.format != "fp8" or weight.column_order is not None:
        return False
    return bool(launcher.gates_output(x, weight))


def score_tokens(
    x: Tensor, weight: PackedWeight, targets: Tensor, fusion: Fusion = PLAIN, scale: float = 1.0, softcap: float | None = None
) -> TokenScores:
    """How well the logits of x [T, K] predict the tokens `targets` int32 [T]. The logits [T, vocab] are never in memory as a whole.

    They are `packed_linear(x, weight, fusion)` × `scale`, and with `softcap`, softcap × tanh(logits ÷ softcap).
    """
    return _pick(x, scores_ref).score_tokens(x, weight, targets, fusion, scale, softcap, packed_linear)


def packed_embedding(token_ids: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The rows of a packed weight [vocab, hidden] for int32 `token_ids` [T].

    An int8 weight is dequantized to `dtype`; rows of a dense weight keep the weight's dtype.
    """
    if weight.format == "dense":
        return embedding(token_ids, weight.values)
    return _pick(weight.values, format_reference(weight.format)).packed_embedding(token_ids, weight, dtype)


def supports_fused_layer(layer: FusedLayer, rows: int) -> bool:
    """Whether the device computes `fused_layer` for `rows` rows and these weights in one launch."""
    weight = layer.out.weight
    return weight is not None and _pick(weight.values, fused_layer_ref).supports_fused_layer(layer, rows)


def fused_layer(x: Tensor, residual: Tensor, layer: FusedLayer) -> tuple[Tensor, Tensor | None]:
    """Everything between the attention of one layer and the attention of the next.

    x [T, K] is the output of attention, `residual` [T, hidden] the residual stream before it. Computes

        h = residual + out(x)
        y = h + down(up(norm(h)))        # up is gated: act(gate) × up
        qkv = next_qkv(norm(y))

    and returns (y [T, hidden], qkv [T, qkv features]); qkv is None after the last layer. Where `supports_fused_layer` holds, a GPU kernel
    does all four products in one launch.
    """
    module = _pick(x, fused_layer_ref) if _observer is None else fused_layer_ref
    return module.fused_layer(x, residual, layer)


def replay(recordings: Recordings, layers: Layers, x: Tensor, batch: ForwardBatch, caches: list[KVCache]) -> Tensor:
    """layers(x, batch, caches). On a CPU, steps that only run C kernels are recorded in `recordings`, and replayed."""
    if _observer is not None or not x.is_cpu or not _cpu():
        return layers(x, batch, caches)
    return recordings.run(layers, x, batch, caches)


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D] rotated by rotary position embedding, for models that normalize heads after it. May overwrite x.

    The last axis of x has unit stride. The other arguments are those of `Rotary`.
    """
    return _pick(x, rope_ref).rotate_heads(x, positions, cos_sin, interleaved)


def rope_store(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, slots: Tensor) -> Tensor:
    """Normalize q and k, rotate them by rotary position embedding, store k and v in the cache, and return q.

    q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, Dv]: views with unit stride in the last axis; q may be changed in place.
    rotary.norms: RMS norms of each head, which round to the dtype of q as `norm` does; None: no norms.
    rotary.cos_sin float32 [max_positions, dim] holds dim / 2 cosines, then dim / 2 sines, for the first dim features; None: no rotation.
    rotary.positions int32 [T]: rows of cos_sin; with a `key_mean` they must be positions in the sequence.
    slots int32 [T]: block × block_size + place in the block; -1 stores nowhere.

    A quantized cache stores round(x ÷ scale). With `key_balance`, q and k are multiplied by its factors and Hadamard-transformed
    (`reference.rope.hadamard_transform`), which leaves q · k unchanged. With `key_mean`, keys are stored less a mean.
    """
    return _pick(q, rope_ref).rope_store(q, k, v, rotary, cache, slots)


def attention(q: Tensor, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """Causal attention of the step's queries [T, heads, D] over the paged cache. Returns [T, heads × Dv].

    The queries of row r are q[query_starts[r] : query_starts[r + 1]], those of the last of its seq_lens[r] tokens. Its keys are in the
    blocks of block_tables[r]. Softmax in float32.

    With `batch.tree`, rows of draft trees attend to their ancestors only (`TreeMask`). A window is then longer than the depth of any tree,
    and is counted from `batch.positions`; trees with chunks or ALiBi are not supported.
    """
    return _pick(q, attention_ref).attention(q, cache, batch, params)


def rope_attention(q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: KVCache, batch: ForwardBatch, params: AttentionParams) -> Tensor:
    """`rope_store`, then `attention`. On a GPU one launch computes both in decode steps where that is faster.

    That is a step of one row, of two before a fused layer, or of many rows over a cache of q's dtype. 8-bit caches of 16-bit q are
    supported for heads of 64, 128 and 256 features, of which all, a half or none rotate, and up to 31 query heads per KV head. q may be
    changed in place or not.
    """
    launcher = None if q.is_cpu else _GPU.get(attention_ref)
    if launcher is None:
        return attention(rope_store(q, k, v, rotary, cache, batch.slots), cache, batch, params)
    return launcher.rope_attention(q, k, v, rotary, cache, batch, params)


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """The token id of each row of logits [L, V]: int32 [L]. -1 for a row with NaN or +inf, or where every token is banned (-inf).

    A row is greedy, or drawn after temperature, top-k, top-p and min-p, in that order. A draw depends on the row's seed and counter alone.
    """
    return _pick(logits, sampling_ref).sample(logits, params)


def sample_shards(logits: Tensor, vocab_size: int, group: Group) -> Tensor:
    """The greedy token id of each row, int32 [L] as by `sample`, on every rank of a group that divides the vocabulary.

    Rank r has the logits [L, n] of token ids r × n and following, of which ids from `vocab_size` on are padding. Ranks exchange their
    largest logit of each row instead of all logits.
    """
    module = _pick(logits, sampling_ref)
    pairs = module.largest_of_shard(logits, vocab_size - group.rank * logits.shape[1], group.rank, group.size)
    return module.largest_over_ranks(all_reduce(pairs, group))


def verify(
    sampled: Tensor, token_ids: Tensor, logits_idx: Tensor, starts: Tensor, parents: Tensor, masks: Tensor, max_drafts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept the drafts of S sequences that equal the tokens that were sampled after their parents.

    Sequence s has the rows starts[s] : starts[s + 1] of the sampled tokens, int32 [L], the nodes of its tree: row starts[s] + i is
    node i, after parents[row] (int32 [L], a node of the same sequence). The draft of a row is the token of the step `token_ids` [T] at
    `logits_idx` [L]; node 0 has none. Bit j of `masks` (int64 [T]) is set for the node itself and its ancestors. `starts` is int32 [S + 1],
    of at most `max_drafts` (up to 63) drafts each.

    Returns int32 (ids that each sequence yields, then -1: [S, max_drafts + 1]; accepted drafts [S]; the last yielded id [S]; the row in
    which it was sampled [S]) and bool [L], whether the token of each row is yielded. A sequence without rows yields -1.
    """
    return _pick(sampled, sampling_ref).verify(sampled, token_ids, logits_idx, starts, parents, masks, max_drafts)


def continue_rows(batch: ForwardBatch, rows: Tensor, starts: Tensor | None, counters: Tensor, known: RowTokens, block_size: int) -> None:
    """Correct a step that was planned before the ids of earlier steps were known, in place, and find the drafts that it lacks.

    Row r of the step (`batch.state_slots[r]` is its index in `known`) may have a first position p above that of its newest token,
    lengths - 1, by the number of drafts that earlier steps rejected. Then its positions, slots and number of keys are corrected. The
    counters of sequence s, of the row `rows[s]` (int32 [S]) of `known`, are `counters` (int32 [L]) from starts[s] to starts[s + 1] (int32
    [S + 1]; None: one for each sequence), and are corrected by the same number.

    Ids below 0 after the first one of a row are drafts that only the device can know. With `known.text`, they become the tokens that
    followed the last earlier occurrence of the row's newest tokens (`LOOKUP_SIZES`), repeated after the end of the text; without any, its
    newest token. Drafts are chains, at most 63 per row.
    """
    _pick(batch.token_ids, row_tokens_ref).continue_rows(batch, rows, starts, counters, known, block_size)


def append_tokens(known: RowTokens, rows: Tensor, token_ids: Tensor, num_accepted: Tensor | None) -> None:
    """Add the first num_accepted[s] + 1 of token_ids[s] (int32 [S, K]; None: the only one, K = 1) to the tokens of row rows[s], int32 [S].

    The last row of `known` is that of padding, and is not changed. -1 (no token) is stored as 0.
    """
    _pick(token_ids, row_tokens_ref).append_tokens(known, rows, token_ids, num_accepted)


def move_tokens(caches: list[KVCache], moves: Tensor) -> None:
    """Copy keys and values between slots of each cache, in order: `moves` int32 [N, 2] (from, to).

    A slot is block × block_size + place. The target of a move is never the source of a later one.
    """
    _pick(caches[0].keys, pages_ref).move_tokens(caches, moves)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of token_ids [L], log-probabilities of the num_top most probable tokens [L, num_top], their int32 ids).

    Natural logarithms in float32, computed by PyTorch on all devices. logits [L, V] has one row for each of the L tokens.
    """
    return _pick(logits, sampling_ref).logprobs(logits, token_ids, num_top)


def route(logits: Tensor, correction: Tensor | None, params: RoutingParams) -> Routing:
    """Choose the experts of each token from router logits [T, num_experts].

    `correction` float32 [num_experts] is added to the scores that are ranked, but not to the weights.
    """
    return _pick(logits, router_ref).route(logits, correction, params)


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, params: RoutingParams, fusion: Fusion = PLAIN
) -> tuple[Tensor, Routing]:
    """(y, `route` with the logits y × weightᵀ + bias in float32). y [T, K] is x after the norm of `fusion`, which has no other part.

    `weight` float32 [num_experts, K] is that of the router.
    """
    if not x.is_cpu and router_ref in _GPU:
        routed: tuple[Tensor, Routing] = _pick(x, router_ref).route_tokens(x, weight, bias, correction, params, fusion)
        return routed
    if fusion.norm_kind is not None:
        x = norm(x, fusion.norm_weight, fusion.norm_bias, fusion.norm_eps, fusion.norm_kind)
    return x, route(linear(x.float(), weight, bias), correction, params)


def expert_up(x: Tensor, weight: PackedWeight, routing: Routing, gate: Gate | None = None) -> Tensor:
    """Apply the linear of each chosen expert to its tokens: the first projection of a mixture of experts.

    x [T, K]; weight [E, N, K] and bias [E, N] of E experts. Returns [T × k, N], one row per token and expert, in the order of
    `routing.order`, which is sorted by expert. With `gate`, the weight has the rows of gates, then those of ups, and `gated` of both is
    returned, [T × k, N / 2].
    """
    return _pick(x, moe_ref).expert_up(x, weight, routing, gate)


def expert_down(
    x: Tensor,
    weight: PackedWeight,
    routing: Routing,
    residual: Tensor | None = None,
    input_gate: str | None = None,
    group: Group = SINGLE,
) -> Tensor:
    """Apply the linear of each chosen expert and add the results of each token: the last projection of a mixture of experts.

    x [T × k, K], in the order of `routing.order`; weight [E, N, K] and bias [E, N]. With `input_gate`, an activation, x is [T × k, 2 × K]:
    gates, then ups, and the input is act(gate) × up. Returns [T, N]: for each token, the sum of its k results, weighted by
    `routing.weights` and rounded to the dtype of x, summed over the ranks of `group` (`all_reduce`), + `residual` [T, N].
    """
    return _pick(x, moe_ref).expert_down(x, weight, routing, residual, input_gate, group)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: ForwardBatch, activation: str) -> Tensor:
    """activation(conv(x) + bias), where conv sums the last K inputs of each channel, multiplied by weight [C, K].

    x [T, C] → [T, C]. states [slots, C, K - 1] holds the inputs before the step of the row with that slot, and is replaced by the last
    ones of the step. A row that begins its sequence has zeros before its first token.
    """
    return _pick(x, conv_ref).causal_conv(x, weight, bias, states, batch, activation)


def mamba2(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: Mamba2Params, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The recurrence of Mamba 2: state = exp(step × a) × state + step × x bᵀ, out = state c + skip × x, in float32.

    step = softplus(dt + dt_bias), within its bounds. x [T, H, P]; dt [T, H]; b, c [T, G, N] of groups of H / G heads; states float32
    [slots, H, P, N] are read and replaced. Returns [T, H, P].
    """
    return _pick(x, mamba2_ref).mamba2(x, dt, b, c, params, states, batch)


def selective_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, params: SelectiveScanParams, states: Tensor, batch: ForwardBatch) -> Tensor:
    """The recurrence of Mamba: state = exp(step × a) × state + step × x bᵀ, out = state c + skip × x, in float32.

    step = softplus(dt + dt_bias). x, dt [T, D]; b, c [T, N]; states float32 [slots, D, N] are read and replaced. Returns [T, D].
    """
    return _pick(x, selective_scan_ref).selective_scan(x, dt, b, c, params, states, batch)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, beta: Tensor, params: DeltaParams, states: Tensor, batch: ForwardBatch
) -> Tensor:
    """The gated delta rule, in float32, with q and k divided by their length, and q by √Dk.

    state = exp(decay) × state; state = state + k (sigmoid(beta) × (v - stateᵀ k))ᵀ; out = stateᵀ q; decay = a × softplus(dt + dt_bias).
    q, k [T, Hk, Dk] of groups of H / Hk heads; v [T, H, Dv]; dt, beta [T, H]; states float32 [slots, H, Dk, Dv] are read and replaced.
    Returns [T, H, Dv].
    """
    return _pick(q, delta_ref).delta_rule(q, k, v, dt, beta, params, states, batch)


def copy_states(storage: Tensor, pairs: Tensor) -> None:
    """Copy slot pairs[i, 0] of `storage` to slot pairs[i, 1] for each i. No target is a source.

    `storage` uint8 [slots, bytes], dense, with a multiple of 4 bytes; `pairs` int32 [N, 2].
    """
    _pick(storage, state_copy_ref).copy_states(storage, pairs)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int, gate_first: bool) -> Tensor:
    """An RMS norm within each group of features, gated by silu(gate) before or after the norm.

    norm(x × silu(gate)) × weight with `gate_first`, else norm(x) × weight × silu(gate). x, gate [T, C]; weight [C], or [C / num_groups]
    for all groups. Returns [T, C].
    """
    return _pick(x, gated_norm_ref).gated_norm(x, gate, weight, eps, num_groups, gate_first)
