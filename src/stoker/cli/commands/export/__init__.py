"""`stoker export`: one file per format that an engine can be written in as a folder."""

from stoker.cli.command_table import Command

COMMANDS = (
    Command(
        "hf", "stoker.cli.commands.export.hf:hf", "A Hugging Face checkpoint in the format of compressed-tensors.",
        "stoker export hf engine ./Llama-3.1-8B-Instruct-AWQ",
    ),
    Command(
        "ray", "stoker.cli.commands.export.ray:ray", "A Ray Serve application of one or several engines, and its KubeRay manifest.",
        "stoker export ray engine app",
    ),
    Command(
        "slurm", "stoker.cli.commands.export.slurm:slurm", "The scripts of a Slurm job on one or several hosts.",
        "stoker export slurm engine job",
    ),
    Command(
        "triton", "stoker.cli.commands.export.triton:triton", "The five models of an inflight_batcher_llm repository.",
        "stoker export triton engine repo",
    ),
    Command(
        "truss", "stoker.cli.commands.export.truss:truss", "A Truss that contains the engine, for the truss package.",
        "stoker export truss engine my-truss --accelerator H100",
    ),
)  # fmt: skip
