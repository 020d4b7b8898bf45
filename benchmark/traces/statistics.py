"""The shape of a set of traces: turns, lengths, what a turn adds, how much of it a prefix cache could hold.

    python3 -m benchmark.traces.statistics TRACES [--shape agentic-64k]

Exit status 1 where `--shape` is given and a figure is outside the shape's tolerance.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmark.traces import schema
from benchmark.traces.shapes import RARE_TOLERANCE, SHAPES, Shape
from sgl_lowlatency.bench.stats import quantile


def measure(traces: list[schema.Trace]) -> dict[str, float]:
    """Figures of the root streams, named as `Shape.targets`.

    new: input tokens of a turn that no equal leading block of the turn before covers, from the second turn on, resets included.
    prefix_reuse: share of all input tokens, first turns included, that such blocks cover. reset_share: turns of the second and later ones
    that share less than half of the blocks before. A figure nothing was measured for is left out.
    """
    turns, first, inputs, outputs, new, thinks, resets = [], [], [], [], [], [], []
    for trace in traces:
        root = trace.root
        turns.append(len(root))
        first.append(root[0].input_tokens)
        inputs += [request.input_tokens for request in root]
        outputs += [request.output_tokens for request in root]
        thinks += [request.think_s for request in root[1:] if request.think_s is not None]
        for before, after in zip(root, root[1:]):
            shared = len(os.path.commonprefix([before.hash_ids, after.hash_ids]))
            new.append(after.input_tokens - min(shared * trace.block_size, after.input_tokens))
            resets.append(shared < len(before.hash_ids) / 2)
    found = {}
    series = {"turns": turns, "first_input": first, "input": inputs, "output": outputs, "new": new, "think": thinks}
    for name, values in series.items():
        found |= {f"{name}_p{p}": quantile(values, p / 100) for p in (50, 90, 99) if values}
    found["prefix_reuse"] = 1 - (sum(new) + sum(first)) / sum(inputs)
    if resets:
        found["reset_share"] = sum(resets) / len(resets)
    return found


def misses(found: dict[str, float], shape: Shape) -> list[str]:
    """The figures outside the shape's tolerance, as words."""
    wrong = []
    for name, target in shape.targets.items():
        if name not in found:
            wrong.append(f"{name} is not measured, published {target:g}")
            continue
        tolerance = RARE_TOLERANCE if name == "reset_share" else shape.tolerance
        if abs(found[name] - target) > tolerance * target:
            wrong.append(f"{name} is {found[name]:g}, published {target:g}, tolerance {tolerance:.0%}")
    return wrong


def table(found: dict[str, float], shape: Shape | None = None) -> str:
    """One line a figure, beside the published one if there is a shape."""
    targets = shape.targets if shape else {}
    lines = [f"{'':18s}{'these':>12}" + (f"{'published':>12}" if shape else "")]
    for name, value in found.items():
        lines.append(f"{name:18s}{value:12.4g}" + (f"{targets[name]:12.4g}" if name in targets else ""))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    args = parser.parse_args()
    traces = schema.read(args.traces)
    found, shape = measure(traces), SHAPES.get(args.shape)
    print(table(found, shape))
    print(f"{len(traces)} sessions, SHA-256 {schema.digest(traces)}")
    wrong = misses(found, shape) if shape else []
    for line in wrong:
        print(f"- {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
