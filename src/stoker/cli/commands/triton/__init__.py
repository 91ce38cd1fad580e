"""`stoker triton`: one file per tool for Triton model repositories and servers."""

from stoker.cli.command_table import Command

_HERE = "stoker.cli.commands.triton"

COMMANDS = (
    Command("lint", f"{_HERE}.lint:lint", "List unfilled, unknown and misspelt keys.", "stoker triton lint repo"),
    Command(
        "fill", f"{_HERE}.fill:fill", "Fill a template, as fill_template.py does.",
        'stoker triton fill -i repo/tensorrt_llm/config.pbtxt "engine_dir:engine,decoupled_mode:true"',
    ),
    Command(
        "identity", f"{_HERE}.identity:identity", "Time batches of random tokens: latency and sentences per second.",
        "stoker triton identity --batch_size 8 --start_len 128 --output_len 20",
    ),
    Command(
        "input-data", f"{_HERE}.input_data:input_data", "Write input_data.json for perf_analyzer.", "stoker triton input-data"
    ),
    Command(
        "sweep", f"{_HERE}.sweep:sweep", "Throughput and latency by concurrency.", "stoker triton sweep --concurrency-range 1:10:2"
    ),
)  # fmt: skip
