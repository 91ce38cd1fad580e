"""Every key of a config.json is used, has no effect, or is rejected by name: each key is changed, and transformers tells its effect.

For each architecture of transformers, each key of its configuration class is replaced by another value, and each key of the other classes
is added. A config.json that Stoker accepts must give the logits that transformers computes from the same file and weights. These are not
computed again for a key that transformers does not read: its logits are those of the first file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from cases import CASES, FIRST
from harness import Harness, PlannedEngine, prefill_logits
from oracles import hf_logits, random_like, uninitialized_model
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from stoker.base.config import Limits
from stoker.base.errors import StokerError
from stoker.builder.config import BuildConfig
from stoker.builder.prepare import prepare
from stoker.models import all_architectures, resolve_architecture
from stoker.models.config_reader import read_model_config

# transformers has no model for the files of the first two, its vision tower of the third one has gigabytes, and the last needs timm
WITHOUT_CLASS = (
    "GLMModel", "Gemma3ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "Gemma3nForConditionalGeneration",
)  # fmt: skip
NATIVE = [
    row.name
    for row in all_architectures()
    if row.model_types and row.model_types[0] in CONFIG_MAPPING and row.name in FIRST and row.name not in WITHOUT_CLASS
]
IDENTITY = {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "id2label", "label2id"}
PROMPT = [5, 17, 3, 60, 8, 8, 41, 77, 2, 30, 11, 9, 64, 71, 23, 50, 6, 12, 35, 28]
TOLERANCE = 1e-4

# Keys that no configuration class of transformers has, and that files of the families contain.
EXTRA: dict[str, list[Any]] = {
    "partial_rotary_factor": [0.5],
    "rope_theta": [500.0],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}],
    "attention_scale": [0.5],
    "embedding_scale": [3.0],
    "unheard_of": [1],
}

# Keys that transformers ignores and the publisher's code uses.
PUBLISHED_MEANING = {("MptForCausalLM", "attn_config.alibi_bias_max"), ("StableLmForCausalLM", "norm_eps")}


def candidates(value: Any) -> list[Any]:
    """Values to try in place of `value`, of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1] if value else [1]
    if isinstance(value, float):
        return [value * 1.5, value + 0.5]
    if isinstance(value, str):
        return ["relu", "gelu", "silu", "other"]
    if isinstance(value, list):
        return [value[::-1], [1]] if value else [[1], [0]]
    return [4, 0.5, True]


