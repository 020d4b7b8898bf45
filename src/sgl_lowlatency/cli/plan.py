"""`sgl-lowlatency plan`: the static plan of a geometry as text, JSON or a picture."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

from sgl_lowlatency.kernels.abi import MAX_ROWS
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.dump import to_text
from sgl_lowlatency.plan.picture import draw
from sgl_lowlatency.plan.presets import NAMED, read_config
from sgl_lowlatency.plan.static_plan import PlanError, make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.plan.validate import validate

H200_SMS = 132
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--geometry",
        required=True,
        help=f"one of {', '.join(NAMED)}, or the path of a model's config.json (or of the folder that holds it)",
    )
    parser.add_argument("--rows", type=int, default=1, help=f"rows of the step, 1..{MAX_ROWS} (default 1)")
    parser.add_argument("--rows-per-request", type=int, default=1, help="rows of each request: above 1, a verify step (default 1)")
    parser.add_argument("--weights", choices=ELEMENT_BYTES, default="bf16", help="what the layers' matrices are made of (default bf16)")
    parser.add_argument("--without-head", action="store_true", help="a step that ends at the final norm, and not with the LM head")
    parser.add_argument(
        "--grid", type=int, help=f"blocks (default: what a server uses on {H200_SMS} SMs, an H200; a small model takes fewer)"
    )
    parser.add_argument(
        "--shared-memory-bytes", type=int, default=232448, help="dynamic shared memory a block may use (default 232448, sm_90)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="tables for people (the default)")
    form.add_argument("--json", action="store_true", help="the canonical JSON whose sha256 is the plan's hash")
    parser.add_argument("--picture", metavar="OUT", help="also write a picture: OUT.svg, or OUT.png where Pillow is installed")


def load_geometry(name: str) -> Geometry:
    """A geometry by name or from a config.json. Raises ValueError when it is neither or lacks a field."""
    if name in NAMED:
        return NAMED[name]
    try:
        _, config = read_config(name)
    except ValueError as error:
        raise ValueError(f"--geometry {error}") from error
    return Geometry.from_hf_config(SimpleNamespace(**config))


def run(args: argparse.Namespace) -> int:
    """Prints the plan. Returns 0; 1 when the validator finds errors (printed); 2 when no plan can be made."""
    try:
        geometry = load_geometry(args.geometry)
        grid = grid_for(geometry, H200_SMS) if args.grid is None and not geometry.reasons() else args.grid or H200_SMS
        plan = make_plan(
            geometry, args.rows, grid, args.shared_memory_bytes,
            rows_per_request=args.rows_per_request, element_bytes=ELEMENT_BYTES[args.weights], has_head=not args.without_head,
        )
        if args.picture:
            draw(plan).save(args.picture)
    except (PlanError, ValueError, OSError) as error:
        print(f"sgl-lowlatency plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(plan.to_json())
    else:
        print(to_text(plan), end="")
        if args.picture:
            print(f"\npicture: {args.picture}")
    errors = validate(plan)
    for error in errors:
        print(f"invalid plan: {error}", file=sys.stderr)
    if not errors and not args.json:
        print("\nvalid: acyclic, every word written once and awaited, no generation cleared while read or used before it is clear")
    return 1 if errors else 0
