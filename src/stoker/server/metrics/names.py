"""The names under which metrics are exported: Stoker's, Triton's and vLLM's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from stoker.server.metrics.vllm import vllm_families

_PREFIXES = {"stoker": "stoker_", "triton": "nv_", "vllm": "vllm:"}
_FAMILY = re.compile(r"(?m)^(?=# HELP )")


def with_names(exposition: bytes, names: tuple[str, ...]) -> bytes:
    """The metrics of an exposition whose names are of one of the systems in `names`, in Prometheus' text format.

    The argument has Stoker's and Triton's names; vLLM's are computed from Stoker's.
    """
    if "vllm" in names:
        exposition += _text(vllm_families(exposition))
    prefixes = tuple(_PREFIXES[name] for name in names)
    families = _FAMILY.split(exposition.decode())
    return "".join(family for family in families if family.removeprefix("# HELP ").startswith(prefixes)).encode()


class _Families:
    """A Prometheus collector of given families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families


def _text(families: list[Metric]) -> bytes:
    """The families in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)
