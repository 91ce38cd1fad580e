"""What a server reports about itself to routers at GET /health/replica."""

from __future__ import annotations

import msgspec

from stoker.base.errors import StokerError
from stoker.frontend.repository import ModelRepository
from stoker.runtime.client import ExecutorInfo
from stoker.server.settings import ServerSettings


class ReplicaReport(msgspec.Struct, kw_only=True):
    """The models, the load and the properties of one server. Routers choose a replica and tokenize with them."""

    models: list[str]  # names of the models that are ready
    num_running: int = 0  # sequences that hold KV cache blocks
    num_waiting: int = 0
    kv_usage: float = 0.0  # fraction of the KV cache that sequences use, of the model with the largest one
    max_batch_size: int = 0  # sequences in one step; 0: not known
    tokens_per_block: int = 0
    grpc_port: int | None = None
    protocols: tuple[str, ...] = ()  # empty: all
    add_special_tokens: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    deployment: str = ""  # type of the deployment folder's options; empty for a plain engine
    info: ExecutorInfo | None = None  # of the first model


def deployment_of(options: msgspec.Struct | None) -> str:
    """The type of the options of a deployment folder; empty for a plain engine, whose KServe models have the setting `unary`."""
    return "" if options is None or getattr(options, "unary", False) else type(options).__name__


async def make_report(repository: ModelRepository, settings: ServerSettings) -> ReplicaReport:
    """The report of this server. An executor that does not answer makes its model not ready."""
    report = ReplicaReport(
        models=[],
        grpc_port=settings.grpc_port,
        protocols=settings.protocols,
        add_special_tokens=settings.add_special_tokens,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        deployment=deployment_of(settings.options),
    )
    for model in repository.models():
        if not model.ready or model.service is None:
            continue
        try:
            stats = await model.service.stats()
        except StokerError:
            continue
        report.models.append(model.name)
        report.num_running += stats.num_running
        report.num_waiting += stats.num_waiting + stats.num_paused
        if stats.num_blocks:
            report.kv_usage = max(report.kv_usage, 1 - stats.num_free_blocks / stats.num_blocks)
        report.max_batch_size = max(report.max_batch_size, stats.max_batch_size)
        if report.info is None:
            report.info, report.tokens_per_block = model.service.info, stats.tokens_per_block
    return report
