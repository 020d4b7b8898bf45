"""Device memory of a measurement, and what to say when there is too little."""

from __future__ import annotations

import dataclasses

from sgl_lowlatency.bench.shapes import Shape

BYTES = 2  # of bf16
OTHER_BYTES = 512 * 2**20  # workspace, logits, cuBLAS's own, what the allocator cannot use
DRAW_BYTES = 3 * BYTES  # of an element while its tensor is drawn: float32, then bf16 beside it


def weight_bytes(shape: Shape) -> int:
    """Layers with all of their experts, embedding, an LM head of its own unless tied, final norm, rope table."""
    matrices = shape.vocab * shape.hidden * (1 if shape.tied_head else 2)
    layer = shape.layer_weight_elements + shape.num_experts * shape.expert_elements
    elements = shape.num_layers * layer + matrices + shape.hidden
    return elements * BYTES + shape.max_position * shape.head_dim * 4


def kv_bytes(shape: Shape, *, rows: int, context: int) -> int:
    return (rows * context + 1) * shape.kv_bytes_per_token


def needed_bytes(shape: Shape, *, rows: int, context: int) -> int:
    """Most that is held at once: weights and the largest KV pool, or weights while the largest of them is drawn."""
    largest = max(shape.vocab * shape.hidden, 2 * shape.mlp_channels * shape.hidden * max(shape.num_experts, 1))
    beside = max(kv_bytes(shape, rows=rows, context=context), largest * (DRAW_BYTES - BYTES))
    return weight_bytes(shape) + beside + OTHER_BYTES


def reason(name: str, shape: Shape, *, rows: int, context: int, free_bytes: int, gpu: str) -> str | None:
    """Why `rows` requests of `context` tokens do not fit in `free_bytes`, with what would help; None when they fit."""
    needed = needed_bytes(shape, rows=rows, context=context)
    if needed <= free_bytes:
        return None

    def cut(layers: int) -> Shape:
        return dataclasses.replace(shape, num_layers=layers)

    fits = [n for n in range(1, shape.num_layers) if needed_bytes(cut(n), rows=rows, context=context) <= free_bytes]
    help_ = f"--layers {fits[-1]} would fit" if fits else "not even --layers 1 fits"
    return (
        f"{name} needs {needed / 1e9:.1f} GB of GPU memory ({weight_bytes(shape) / 1e9:.1f} GB weights, "
        f"{kv_bytes(shape, rows=rows, context=context) / 1e9:.1f} GB KV of {rows} rows of {context} tokens) and {gpu} has "
        f"{free_bytes / 1e9:.1f} GB free: --layers N cuts the model ({help_}), fewer --rows or shorter --contexts cut the KV"
    )
