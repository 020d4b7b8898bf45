"""Says whether an SGLang launch command can run with the kernels active, without starting the server.

    sgl-lowlatency doctor -- python -m sglang.launch_server --model-path MODEL --enable-nvidia-megakernel

Exit code 0: it can. 1: it cannot, and every reason is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import warnings

from sgl_lowlatency.cli import amd_verdict, launch_command, version
from sgl_lowlatency.cli.judging import Verdict
from sgl_lowlatency.cli.verdict import judge
from sgl_lowlatency.kernels import code_objects, multicast


TAKES_COMMAND = True


def _isa(text: str) -> str:
    if not re.fullmatch(r"sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form sm_90 or gfx950")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--json and --assume-gpu; the launch command is what follows `--`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--assume-gpu", type=_isa, metavar="ISA", help="judge as if this GPU were present, e.g. sm_90 for an H200, gfx950 for an MI355X"
    )


def run(args: argparse.Namespace) -> int:
    try:
        command = launch_command.parse(args.words)
    except ValueError as error:
        return _report(args, Verdict(reasons=[str(error)]))
    is_amd = args.assume_gpu.startswith("gfx") if args.assume_gpu else amd_verdict.asked_for(command.arguments)
    os.environ.update(command.environment)  # before anything reads it: judge is the first
    # SGLang's start-up lines and warnings would bury the verdict; what it raises is reported.
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _report(args, (amd_verdict.judge if is_amd else judge)(command.arguments, args.assume_gpu))
    finally:
        logging.disable(logging.NOTSET)


def _multicast() -> str | None:
    """What the driver says of NVLink multicast; None where no driver is."""
    try:
        found = multicast.probe()
    except multicast.DriverError as error:
        return str(error)
    return None if found is None else found.line()


def _report(args: argparse.Namespace, verdict: Verdict) -> int:
    if args.json:
        report = {
            "ok": verdict.ok,
            "reasons": verdict.reasons,
            "notes": verdict.notes,
            "isa": verdict.isa,
            "assumed_gpu": args.assume_gpu,
            "emulated": verdict.emulated,
            "spec": verdict.spec,
            "versions": version.versions(),
            "backends": version.backends_line(),
            "code_objects": code_objects.installed(),
            "multicast": _multicast(),
        }
        print(json.dumps(report, indent=2))
        return 0 if verdict.ok else 1
    lines = version.lines()
    if verdict.isa:
        how = " (host emulation)" if verdict.emulated else " (assumed)" if args.assume_gpu else ""
        lines.append(f"GPU: {verdict.isa}{how}")
    if (said := _multicast()) is not None:
        lines.append(f"NVLink multicast: {said}")
    lines += [f"note: {note}" for note in verdict.notes]
    if verdict.ok:
        lines.append(f"verdict: this command runs with {verdict.spec}")
    else:
        lines.append(f"verdict: refused, {len(verdict.reasons)} reason{'s' if len(verdict.reasons) > 1 else ''}")
        lines += [f"  - {reason}" for reason in verdict.reasons]
    print("\n".join(lines))
    return 0 if verdict.ok else 1
