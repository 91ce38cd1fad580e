"""Hostile values of each key of the published config.json of each architecture: they are refused by name, or have a meaning.

A value has one if published files have values of its type under the key. The reader's own record tells the keys that a file lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import CheckpointError
from stoker.models import all_architectures, get_architecture, resolve_architecture
from stoker.models.config_data import ConfigData
from stoker.models.config_reader import read_model_config

PUBLISHED = Path(__file__).parents[1] / "parity" / "published"
LONG = "x\x1b[31m\n" * 3000
NUMBERS: list[Any] = [0, -1, 1.5, -0.5, 2**31, 2**70, 10**4000, float("1e400"), float("nan"), float("-inf"), 1e300, 5e-324]
SMALL = [2, 3]  # right for most keys, but perhaps not with the other values of the file
OTHERS: list[Any] = [None, True, False, "big", "", LONG, [], [None], [1, 2], ["x"] * 3, [[]] * 9, [0.5] * 5000, {}, {"x": 1}, {"type": []}]
# The types of values of keys that no published file has with a value, beside null.
UNPUBLISHED = {
    "bool": """
        rope_interleaved rope_interleave use_bidirectional_attention use_mla use_mrope use_rmsnorm use_mixed_mlp_moe moe_use_aux_free
        group_limited_greedy position_embedding_xdrope norm_before_gate qk_gn rope _remove_final_layer_norm altup_correct_scale
        layer_norm_elementwise_affine attn_temperature_tuning enable_bias use_parallel_residual add_bias_linear""",
    "int": """
        _sliding_window_pattern moe_topk n_head_kv num_ln_in_parallel_attn altup_active_idx moe_layer_num_skipped sop_token_id
        smask_token_id floor_scale""",
    "float": """
        alibi_bias_max clip_qkv softmax_scale attn_scale dim_model_base expand mamba_expand mamba_dt_min mixer_rms_eps
        query_pre_attn_scalar rope_ratio base scaling_factor rotary_emb_base scale_emb swiglu_alpha""",
    "list": "layers_block_type moe_layers",
    "str": "chatglm_model_version",
}  # fmt: skip
ONLY_PRESENT = ("z_loss_weight",)  # keys of which the presence is read, whatever the value is


@cache
def files() -> dict[str, dict[str, Any]]:
    """A file for each architecture: the first published one, or one without any key, for which all values are the defaults."""
    found: dict[str, dict[str, Any]] = {row.name: {"architectures": [row.name]} for row in all_architectures()}
    for file in sorted(PUBLISHED.glob("*.json"), reverse=True):
        hf = json.loads(file.read_text())
        found[resolve_architecture(hf).name] = hf
    return found


def type_name(value: Any) -> str:
    return "number" if type(value) in (int, float) and float(value) != int(value) else type(value).__name__


def values_in(hf: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each key, nested ones included."""
    for key, value in hf.items():
        yield path + key, value
        if isinstance(value, dict) and len(value) < 50:
            yield from values_in(value, f"{path}{key}.")


@cache
def published_types() -> dict[str, set[str]]:
    """Key without its objects → the types of its values in the published files."""
    found: dict[str, set[str]] = {}
    for file in PUBLISHED.glob("*.json"):
        for path, value in values_in(json.loads(file.read_text())):
            found.setdefault(path.rpartition(".")[2], set()).add(type(value).__name__)
    for kind, keys in UNPUBLISHED.items():
        for key in keys.split():
            found.setdefault(key, set()).add(kind)
    return found


def replaced(hf: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    inner = hf.get(key)
    return hf | {key: replaced(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def used_keys(row: Any, hf: dict[str, Any]) -> set[str]:
    data = ConfigData(hf, row.kinds)
    row.read_config(data)
    return set(data._used)


@pytest.mark.parametrize("name", [row.name for row in all_architectures()])
def test_each_value_is_refused_by_name_or_has_a_meaning(name: str) -> None:
    row, hf = get_architecture(name), files()[name]
    """A value of the right type is not named if it is wrong only together with others, or gives other keys a meaning."""
    wrong = []
    for path in sorted(used_keys(row, hf)):
        key = path.rpartition(".")[2]
        for value in SMALL + NUMBERS + OTHERS:
            changed = replaced(hf, path, value)
            shown = f"{path}={str(value)[:40]!r}"
            try:
                read_model_config(row, changed)
            except CheckpointError as problem:
                message = str(problem)
                is_named = key in message or value in SMALL or value is None or isinstance(value, bool | dict)
                if not is_named or len(message) > 1000 or not message.isprintable() or not problem.cure:
                    wrong.append(f"{shown}: {message[:200]!r}")
            except Exception as problem:
                wrong.append(f"{shown}: {type(problem).__name__} {str(problem)[:100]}")
            else:
                types = published_types().get(key, set())
                if value is None or key in ONLY_PRESENT or type(value).__name__ in types | ({"int"} if "float" in types else set()):
                    continue
                wrong.append(f"{shown}: accepted; types {types}")
    assert not wrong, "\n".join(wrong[:400])