def changed(config: dict[str, Any], added: dict[str, list[Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(key, configs in which it has another value) for each key of `config`, nested ones included, and each key of `added`."""
    for key, value in config.items():
        if key in IDENTITY or key == "vision_config":
            continue
        if isinstance(value, dict):
            for inner, nested in changed(value, {}):
                yield f"{key}.{inner}", [{**config, key: each} for each in nested]
        else:
            yield key, [{**config, key: each} for each in candidates(value)]
    for key, values in added.items():
        if key not in config:
            yield key, [{**config, key: each} for each in values]


@cache
def keys_of_all_classes() -> dict[str, list[Any]]:
    """Every key of the configuration classes, with values to try: other ones than the default of any class.

    Sizes are small, because some classes apply the names that others have for them.
    """
    found: dict[str, list[Any]] = {}
    for name in NATIVE:
        for key, value in CONFIG_MAPPING[row_of(name).model_types[0]]().to_dict().items():
            if key not in IDENTITY and not isinstance(value, (dict, list)):
                first = candidates(value)[0]
                found.setdefault(key, [min(first, 96) if isinstance(first, int) else first])
    return found | EXTRA


def row_of(name: str) -> Any:
    return next(row for row in all_architectures() if row.name == name)


def parse(hf: dict[str, Any]) -> PreTrainedConfig | None:
    """The configuration of transformers for a config.json. None when transformers does not accept it."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[hf["model_type"]].from_dict(copy.deepcopy(hf))
    except Exception:  # any error of the library
        return None
    return config


class Oracle:
    """A model of transformers for a config.json, with weights that depend on the names and shapes of its tensors alone.

    `config` is the parsed `hf`. The model may change it.
    """

    def __init__(self, hf: dict[str, Any], config: PreTrainedConfig) -> None:
        attention = "sdpa" if hf.get("alibi") else "eager"  # the eager attention of Falcon adds ALiBi twice
        models = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if "text_config" in hf else MODEL_FOR_CAUSAL_LM_MAPPING
        self.model = uninitialized_model(models[type(config)], config, attention)
        stored = set(self.model.state_dict())
        with torch.no_grad():
            for key, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if key in stored:
                    tensor.copy_(random_like(key, tensor, torch.Generator().manual_seed(crc32(key.encode()))))
        self.logits = hf_logits(self.model)(PROMPT, 0)
        assert torch.isfinite(self.logits).all()

    def save(self, path: Path, hf: dict[str, Any]) -> None:
        with contextlib.redirect_stderr(io.StringIO()), pytest.MonkeyPatch.context() as patch:  # transformers draws progress bars
            for written in (PreTrainedConfig, GenerationConfig):  # the files other than the weights, which take a third of the time
                patch.setattr(written, "save_pretrained", lambda *_, **__: None)
            self.model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(hf))


def oracle_of(hf: dict[str, Any], config: PreTrainedConfig) -> Oracle | None:
    """None when transformers has no model for the config, or computes no numbers from it."""
    try:
        return Oracle(hf, config)
    except Exception:  # any error of the library: there is nothing to compare with
        return None


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """The names of all attributes that are read from configurations of transformers in this context, whether they exist or not."""
    names: set[str] = set()
    read = PreTrainedConfig.__getattribute__

    def record(config: PreTrainedConfig, name: str) -> Any:
        names.update((name, read(config, "attribute_map").get(name, name)))
        return read(config, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__getattribute__", record)
        yield names


def differing_attributes(config: PreTrainedConfig, other: PreTrainedConfig) -> set[str]:
    """The names of the attributes, nested ones included, that only one of two configurations has, or that have other values."""
    found: set[str] = set()
    for name in {*vars(config), *vars(other)}:
        value, others = vars(config).get(name, ...), vars(other).get(name, ...)
        if isinstance(value, PreTrainedConfig) and type(value) is type(others):
            found |= differing_attributes(value, others)
        elif value != others:
            found.add(name)
    return found


def stoker_logits(oracle: Oracle, hf: dict[str, Any], path: Path, tokenizer: Path) -> Tensor:
    oracle.save(path, hf)
    limits = Limits(max_input_len=32, max_output_len=32, max_num_tokens=64, max_batch_size=1, tokens_per_block=16)
    config = BuildConfig(tokenizer=str(tokenizer), device="cpu", dtype="float32", limits=limits)
    return prefill_logits(Harness(PlannedEngine(prepare(path, config)), 64, num_blocks=4), PROMPT)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep transformers from logging. It formats whole configurations for messages below the level, too, which took a sixth of the time."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


@pytest.mark.parametrize("name", NATIVE)
def test_each_key_is_used_or_without_effect_or_rejected(name: str, tmp_path: Path, tokenizer: Path) -> None:
    CASES[FIRST[name]]().save(tmp_path / "first")
    base = json.loads((tmp_path / "first" / "config.json").read_text())
    row, first, config = resolve_architecture(base), parse(base), parse(base)
    assert first is not None and config is not None
    with recorded_reads() as names_read:
        logits = Oracle(base, config).logits
    model = read_model_config(row, base)
    wrong, num_compared = [], 0
    for key, configs in changed(base, keys_of_all_classes()):
        for i, hf in enumerate(configs if (name, key) not in PUBLISHED_MEANING else ()):
            try:
                read = read_model_config(row, hf)
            except StokerError:
                continue  # rejected, from config.json alone
            config = parse(hf)
            if config is None:
                continue
            if read == model and differing_attributes(config, first).isdisjoint(names_read):
                num_compared += 1
                continue
            oracle = oracle_of(hf, config)
            if oracle is None:
                continue
            if read == model:
                found = logits
            else:
                try:
                    found = stoker_logits(oracle, hf, tmp_path / f"{key}{i}", tokenizer)
                except StokerError:
                    continue  # rejected, because the weights do not fit
            num_compared += 1
            has_effect = oracle.logits.shape != logits.shape or not torch.equal(oracle.logits, logits)
            error = (found - oracle.logits).abs().max().item() if found.shape == oracle.logits.shape else float("inf")
            if error > TOLERANCE:
                wrong.append(
                    f"{key}={_value(hf, key)!r}: logits differ by {error:.2g}" + (" and Stoker ignores it" if read == model else "")
                )
            if has_effect and isinstance(_value(hf, key), (int, float)):
                break  # another number takes the same path; other strings and lists name other functions
    assert wrong == []
    assert num_compared > 20


def _value(hf: dict[str, Any], path: str) -> Any:
    value: Any = hf
    for part in path.split("."):
        value = value[part]
    return value
