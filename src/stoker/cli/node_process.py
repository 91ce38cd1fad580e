"""The process of a node that only runs ranks: stop signals do not end it while node 0 serves the last requests."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from stoker.base.config import RuntimeConfig
from stoker.base.logging import get_logger
from stoker.base.nodes import NodeSettings

log = get_logger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_node(engine: Path, runtime: RuntimeConfig, nodes: NodeSettings, announce: Callable[[str], None]) -> int:
    """Run the ranks of this node until node 0 ends the engine. Returns the exit status. Raises ConfigError, EngineError and RankError.

    `announce` is called with one line when all nodes have joined. From then on the first SIGTERM or SIGINT only logs a message, because
    schedulers such as Slurm stop all nodes at once, and node 0 ends the engine after the requests in flight. The second one ends this node.
    """
    from stoker.runtime.load import load_node

    def joined(ranks: list[int]) -> None:
        """Announce the ranks, and keep running after a stop signal."""
        for number in _STOP_SIGNALS:
            signal.signal(number, _on_first_signal)
        names = ", ".join(map(str, ranks))
        announce(f"node {nodes.node_rank} runs rank{'s' if len(ranks) > 1 else ''} {names} for node 0 at {nodes.rendezvous}")

    load_node(engine, runtime, nodes, joined)
    return 0


def _on_first_signal(number: int, frame: object) -> None:
    """Continue until node 0 ends, or until the next signal."""
    log.info("node 0 ends the engine, after the requests in flight. A second signal ends this node at once.")
    for each in _STOP_SIGNALS:
        signal.signal(each, _on_second_signal)


def _on_second_signal(number: int, frame: object) -> None:
    """End this node, which stops the engine on all nodes."""
    raise SystemExit(128 + number)
