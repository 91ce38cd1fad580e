"""`stoker bench`: one file per benchmark."""

from stoker.cli.command_table import Command

_HERE = "stoker.cli.commands.bench"

COMMANDS = (
    Command(
        "latency", f"{_HERE}.latency:latency", "Time to first token and decode step time, by batch size and context length.",
        "stoker bench latency engine --batch 1 --batch 8 --context 128 --context 1024",
    ),
    Command(
        "throughput", f"{_HERE}.throughput:throughput", "Tokens per second of many concurrent requests.",
        "stoker bench throughput engine --input-len 128 --output-len 128 --requests 64",
    ),
    Command(
        "serving", f"{_HERE}.serving:serving", "Latencies of a server under load over HTTP, by concurrency.",
        "stoker bench serving engine --concurrency 1 --concurrency 16",
    ),
)  # fmt: skip
