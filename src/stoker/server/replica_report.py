"""What a server reports about itself to routers at GET /health/replica."""

from __future__ import annotations

import msgspec

from stoker.frontend.repository import ModelRepository
from stoker.runtime.client import ExecutorInfo
from stoker.server.metrics.statistics import ExecutorStatistics
from stoker.server.settings import ServerSettings

ANSWER_S = 0.05  # time for an executor to answer, which it does between two steps
RECENT_S = 1.0


class ReplicaReport(msgspec.Struct, kw_only=True):
    """The models, the load and the properties of one server. Routers choose a replica and tokenize with them."""

    models: list[str]  # names of the models that are ready
    reason: str = ""  # why a model is not ready
    age_s: float | None = 0.0  # of the load, of the model with the oldest one; None: an executor has not reported its load yet
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

    @property
    def is_recent(self) -> bool:
        """Whether the load is that of the last RECENT_S. It is older during a long step."""
        return self.age_s is not None and self.age_s <= RECENT_S

    @property
    def num_sequences(self) -> int:
        """The sequences that run or wait. A model whose load is older has at least the one of its step."""
        return max(self.num_running + self.num_waiting, 0 if self.is_recent else 1)


def deployment_of(options: msgspec.Struct | None) -> str:
    """The type of the options of a deployment folder; empty for a plain engine, whose KServe models have the setting `unary`."""
    return "" if options is None or getattr(options, "unary", False) else type(options).__name__


async def make_report(repository: ModelRepository, settings: ServerSettings, statistics: ExecutorStatistics) -> ReplicaReport:
    """The report of this server, with the last known load of executors that do not answer, because they are in a step.

    The model of an executor that has not answered for its step_timeout_s is not ready.
    """
    report = ReplicaReport(
        models=[],
        grpc_port=settings.grpc_port,
        protocols=settings.protocols,
        add_special_tokens=settings.add_special_tokens,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        deployment=deployment_of(settings.options),
    )
    known = await statistics.read(repository, ANSWER_S)
    for model in repository.models():
        if not model.ready or model.service is None:
            report.reason = report.reason or f"{model.name}: {model.why_not_ready}"
            continue
        info = model.service.info
        report.models.append(model.name)
        if report.info is None:
            report.info, report.tokens_per_block = info, info.limits.tokens_per_block
        if model.name not in known:
            report.age_s = None
            report.max_batch_size = max(report.max_batch_size, info.limits.max_batch_size * info.data_parallel)
            continue
        stats, age_s = known[model.name].stats, known[model.name].age_s
        report.age_s = None if report.age_s is None else max(report.age_s, age_s)
        report.num_running += stats.num_running
        report.num_waiting += stats.num_waiting + stats.num_paused
        if stats.num_blocks:
            report.kv_usage = max(report.kv_usage, 1 - stats.num_free_blocks / stats.num_blocks)
        report.max_batch_size = max(report.max_batch_size, stats.max_batch_size)
    return report
