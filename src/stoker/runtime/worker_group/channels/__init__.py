"""The table of plan channels. Adding one takes one file and one row here; the first row that fits the hosts of the ranks is used."""

from __future__ import annotations

from stoker.base.errors import ConfigError
from stoker.base.registry import Registry
from stoker.runtime.worker_group.channels.channel import ChannelKind
from stoker.runtime.worker_group.channels.shared_memory import SharedMemoryChannel, SharedMemoryReader

CHANNELS: Registry[ChannelKind] = Registry("plan channel")
CHANNELS.add("shared_memory", ChannelKind(SharedMemoryChannel, SharedMemoryReader, spans_hosts=False))


def select_channel(hosts: tuple[str, ...]) -> str:
    """The name of the channel for ranks on `hosts`. Raises ConfigError if there is none."""
    names = sorted(set(hosts))
    for name in CHANNELS:
        if len(names) == 1 or CHANNELS.get(name).spans_hosts:
            return name
    raise ConfigError(f"the ranks of an engine are on {len(names)} hosts ({', '.join(names)}).", cure="Run all ranks on one host.")
