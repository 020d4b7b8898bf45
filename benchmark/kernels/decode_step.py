"""Kernel-level time of `decode_step` against its byte floor (sgl_lowlatency.bench.decode_step). Needs torch, a GPU and the package.

    python3 -m benchmark.kernels.decode_step --out OUT [--models qwen3-8b] [--contexts 32,1024,8000] [--rows 1,2,4,8,16]
    ncu --clock-control none ... python3 -m benchmark.kernels.decode_step --out OUT --once --contexts 1024 --rows 1

`sgl-lowlatency bench` is the same for users. This adds what runs unattended and experiments need: a deadline, a commit for a copy
without git, the size of the panels, and `--once`, which launches a single step between profiler marks and measures nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmark import models
from benchmark.common import deadline
from benchmark.kernels import command
from sgl_lowlatency.bench import decode_step, report
from sgl_lowlatency.bench.inputs import Inputs
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.panels import DEFAULT_PANEL_BUDGET_BYTES


def profile_once(shape, settings: decode_step.Settings, device: torch.device) -> None:
    """One warm launch, then one between profiler marks, of every case."""
    model = decode_step.Model(shape, settings, device)
    for context in settings.contexts:
        pool = model.pool(context)
        for rows in settings.rows:
            inputs = Inputs.make(shape, pool, rows, context, device)
            model.launch(inputs)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            model.launch(inputs)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def main() -> int:
    default = decode_step.Settings()
    parser = command.parser(__doc__, "kernel-decode-step", groups=default.groups, group_ms=default.group_ms)
    parser.add_argument("--work", type=Path, default=None, help="the scratch folder that gpu_checks.sh names to every script; nothing is written")
    parser.add_argument("--models", default="qwen3-8b", help=f"comma list out of {', '.join(models.SHAPES)}")
    parser.add_argument("--weights", choices=tuple(decode_step.WEIGHT_FORMATS), default="bf16", help="of the layers' matrices")
    parser.add_argument("--layers", type=int, default=None, help="cut the models to this many layers")
    parser.add_argument("--contexts", type=numbers(1, None), default=default.contexts)
    parser.add_argument("--rows", type=numbers(1, abi.MAX_ROWS), default=default.rows)
    parser.add_argument(
        "--panel-budget", type=int, default=DEFAULT_PANEL_BUDGET_BYTES, help="bytes of activations in shared memory at a time"
    )
    parser.add_argument(
        "--kernel-deadline", type=float, default=default.kernel_deadline_s, help="deadline of every wait in the kernel, s"
    )
    parser.add_argument("--once", action="store_true", help="one launch a case between profiler marks, no measurement")
    args = parser.parse_args()
    if command.refused("decode_step"):
        return 2
    settings = decode_step.Settings(
        args.rows, args.contexts, args.groups, args.group_ms, args.kernel_deadline, panel_budget_bytes=args.panel_budget, weights=args.weights
    )
    shapes = {name: models.named_shape(name, args.layers) for name in args.models.split(",")}
    device = command.device()
    if args.once:
        deadline.watchdog(args.deadline)
        for shape in shapes.values():
            profile_once(shape, settings, device)
        return 0
    results = command.begin(args, "decode_step", decode_step.WEIGHTS, report.table, "kernel-step")
    read_gb_s = command.measure_bandwidth(results)
    for name, shape in shapes.items():
        decode_step.measure(name, shape, settings, results, read_gb_s, device, deadline.say)
        torch.cuda.empty_cache()
    return command.end(results, report.table)


if __name__ == "__main__":
    sys.exit(main())
