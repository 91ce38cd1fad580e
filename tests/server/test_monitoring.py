"""Metrics: the table, names of other systems, the dashboard, alerts, and a real Prometheus that scrapes a loaded server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from fake_executor import FakeExecutor, info
from live_http import asgi_client, live_app
from prometheus_client.parser import text_string_to_metric_families
from scripted_service import ScriptedService
from small_tokenizers import small

from stoker.base.errors import ConfigError
from stoker.base.metrics import ALL_METRICS
from stoker.base.types import Timings
from stoker.frontend.generation import GenerationService
from stoker.frontend.repository import ModelRepository
from stoker.frontend.service import Service
from stoker.frontend.tokenizer import Tokenizer
from stoker.runtime.transport.in_process import InProcessClient, InProcessMailbox
from stoker.server.application import make_app
from stoker.server.metrics.frontend import FrontendMetrics
from stoker.server.metrics.metered import MeteredClient, MeteredService
from stoker.server.protocol import Context
from stoker.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
REQUEST = {"model": "tiny", "prompt": "Hi", "max_tokens": 5, "stream": True}
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="promtool and prometheus are not installed: apt-get install prometheus",
)
# What vLLM's own Grafana dashboard and its documentation of production metrics use, as in release 0.26 and in releases before 0.11.
VLLM_NAMES = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:time_per_output_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:gpu_cache_usage_perc vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket vllm:request_success_total
vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_inference_time_seconds_bucket vllm:request_max_num_generation_tokens_sum
vllm:request_params_max_tokens_bucket vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:num_preemptions_total vllm:request_time_per_output_token_seconds_bucket
"""


@contextlib.asynccontextmanager
async def scripted_executor(**settings: Any) -> AsyncIterator[Context]:
    """A context with the generation service, whose executor is scripted."""
    mailbox = InProcessMailbox(info(512, max_input_len=256, max_output_len=256))
    executor = FakeExecutor(mailbox, lambda request, index: list(range(10, 30)))
    tokenizer = Tokenizer(small("byte_level"), {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token_id": [2, 3]})
    counts, repository = FrontendMetrics(), ModelRepository()
    service = GenerationService("tiny", tokenizer, MeteredClient(InProcessClient(mailbox), "tiny", counts))

    async def load() -> Service:
        return MeteredService(service, counts)

    repository.register("tiny", load, lambda _: service.close())
    await repository.load("tiny")
    try:
        yield Context(repository, ServerSettings(**settings), counts)
    finally:
        await repository.unload("tiny")
        executor.stop()


async def scrape(**settings: Any) -> str:
    """The metrics of a server after one request."""
    async with scripted_executor(**settings) as context:
        transport = httpx.ASGITransport(make_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://stoker") as client:
            assert (await client.post("/v1/completions", json=REQUEST)).status_code == 200
            response = await client.get("/metrics")
            assert response.status_code == 200
            return response.text


def test_names_of_the_table_are_unique() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert len(names) == len(set(names))
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in ALL_METRICS)
    for metric in ALL_METRICS:
        assert list(metric.buckets) == sorted(metric.buckets) and bool(metric.buckets) == (metric.kind == "histogram")


async def test_the_table_has_all_exported_metrics_and_no_others() -> None:
    families = list(text_string_to_metric_families(await scrape()))
    exported = {family.name: family.type for family in families if family.name.startswith("stoker_")}
    assert exported == {metric.name.removesuffix("_total"): metric.kind for metric in ALL_METRICS}
    helps = {family.name: family.documentation for family in families}
    assert {metric.name.removesuffix("_total"): metric.help for metric in ALL_METRICS}.items() <= helps.items()


async def test_the_durations_of_a_request_are_counted_by_phase() -> None:
    class TimedService(ScriptedService):
        """Its completions have timings, as those of the real one."""

        async def complete(self, request: Any) -> Any:
            completion = await super().complete(request)
            completion.timings = Timings(0.002, 0.010, 0.050, 100.0, 0.01, prepare_s=0.001)
            return completion

    async with asgi_client(TimedService("Hello")) as client:
        await client.post("/v1/completions", json={**REQUEST, "stream": False})
        text = (await client.get("/metrics")).text
    samples = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name.endswith("_sum")}
    expected = {"queue": 0.002, "prefill": 0.007, "decode": 0.04, "compute": 0.047, "time_per_output_token": 0.01}
    assert {name: samples[f"stoker_request_{name}_seconds_sum"] for name in expected} == pytest.approx(expected)
    assert samples["stoker_request_max_tokens_sum"] == 5


async def test_vllms_names() -> None:
    text = await scrape(metric_names=("vllm",))
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert set(VLLM_NAMES.split()) <= {sample.name for sample in samples}
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0" for sample in samples)
    values = {(s.name, s.labels.get("finished_reason"), s.labels.get("le")): s.value for s in samples}
    assert values["vllm:generation_tokens_total", None, None] == 5 and values["vllm:kv_cache_usage_perc", None, None] == 0
    assert values["vllm:request_success_total", "length", None] == 1
    assert values["vllm:request_queue_time_seconds_bucket", None, "120.0"] == 1
    assert "stoker_" not in re.sub(r"(?m)^# HELP.*$", "", text) and "nv_" not in text


async def test_names_are_selected() -> None:
    def prefixes(text: str) -> set[str]:
        return {re.split(r"[_:]", family.name)[0] for family in text_string_to_metric_families(text)}

    assert prefixes(await scrape()) == {"stoker", "nv"}
    assert prefixes(await scrape(metric_names=("triton",))) == {"nv"}
    assert prefixes(await scrape(metric_names=("stoker", "vllm"))) == {"stoker", "vllm"}
    for names in ((), ("prometheus",)):
        with pytest.raises(ConfigError, match="metric_names"):
            ServerSettings(metric_names=names)


def expressions(script: Callable[[str], ModuleType]) -> dict[str, str]:
    """The PromQL of each panel and alert, with values for Grafana's variables."""
    dashboard = script("dashboard").dashboard()
    panels = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((PROMETHEUS / "stoker.rules.yaml").read_text())["groups"][0]["rules"]
    found = {f"{title} {i}": expression for i, (title, expression) in enumerate(panels)} | {rule["alert"]: rule["expr"] for rule in rules}
    values = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}
    for variable, value in values.items():
        found = {name: expression.replace(variable, value) for name, expression in found.items()}
    return found


