"""Generates the tables of fields in docs/ from the field tables: run `python scripts/tables.py`.

A table is the text between <!-- table: NAME --> and <!-- end -->.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stoker.base.fields.table import FieldRow
from stoker.base.metrics import ALL_METRICS, Metric
from stoker.deploy.lmi import environment as lmi_environment
from stoker.deploy.lmi import keys as lmi
from stoker.deploy.truss import keys as truss_keys
from stoker.server.metrics import vllm
from stoker.server.protocols.anthropic import fields as anthropic
from stoker.server.protocols.ollama import fields as ollama
from stoker.server.protocols.openai import fields
from stoker.server.protocols.openai.batches import fields as batches
from stoker.server.protocols.openai.responses import fields as responses
from stoker.server.protocols.sagemaker import parameters as sagemaker
from stoker.server.protocols.truss import parameters as truss

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("anthropic.md", "batches.md", "metrics.md", "sagemaker.md", "ollama.md", "openai.md", "responses.md", "truss.md")
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    """The text of a page with new tables."""
    return _PLACE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], (DOCS / name).read_text(encoding="utf-8"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _keys() -> str:
    return _key_rows(lmi.TABLE)


def _key_rows(table: Iterable[FieldRow]) -> str:
    rows = ((f"`{row.name}`", row.status, _description(row, _setting_name(row))) for row in table)
    return _table(("key", "status", "setting, or reason"), rows)


def _setting_name(row: FieldRow) -> str:
    """The name of the setting that an accepted key sets."""
    return row.target.partition(".")[2] or row.target


def _environment() -> str:
    above = ((f"`{name}`", f"`{key}`", "takes precedence over the file") for name, key in lmi_environment.OVERRIDES.items())
    below = ((f"`{name}`", f"`{key}`", "used if the file does not set the key") for name, key in lmi_environment.ENVIRONMENT.items())
    rest = (
        ("`SAGEMAKER_MAX_PAYLOAD_IN_MB`", "`max_request_size`", "takes precedence over the file; in MiB"),
        ("`OPTION_NAME`", "`option.name`", "used if neither the file nor a variable above sets the key"),
        ("`ARGS_NAME`", "`name`", "the same as `OPTION_NAME`"),
        ("`SERVING_NAME`", "`name`", "used if none of these sets the key"),
        *((f"`{name}`", f"`{key}`", "used if nothing else sets the key") for name, key in lmi_environment.FALLBACKS.items()),
        ("`SAGEMAKER_SECURE_MODE`", "", "`true`: `SAGEMAKER_SECURITY_CONTROLS` apply to `SAGEMAKER_UNTRUSTED_CHANNELS`"),
        ("`HF_TOKEN`", "", "access token for private repositories; used only for downloads"),
    )
    return _table(("variable", "key", "precedence"), (*above, *below, *rest))


def _fields(noun: str, rows: Iterable[FieldRow]) -> str:
    return _table((noun, "status", "meaning, or reason"), ((f"`{row.name}`", row.status, _description(row)) for row in rows))


def _description(row: FieldRow, setting: str = "") -> str:
    """The setting, the meaning or reason, the harmless values and the alternative of a row."""
    harmless = dict.fromkeys(_spelled(value) for value in row.harmless if value != "")
    allowed = f"{', '.join(harmless)} is accepted" if harmless else ""
    alternative = row.alternative[:1].lower() + row.alternative[1:].rstrip(".")
    return "; ".join(part for part in (setting, row.meaning or row.reason, allowed, alternative) if part)


def _spelled(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _metrics() -> str:
    rows = ((f"`{metric.name}`", metric.kind, ", ".join(metric.labels), metric.help, _buckets(metric)) for metric in ALL_METRICS)
    return _table(("name", "kind", "labels", "meaning", "buckets"), rows)


def _buckets(metric: Metric) -> str:
    return f"{metric.buckets[0]:g} to {metric.buckets[-1]:g}" if metric.buckets else ""


def _vllm_metrics() -> str:
    rows = [(f"`{name.name}`", f"`{name.source}`") for name in vllm.NAMES]
    rows += [(f"`{name}`", "`stoker_kv_blocks_used` ÷ `stoker_kv_blocks`") for name in vllm.GAUGES]
    rows += [
        ("`vllm:prefix_cache_queries`", "`stoker_prefix_tokens_reused` + `stoker_prefill_tokens_computed`"),
        ("`vllm:request_success`", "`stoker_requests`, by `finished_reason`: stop, length, abort or error"),
    ]
    return _table(("vLLM's name", "values"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "keys": _keys,
    "truss_keys": lambda: _key_rows(truss_keys.TABLE),
    "environment": _environment,
    "parameters": lambda: _fields("parameter", sagemaker.TABLE),
    "truss": lambda: _fields("field", truss.TABLE),
    "both": lambda: _fields("field", fields.BOTH),
    "completions": lambda: _fields("field", fields.COMPLETIONS_ONLY),
    "responses": lambda: _fields("field", (*responses.OWN, *responses.OTHER)),
    "responses_extensions": lambda: _fields("field", responses.EXTENSIONS),
    "anthropic": lambda: _fields("field", (*anthropic.GENERATION[:2], *anthropic.PROMPT, *anthropic.GENERATION[2:])),
    "anthropic_extensions": lambda: _fields("field", anthropic.EXTENSIONS),
    "ollama_chat": lambda: _fields("field", (*ollama.CHAT_ONLY, *ollama.BOTH)),
    "ollama_generate": lambda: _fields("field", ollama.GENERATE_ONLY),
    "ollama_options": lambda: _fields("option", ollama.OPTION_ROWS),
    "batches": lambda: _fields("field", batches.TABLE),
    "metrics": _metrics,
    "vllm_metrics": _vllm_metrics,
    "chat": lambda: _fields("field", fields.CHAT_ONLY),
}


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
