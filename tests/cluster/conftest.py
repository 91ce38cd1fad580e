"""Engines of several ranks, and hosts to run them on. The folder is a tier of its own: make test-cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("builder", "parity", "parallel", "transfer", "server", "cluster")]

if TYPE_CHECKING:
    from hosts import Network

MAPPINGS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "both": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "long": {"pipeline_parallel": 2},
    "three stages": {"pipeline_parallel": 3},
    "experts": {"tensor_parallel": 2, "expert_parallel": True},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with Ray, which waits most, so that the other files run beside it in another test process."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds an engine with one of MAPPINGS, once: of a random Llama, or Mixtral for `experts`. `long` has long sequences."""
    import tiny

    from stoker.base.config import Limits, Mapping
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    built: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in built:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            checkpoint = folder / "checkpoint"
            if name == "experts":
                tiny.model("mixtral", num_local_experts=4, num_experts_per_tok=2).save_pretrained(checkpoint)
                tiny.save_tokenizer(checkpoint)
            else:
                tiny.save(tiny.model(max_position_embeddings=8192 if name == "long" else 256), checkpoint)
            longest = 8000 if name == "long" else 64
            limits = Limits(max_batch_size=8, max_input_len=180, max_output_len=longest, max_num_tokens=128, tokens_per_block=16)
            config = BuildConfig(device="cpu", dtype="float32", limits=limits, mapping=Mapping(**MAPPINGS[name]))
            built[name] = build(checkpoint, folder / "engine", config, verify="none").path
        return built[name]

    return make


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts."""
    from hosts import NO_HOSTS, Network, can_make_hosts

    if not can_make_hosts():
        pytest.skip(NO_HOSTS)
    made = Network(2)
    yield made
    made.close()
