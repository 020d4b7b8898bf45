"""Times decode_step on this machine's GPU against the floor that its memory sets. Needs torch and a GPU; no SGLang, no model.

    sgl-lowlatency bench [kernels]                                    Qwen3-8B, 1, 2, 4 and 8 rows of 1,024 tokens
    sgl-lowlatency bench --models llama-3.2-1b --contexts 32,1024,8000 --rows 1,16
    sgl-lowlatency bench --models path/to/config.json --layers 8 --out run.json --picture run.svg
    sgl-lowlatency bench serve -h                                     a real server's decode steps, plugin off and on (needs SGLang)
    sgl-lowlatency bench replay -h                                    agentic sessions on real servers, plugin off and on (needs SGLang)

The weights are random, of real scale, and fill GPU memory as the model's would. It measures the read bandwidth of the GPU first;
the floor of a step is the bytes it must read (every weight once, every cached K and V once) over that bandwidth. Every case is
replayed as a CUDA graph, with the LM head and without, and its output is checked.

Exit code 0: measured, every output checked. 1: an output was wrong (named in the table). 2: it cannot run here, or an argument is
wrong. 130: ended by Ctrl-C; what was measured until then is printed and written.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_lowlatency.cli import checkout
from sgl_lowlatency.guard.device import installation_reasons
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.canvas import require_format
from sgl_lowlatency.plan.presets import NAMED

if TYPE_CHECKING:
    from sgl_lowlatency.bench.results import Results
    from sgl_lowlatency.bench.shapes import Shape

CANNOT, INTERRUPTED = 2, 130


def numbers(low: int, high: int | None):
    """A parser of comma lists of integers within low..high, without repeats."""

    def parse(text: str) -> tuple[int, ...]:
        limits = f"{low} to {high}" if high else f"{low} or more"
        words = [word.strip() for word in text.split(",")]
        bad = [word for word in words if not word.isdecimal() or int(word) < low or (high and int(word) > high)]
        if bad:
            raise argparse.ArgumentTypeError(f"{bad[0]!r} is not a whole number of {limits}")
        if len(set(map(int, words))) != len(words):
            raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
        return tuple(int(word) for word in words)

    return parse


def whole(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def route(words: list[str]) -> list[str]:
    """The arguments of `bench kernels`, which is what `bench` alone means. `bench serve` and `bench replay` become another program here."""
    if words and words[0] in checkout.SCRIPTS:
        checkout.hand_over(words[0], words[1:])
    return words[1:] if words[:1] == ["kernels"] else words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", "--geometry", default="qwen3-8b", metavar="LIST",
        help=f"comma list out of {', '.join(NAMED)}, and paths of a model's config.json or of the folder that holds it "
        "(default qwen3-8b)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=("bf16", "fp8"), default="bf16", help="of the layers' matrices; fp8 has a scale a block of 128 x 128 (default bf16)"
    )
    parser.add_argument("--layers", type=whole, metavar="N", help="measure the first N layers only, where the model does not fit")
    parser.add_argument(
        "--rows", type=numbers(1, abi.MAX_ROWS), default=(1, 2, 4, 8), metavar="LIST",
        help=f"rows (requests) of a step, 1 to {abi.MAX_ROWS} (default 1,2,4,8)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=numbers(1, None), default=(1024,), metavar="LIST",
        help="tokens of every request, the new one included (default 1024)",
    )  # fmt: skip
    parser.add_argument("--groups", type=whole, default=7, metavar="N", help="times taken of every case (default 7)")
    parser.add_argument("--group-ms", type=whole, default=60, metavar="MS", help="how long each replays (default 60)")
    parser.add_argument("--dry-run", action="store_true", help="print the cases, the bytes each must read and the memory it takes; needs no GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write every figure and where it comes from")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw the bars; .png where Pillow is installed")


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("sgl-lowlatency bench: interrupted before the first case", file=sys.stderr)
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    if refusal := (None if args.dry_run else missing()) or _file_reason(args):
        return _fail(refusal)
    try:
        models = _models(args)
    except ValueError as error:
        return _fail(str(error))
    if args.dry_run:
        return _dry_run(args, models)
    from sgl_lowlatency.bench.decode_step import WEIGHTS
    from sgl_lowlatency.bench.results import Results

    folder, name = (args.out.parent, args.out.stem) if args.out else (None, "bench")
    command = ["sgl-lowlatency", *sys.argv[1:]]
    results = Results(folder, what="kernel-step", name=name, weights=WEIGHTS, command=command, commit=None)
    refusal = interrupted = None
    try:
        refusal = _measure(args, models, results)
    except KeyboardInterrupt:
        cases = len(models) * len(args.rows) * len(args.contexts)
        interrupted = f"interrupted after {len(results.content['rows'])} of {cases} cases"
    _report(args, results)
    if interrupted:
        print(f"sgl-lowlatency bench: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    if refusal:
        return _fail(refusal)
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


def missing() -> str | None:
    """What this machine lacks, everything in one line; None when it can measure."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch does not load ({error}): install torch with CUDA"
    lacks = []
    if torch.version.cuda is None:
        lacks.append(f"torch {torch.__version__} is built without CUDA")
    elif not torch.cuda.is_available():
        lacks.append("no GPU is visible: check the NVIDIA driver (nvidia-smi) and CUDA_VISIBLE_DEVICES")
    isa = "sm_%d%d" % torch.cuda.get_device_capability() if not lacks else None
    lacks += installation_reasons(isa, emulate=False)
    if isa and int(isa.removeprefix("sm_")) < 90:
        lacks = [f"{torch.cuda.get_device_name()} is {isa}; decode_step needs sm_90 or newer"]
    return "cannot measure here: " + "; ".join(lacks) if lacks else None


