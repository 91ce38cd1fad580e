"""`stoker bench`: a file for each thing that is measured."""

from stoker.cli.command import Command

COMMANDS = (
    Command(
        "latency",
        "stoker.cli.bench.latency:latency",
        "Time to first token and time of a decode step, by batch and context.",
        "stoker bench latency engine --batch 1 --batch 8 --context 128 --context 1024",
    ),
    Command(
        "throughput",
        "stoker.cli.bench.throughput:throughput",
        "Tokens a second of many requests at once.",
        "stoker bench throughput engine --input-len 128 --output-len 128 --requests 64",
    ),
    Command(
        "serving",
        "stoker.cli.bench.serving:serving",
        "A server under load, over HTTP: latencies by concurrency.",
        "stoker bench serving engine --concurrency 1 --concurrency 16",
    ),
)
