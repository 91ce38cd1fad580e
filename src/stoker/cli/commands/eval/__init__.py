"""`stoker eval`: one file per accuracy measurement."""

from stoker.cli.command_table import Command

COMMANDS = (
    Command(
        "perplexity", "stoker.cli.commands.eval.perplexity:perplexity", "Perplexity of an engine on a text; lower is better.",
        "stoker eval perplexity engine --text book.txt",
    ),
)  # fmt: skip