def _file_reason(args: argparse.Namespace) -> str | None:
    """Why --out or --picture could not be written at the end; None when they can, or are not wanted."""
    if args.out and args.out.suffix != ".json":
        return f"--out {args.out} does not end in .json"
    for option, path in (("--out", args.out), ("--picture", args.picture)):
        if path and not path.parent.is_dir():
            return f"{option} {path}: there is no folder {path.parent}"
    if args.picture:
        try:
            require_format(args.picture)
        except ValueError as error:
            return f"--picture: {error}"
    return None


def _models(args: argparse.Namespace) -> list[tuple[str, Shape]]:
    """(name, shape) of every model asked for. Raises ValueError for an unknown one and for a context that is too long."""
    from sgl_lowlatency.bench.shapes import cut, load_shape

    models = []
    for word in args.models.split(","):
        name, shape = load_shape(word.strip())
        if max(args.contexts) > shape.max_position:
            raise ValueError(f"--contexts {max(args.contexts)} is more than the {shape.max_position} positions of {name}")
        models.append((name, cut(shape, args.layers)))
    return models


def _dry_run(args: argparse.Namespace, models: list[tuple[str, Shape]]) -> int:
    """Prints what would be measured."""
    from sgl_lowlatency.bench import floors, memory

    for name, shape in models:
        needed = memory.needed_bytes(shape, rows=max(args.rows), context=max(args.contexts))
        print(f"{name}, {args.weights} weights: {needed / 1e9:.1f} GB of GPU memory")
        for context in args.contexts:
            for rows in args.rows:
                read = floors.step_bytes(shape, rows=rows, context=context, with_head=True, fp8=args.weights == "fp8")
                print(f"  {rows} rows of {context} tokens: a step reads {read / 1e9:.3f} GB; {args.groups} times of {args.group_ms} ms")
    return 0


def _measure(args: argparse.Namespace, models: list[tuple[str, Shape]], results: Results) -> str | None:
    """Measures every case into `results`; returns why it could not go on, or None."""
    import torch

    from sgl_lowlatency.bench import decode_step, memory, provenance, read_bandwidth

    device, start_s = torch.device("cuda", torch.cuda.current_device()), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start_s:6.1f} s] {text}", flush=True)

    gpu = torch.cuda.get_device_name(device)
    results.set(**provenance.gpu(decode_step.device_id(device)) | {"gpu": gpu})
    settings = decode_step.Settings(
        rows=args.rows, contexts=args.contexts, groups=args.groups, group_ms=args.group_ms, weights=args.weights
    )
    most = {"rows": max(args.rows), "context": max(args.contexts)}
    for name, shape in models:  # before the first minute is spent
        if refusal := memory.reason(name, shape, **most, free_bytes=torch.cuda.mem_get_info(device)[0], gpu=gpu):
            return refusal
    try:
        say(f"{gpu}: measuring the read bandwidth")
        bandwidth = read_bandwidth.measure()
        results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
        say(f"{gpu} reads {bandwidth['read_gb_s']:.0f} GB/s")
        for name, shape in models:
            decode_step.measure(name, shape, settings, results, bandwidth["read_gb_s"], device, say)
            torch.cuda.empty_cache()
    except torch.cuda.OutOfMemoryError as error:
        return f"GPU memory ran out ({str(error).splitlines()[0]}): --layers N cuts the model, fewer --rows or shorter --contexts the KV"
    except (ValueError, RuntimeError) as error:  # a plan or a tensor that does not fit, a fault of the kernel, CUDA's own
        return f"the measurement ended: {str(error).splitlines()[0]}"
    return None


def _report(args: argparse.Namespace, results: Results) -> None:
    """The table and the bars of what was measured, and the files asked for."""
    if not results.content["rows"]:
        return
    from sgl_lowlatency.bench import picture, report

    print(f"\n{report.table(results.content)}\n{report.chart(results.content, sys.stdout.encoding)}")
    if args.out:
        print(f"figures: {args.out}")
    if args.picture:
        picture.draw(results.content).save(args.picture)
        print(f"picture: {args.picture}")


def _fail(text: str) -> int:
    print(f"sgl-lowlatency bench: {text}", file=sys.stderr)
    return CANNOT
