"""Takes an SGLang launch command apart into environment variables and server arguments."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_SERVER_MODULES = ("sglang.launch_server", "sglang")
_WRAPPERS = ("env", "nohup", "exec")  # programs that start the words behind them, without arguments of their own


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """environment: the NAME=value words before the program. arguments: what SGLang's parser is to see."""

    environment: dict[str, str]
    arguments: list[str]


def parse(words: Sequence[str]) -> LaunchCommand:
    """The command as typed after `--`: `[env | nohup | exec] [NAME=value ...] python -m sglang.launch_server ARGS`,
    `[...] sglang serve [MODEL] ARGS`, or ARGS alone.

    Raises ValueError with the accepted forms for anything else.
    """
    rest = list(words)
    environment: dict[str, str] = {}
    while rest and (rest[0] in _WRAPPERS or _ASSIGNMENT.fullmatch(rest[0])):
        if match := _ASSIGNMENT.fullmatch(rest.pop(0)):
            environment[match[1]] = match[2]
    program = os.path.basename(rest[0]) if rest else ""
    if program.startswith("-"):
        return LaunchCommand(environment, rest)
    if re.fullmatch(r"python[0-9.]*", program):
        if "-m" in rest and (at := rest.index("-m") + 1) < len(rest) and rest[at] in _SERVER_MODULES:
            arguments = rest[at + 1 :]
            return LaunchCommand(environment, _serve_arguments(arguments) if rest[at] == "sglang" else arguments)
    elif program == "sglang" and len(rest) > 1:
        return LaunchCommand(environment, _serve_arguments(rest[1:]))
    raise ValueError(
        f"{repr(' '.join(words)) if words else 'the empty command'} is not an SGLang launch command. Write, after `--`, one of: "
        "python -m sglang.launch_server ARGS | sglang serve MODEL ARGS | ARGS"
    )


def _serve_arguments(words: list[str]) -> list[str]:
    """`serve [MODEL] ARGS` as launch_server takes them: SGLang's `serve` accepts the model without --model-path."""
    if not words or words[0] != "serve":
        raise ValueError(f"`sglang {words[0] if words else ''}` starts no server; `sglang serve` does")
    arguments = words[1:]
    if arguments and not arguments[0].startswith("-"):
        return ["--model-path", *arguments]
    return arguments
