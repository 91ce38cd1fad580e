"""`stoker cache`: one file per action on the cache directory."""

from stoker.cli.command_table import Command

COMMANDS = (
    Command("size", "stoker.cli.commands.cache.size:size", "What the cache contains, and how much space it takes.", "stoker cache size"),
    Command("prune", "stoker.cli.commands.cache.prune:prune", "Remove what was not used for some time.", "stoker cache prune --dry-run"),
)
