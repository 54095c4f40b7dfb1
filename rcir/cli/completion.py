"""`rcir completion SHELL`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pkgutil import resolve_name


def add_completion_arguments(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh"), default="bash")


def run_completion(options: Namespace) -> None:
    """Print a script that completes commands and the names of their options."""
    from rcir import config
    from rcir.cli import COMMANDS, JOBS, make_parser

    parsers = {name: make_parser(name) for name in COMMANDS}
    for name, (kind, _) in JOBS.items():
        parsers[name] = config.make_parser(resolve_name(kind), name, name == "calibrate")
    cases = [f'1:*) words="{" ".join(parsers)}";;']
    for name, parser in parsers.items():
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        cases.append(f'*:{name}) words="{" ".join(flags).replace("_", "-")}";;')
    print("autoload -U +X bashcompinit && bashcompinit\n" * (options.shell == "zsh"), end="")
    print("_rcir() {", 'case "$COMP_CWORD:${COMP_WORDS[1]}" in', *cases, "esac", sep="\n")
    print('COMPREPLY=($(compgen -W "$words" -- "$2"))', "}", sep="\n")
    print("complete -o default -F _rcir rcir")
