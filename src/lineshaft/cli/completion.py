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


_BASH_CASE = '        {name}) words="{words}" ;;'
_FISH_CASE = "        case {name}\n            string split ' ' -- \"{words}\""
_FISH = """function __lineshaft_words
    set -l words (commandline -opc)
    set -l command $words[2]
    switch "$command"
{cases}
        case '*'
            string split ' ' -- "{top}"
    end
end
complete -c lineshaft -f -a '(__lineshaft_words)'
"""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Print a completion script. For bash, add to .bashrc: "
        'eval "$(lineshaft completion bash)". For zsh, add to .zshrc: '
        'autoload -U bashcompinit && bashcompinit; eval "$(lineshaft completion zsh)". For fish: '
        "lineshaft completion fish > ~/.config/fish/completions/lineshaft.fish",
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    command.set_defaults(run=lambda args: run(args, commands.choices))


def run(args: argparse.Namespace, commands: Mapping[str, argparse.ArgumentParser]) -> int:
    script, case = (_FISH, _FISH_CASE) if args.shell == "fish" else (_BASH, _BASH_CASE)
    cases = [
        case.format(name=name, words=" ".join(sorted(_words(each))))
        for name, each in sorted(commands.items())
    ]
    print(script.format(cases="\n".join(cases), top=" ".join(sorted(commands))), end="")
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
