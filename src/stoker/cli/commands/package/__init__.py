"""`stoker package`: one file per format that an engine can be written in as an archive."""

from stoker.cli.command_table import Command

COMMANDS = (
    Command(
        "lmi", "stoker.cli.commands.package.lmi:lmi", "SageMaker model data: a tar with serving.properties and the engine.",
        "stoker package lmi engine",
    ),
)  # fmt: skip
