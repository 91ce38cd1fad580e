"""Which groups of ranks share memory. `tests/gpu` has the memory itself."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from stoker.base.config import Mapping
from stoker.base.errors import ConfigError
from stoker.distributed.symmetric import SymmetricGroup
from stoker.distributed.world import join

CPU = torch.device("cpu")


def test_a_process_shares_memory_with_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that was in a group before refuses, and with it all ranks, also new processes."""
    is_new = MagicMock(side_effect=lambda self, value: value)
    monkeypatch.setattr(SymmetricGroup, "_was_created", False)
    monkeypatch.setattr(SymmetricGroup, "_can_access_all", lambda self: True)
    monkeypatch.setattr(SymmetricGroup, "smallest", lambda self, value: is_new(self, value))
    monkeypatch.setattr(SymmetricGroup, "_allocate", lambda self, num_bytes: (torch.empty(0), None, []))
    inner = MagicMock()
    inner.rank.return_value, inner.size.return_value = 0, 3
    SymmetricGroup(inner, CPU)
    with pytest.raises(RuntimeError, match="the process of a rank has run an engine on several GPUs before"):
        SymmetricGroup(inner, CPU)
    monkeypatch.setattr(SymmetricGroup, "_was_created", False)
    is_new.side_effect = lambda self, value: False  # the answer when another rank was in a group before
    with pytest.raises(RuntimeError, match="before"):
        SymmetricGroup(inner, CPU)
    assert not SymmetricGroup._was_created


def test_a_second_engine_on_gpus_at_the_same_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"is a rank of another engine on several GPUs.*in a process of its own"):
        join(dist.HashStore(), 0, Mapping(tensor_parallel=2), torch.device("cuda:0"))
