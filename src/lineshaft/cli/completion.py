"""`lineshaft completion`: a completion script for the shell."""

import argparse
from collections.abc import Mapping

_BASH = """_lineshaft() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="{top}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then words="{top}"; fi
    COMPREPLY=( $(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}") )
}}
complete -F _lineshaft lineshaft
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "completion",
        help="print a completion script for bash or zsh",
        description="Print a completion script. For bash, add to .bashrc: "
        'eval "$(lineshaft completion bash)". For zsh, add to .zshrc: '
        'autoload -U bashcompinit && bashcompinit; eval "$(lineshaft completion zsh)".',
    )
    command.add_argument("shell", choices=("bash", "zsh"))
    command.set_defaults(run=lambda args: run(args, commands.choices))


def run(_args: argparse.Namespace, commands: Mapping[str, argparse.ArgumentParser]) -> int:
    cases = []
    for name, command in sorted(commands.items()):
        words = " ".join(sorted(_words(command)))
        cases.append(f'        {name}) words="{words}" ;;')
    print(_BASH.format(cases="\n".join(cases), top=" ".join(sorted(commands))), end="")
    return 0


def _words(command: argparse.ArgumentParser) -> set[str]:
    """Flags and actions of a command, and the flags of its actions."""
    words: set[str] = set()
    for action in command._actions:  # noqa: SLF001 - no public name
        words |= {option for option in action.option_strings if option.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, below in action.choices.items():
                words |= {name, *_words(below)}
    return words
