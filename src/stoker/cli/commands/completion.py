"""`stoker completion`: scripts that complete the command line in a shell."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.base.config import check_choice

# The scripts call this command with the words before the cursor. A shell completes file names itself.
BASH = """\
_stoker_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(stoker completion bash --candidates -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o bashdefault -o default -F _stoker_complete stoker
"""
ZSH = """\
#compdef stoker
_stoker_complete() {
    local -a found
    found=("${(@f)$(stoker completion zsh --candidates -- "${(@)words[2,$CURRENT]}" 2>/dev/null)}")
    compadd -a found
    _files
}
if [[ $funcstack[1] == _stoker ]]; then _stoker_complete; else compdef _stoker_complete stoker; fi
"""
FISH = """\
complete -c stoker -a '(stoker completion fish --candidates -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    words: Annotated[list[str] | None, typer.Argument(help="With --candidates: the words after `stoker`, the last one incomplete.")] = None,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Print the possible last words, one a line, instead of the script. The script uses it.")
    ] = False,
) -> None:
    """Print a script that completes commands, options, their values and names of cached engines in a shell.

    Examples:

      stoker completion bash

      stoker completion bash > ~/.local/share/bash-completion/completions/stoker

      stoker completion zsh > ~/.zfunc/_stoker

      stoker completion fish > ~/.config/fish/completions/stoker.fish
    """
    check_choice("shell", shell, tuple(SCRIPTS))
    if not candidates:
        typer.echo(SCRIPTS[shell], nl=False)
        return
    from stoker.cli.completions import complete_words

    for word in complete_words(words or [""]):
        typer.echo(word)
