"""The commands of `stoker`. Each file of this folder is one command, each sub-folder is a table of sub-commands.

To add a command, write a file with a function whose docstring ends in an "Examples:" section, and add a row here.
"""

from __future__ import annotations

from stoker.cli.command_table import Command

_HERE = "stoker.cli.commands"

COMMANDS = (
    Command("build", f"{_HERE}.build:build", "Build an engine from a checkpoint.", "stoker build ./Llama-3.1-8B-Instruct -o engine"),
    Command("serve", f"{_HERE}.serve:serve", "Serve a model over HTTP with in-flight batching.", "stoker serve engine --port 8000"),
    Command(
        "route",
        f"{_HERE}.route:route",
        "Route requests to several servers by their prefixes.",
        "stoker route http://10.0.0.5:8000 http://10.0.0.6:8000 --tokenizer engine",
    ),
    Command("replicas", f"{_HERE}.replicas:replicas", "List and drain the servers behind a router.", "stoker replicas"),
    Command(
        "simulate",
        f"{_HERE}.simulate:simulate",
        "Predict latencies and cost of a fleet from a trace.",
        "stoker simulate trace.jsonl --step-times step_times.json --replicas 4 --gpu-hour-cost 3",
    ),
    Command("generate", f"{_HERE}.generate:generate", "Complete prompts in this process.", 'stoker generate engine "Once upon a time"'),
    Command("chat", f"{_HERE}.chat:chat", "Chat with a model in the terminal.", "stoker chat engine"),
    Command(
        "run-batch",
        f"{_HERE}.run_batch:run_batch",
        "Process a file of OpenAI's batch requests.",
        "stoker run-batch engine -i requests.jsonl -o results.jsonl",
    ),
    Command("pull", f"{_HERE}.pull:pull", "Fetch a model and build its engine.", "stoker pull HuggingFaceTB/SmolLM2-135M-Instruct"),
    Command("list", f"{_HERE}.list:list_engines", "List the cached engines.", "stoker list"),
    Command("rm", f"{_HERE}.rm:rm", "Remove engines from the cache.", "stoker rm SmolLM2-135M-Instruct"),
    Command("ps", f"{_HERE}.ps:ps", "List the running servers.", "stoker ps"),
    Command("cache", f"{_HERE}.cache:COMMANDS", "Show the size of the cache, and free space.", "stoker cache prune --dry-run"),
    Command("inspect", f"{_HERE}.inspect:inspect", "Show an engine's settings and check its files.", "stoker inspect engine --verify"),
    Command("tune", f"{_HERE}.tune:tune", "Measure kernel tiles on this machine's GPU.", "stoker tune engine"),
    Command("eval", f"{_HERE}.eval:COMMANDS", "Measure the accuracy of an engine.", "stoker eval perplexity engine --text book.txt"),
    Command("export", f"{_HERE}.export:COMMANDS", "Write an engine in another server's format.", "stoker export triton engine repo"),
    Command("package", f"{_HERE}.package:COMMANDS", "Write an engine as one file for a hosting service.", "stoker package lmi engine"),
    Command("triton", f"{_HERE}.triton:COMMANDS", "Check, fill and measure Triton model repositories.", "stoker triton lint repo"),
    Command("launch", f"{_HERE}.launch:launch", "Serve a Triton repository on Triton's ports.", "stoker launch --model_repo repo"),
    Command(
        "tritonserver",
        f"{_HERE}.tritonserver:tritonserver",
        "Serve a repository with tritonserver's options.",
        "stoker tritonserver --model-repository=repo",
    ),
    Command("client", f"{_HERE}.client:client", "Send a request to a Triton server.", 'stoker client "Once upon a time" -S'),
    Command("bench", f"{_HERE}.bench:COMMANDS", "Measure latency, throughput or a server.", "stoker bench throughput engine"),
    Command("doctor", f"{_HERE}.doctor:doctor", "Report what this machine can run, and why not.", "stoker doctor"),
    Command("completion", f"{_HERE}.completion:completion", "Print a script that completes commands in a shell.", "stoker completion bash"),
    Command("demo", f"{_HERE}.demo:demo", "Build and serve a small model, and send it requests.", "stoker demo"),
)
