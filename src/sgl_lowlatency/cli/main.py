"""`sgl-lowlatency COMMAND ...`: imports the one module that the command names."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Module sgl_lowlatency.cli.<name> with add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "doctor": "say whether an SGLang launch command can run the kernels, with every reason when it cannot",
    "demo": "start a real SGLang server on this machine and compare the kernels with the standard path",
    "bench": "time the kernel on this machine's GPU against the floor that its memory sets, or servers with it (bench serve, bench replay)",
    "plan": "print or draw the static plan of a model",
    "version": "print the versions and the compiled backends",
}

READER_GONE = 141  # as a shell reports a process ended by SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. argv: the arguments after the program's name. Returns the exit code."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="sgl-lowlatency",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Low-latency decode kernels for SGLang.\n\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command; -h explains them")
    chosen = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    module = importlib.import_module(f"sgl_lowlatency.cli.{chosen.command}")
    command_parser = argparse.ArgumentParser(
        prog=f"sgl-lowlatency {chosen.command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(command_parser)
    # A module with TAKES_COMMAND gets all after `--` as args.words or, without a `--`, the words that are not its own.
    own, after = getattr(module, "route", list)(chosen.arguments), []
    takes_command, separated = getattr(module, "TAKES_COMMAND", False), "--" in own
    if separated:
        own, after = own[: own.index("--")], own[own.index("--") + 1 :]
    args, words = command_parser.parse_known_args(own)
    args.words = words + after
    if stray := (words if separated else []) if takes_command else args.words:
        command_parser.error(f"unrecognized arguments: {' '.join(stray)}")
    try:
        code = module.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, a pager or head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left for the interpreter to flush into it
        return READER_GONE
    return code


if __name__ == "__main__":
    sys.exit(main())