async def test_dashboard_and_alerts_use_metrics_that_exist(script: Callable[[str], ModuleType]) -> None:
    module = script("dashboard")
    assert json.loads(module.FILE.read_text()) == module.dashboard(), "run: python scripts/dashboard.py"
    exported = {s.name for family in text_string_to_metric_families(await scrape()) for s in family.samples}
    exported |= {metric.name for metric in ALL_METRICS if metric.kind == "counter"}  # without a sample until the first event
    used = {name for expression in expressions(script).values() for name in re.findall(r"stoker_\w+", expression)}
    assert used <= exported and len(used) > 20
    panels = module.dashboard()["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(places) == len(set(places)) and len({panel["id"] for panel in panels}) == len(panels)


def test_each_alert_has_an_entry_of_the_run_book() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rules = yaml.safe_load((PROMETHEUS / "stoker.rules.yaml").read_text())["groups"][0]["rules"]
    titles = re.findall(r"(?m)^## (Stoker\w+)$", page)
    assert sorted(titles) == sorted(rule["alert"] for rule in rules)
    assert all(rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}" for rule in rules)


@needs_prometheus
def test_promtool_accepts_configuration_and_alerts() -> None:
    commands = (("check", "config", "prometheus.yaml"), ("check", "rules", "stoker.rules.yaml"), ("test", "rules", "stoker.test.yaml"))
    for command in commands:
        done = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.asynccontextmanager
async def prometheus(config: dict[str, Any], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running Prometheus with this configuration, on a free loopback port."""
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    arguments = [
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    process = await asyncio.create_subprocess_exec("prometheus", *arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield httpx.AsyncClient(base_url=f"http://127.0.0.1:{await _port(process)}")
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    """The port that the process listens on, from the kernel's table of its sockets. Returns when it is ready."""
    assert process.stderr is not None
    async with asyncio.timeout(40):
        while line := (await process.stderr.readline()).decode():
            if "Server is ready to receive web requests" in line:
                break
        else:
            raise AssertionError("Prometheus has ended")
    inodes = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    return next(int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes)


@needs_prometheus
@pytest.mark.skipif(sys.platform != "linux", reason="the port of Prometheus is read from /proc")
async def test_prometheus_scrapes_a_loaded_server(tmp_path: Path, script: Callable[[str], ModuleType]) -> None:
    """All queries of the dashboard and of the alerts run without an error, and those about requests have the server's numbers."""
    async with scripted_executor() as context, live_app(make_app(context), context.settings) as port:
        target = {"targets": [f"127.0.0.1:{port}"]}
        config = {
            "global": {"scrape_interval": "200ms", "evaluation_interval": "1s"},
            "rule_files": [str(PROMETHEUS / "stoker.rules.yaml")],
            "scrape_configs": [{"job_name": "stoker", "static_configs": [target]}],
        }
        async with prometheus(config, tmp_path) as client, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as stoker:

            async def query(expression: str) -> list[Any]:
                answer = (await client.get("/api/v1/query", params={"query": expression})).json()
                assert answer["status"] == "success", (expression, answer)
                return list(answer["data"]["result"])

            async def until_counted(number: int) -> None:
                async with asyncio.timeout(40):
                    while True:
                        result = await query('sum(stoker_requests_total{outcome="length"})')
                        if result and float(result[0]["value"][1]) == number:
                            return
                        await asyncio.sleep(0.1)

            await stoker.post("/v1/completions", json=REQUEST)
            await until_counted(1)
            await asyncio.gather(*(stoker.post("/v1/completions", json=REQUEST) for _ in range(20)))
            await until_counted(21)
            results = {name: await query(expression) for name, expression in expressions(script).items()}
            empty = {name.rsplit(" ", 1)[0] for name, result in results.items() if not result and not name.startswith("Stoker")}
            assert empty <= {"Restarted processes"}
            assert [name for name, result in results.items() if result and name.startswith("Stoker")] == []
            rules = (await client.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"} and len(rules) == 9
            await client.aclose()
