"""What one decode step must move through device memory, and the time that takes at a measured read bandwidth.

    python3 -m sgl_lowlatency.bench.floors [--read-gb-s 4650] [--context 1024] [--rows 1]
"""

from __future__ import annotations

import argparse

from sgl_lowlatency.bench.shapes import PRESETS, Shape

BYTES_PER_ELEMENT = 2  # bf16
FP8_SCALE_ELEMENTS = 128 * 128  # of a matrix that share one float32 scale


def step_bytes(
    shape: Shape, *, rows: int, context: int, with_head: bool, fp8: bool = False, experts: float | None = None
) -> int:
    """Bytes read by one decode step: every weight once, every cached K and V once, one embedding row a row. Of MoE layers, the
    distinct experts that the rows take: `experts` a layer on average, or as many as equally likely ones were.

    `with_head` adds the LM head and is what a served step moves; without, the step ends at the final norm. `fp8`: the layers'
    matrices have one byte an element and a scale a block; all else is bf16, a router too.
    """
    elements = shape.num_layers * shape.layer_weight_elements + shape.hidden + rows * shape.hidden
    if with_head:
        elements += shape.vocab * shape.hidden
    distinct = shape.expected_experts(rows) if experts is None else experts
    if shape.is_moe:
        elements += round(shape.num_layers * distinct * shape.expert_elements)
    matrices = shape.num_layers * shape.layer_matrix_elements
    if shape.is_moe:
        matrices += round(shape.num_layers * (distinct * shape.expert_elements - shape.hidden * shape.num_experts))
    saved = matrices - 4 * matrices // FP8_SCALE_ELEMENTS if fp8 else 0
    return elements * BYTES_PER_ELEMENT - saved + rows * context * shape.kv_bytes_per_token


def floor_ms(num_bytes: int, read_gb_s: float) -> float:
    """Milliseconds to read `num_bytes` at `read_gb_s` (10^9 bytes a second)."""
    return num_bytes / read_gb_s / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read-gb-s", type=float, default=4650.0)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    print(f"rows {args.rows}, context {args.context}, {args.read_gb_s:.0f} GB/s")
    print(f"{'model':16s} {'step GB':>8s} {'floor ms':>9s} {'+head GB':>9s} {'floor ms':>9s}")
    for name, shape in PRESETS.items():
        cells = []
        for with_head in (False, True):
            moved = step_bytes(shape, rows=args.rows, context=args.context, with_head=with_head)
            cells.append(f"{moved / 1e9:8.3f} {floor_ms(moved, args.read_gb_s):9.3f}")
        print(f"{name:16s} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
