"""Command-line arguments that every serving script takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmark import models


def parser(description: str | None, *, deadline_s: float, layers: int | None = None) -> argparse.ArgumentParser:
    """A parser with the common arguments; `description` is the script's docstring."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--work", type=Path, default=None, help="folder of model, logs and traces (default: OUT/work)")
    made.add_argument("--model", default="qwen3-8b", choices=sorted(models.SHAPES))
    made.add_argument("--layers", type=int, default=layers, help="cut the model to this many layers")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    made.add_argument("--deadline", type=float, default=deadline_s, help="seconds after which everything is killed")
    made.add_argument("--start-limit", type=float, default=240, help="seconds a server may take to start")
    made.add_argument("--server-arg", action="append", default=[], help="one more server argument, repeatable")
    return made


def parse(made: argparse.ArgumentParser, smoke: dict | None = None) -> argparse.Namespace:
    """The arguments, with `work` filled in. smoke: defaults where the parser's --smoke is given."""
    if smoke and made.parse_known_args()[0].smoke:
        made.set_defaults(**smoke)
    args = made.parse_args()
    args.work = args.work or args.out / "work"
    return args
