"""Slices of a DeepSeek-V4.1 layer against SGLang's own launches on the running server's weights, on rows of our making.

Warm-up data is one token at position 0 in every row, so each slice is compared on random rows of the step's size, with random positions, into pages
and slots of a scratch cache: nothing that the server keeps is read or written. SGLang's launches differ from ours by FP8 activations in groups of 32,
which SGLang has and the kernels do not; the bounds (specs/nvidia/deepseek_v4.py) are from oracles with such activations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sgl_lowlatency.kernels.attention_in import HEAD_ROPE, AttentionIn, KvPages
from sgl_lowlatency.kernels.attention_out import AttentionOut
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS
from sgl_lowlatency.kernels.slice import Layer
from sgl_lowlatency.reference.attention_in import read_slots
from sgl_lowlatency.runtime import deepseek_v4_sglang as sglang_layer

# What is rotated of queries and keys by itself: it is an eighth of them, and a wrong rotation little in the whole.
ATTENTION_IN_FIGURES = tuple(f"attention_in.{name}" for name in ("x", "q_lora", "q", "q_rope", "kv", "kv_rope"))
ATTENTION_OUT_FIGURES = ("attention_out.coefficients", "attention_out.streams", "attention_out.out")
MOE_FIGURES = ("moe.relative_l2", "routing.gap")
MOE_POST_FIGURES = ("moe.coefficients", "moe.streams")  # where fused_moe closes the MoE's hyper-connection: behind attention_out
UNWRITTEN = 0xFF  # of a cache: NaN in e4m3 and bf16
ROTATED_SCALE = 4  # of the rotated part of a head, so that it is half of attention_out's input


@dataclasses.dataclass(frozen=True)
class Figure:
    """name: of a bound. value: the worst of a layer's rows, infinite where one is not a number."""

    name: str
    layer: int
    value: float


def row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Relative L2 of every row, fp32 [rows]; infinite where it is not a number."""
    ours, theirs = ours.float().flatten(1), theirs.float().flatten(1)
    error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-30)
    return error.nan_to_num(nan=float("inf"), posinf=float("inf"))


def attention_in_figures(
    number: int, kernel: AttentionIn, prepared: Layer, layer: Any, like: torch.Tensor, has_pre: bool, pages: KvPages
) -> list[Figure]:
    """Of layer `number`. like: its streams [rows, 4, hidden], whose size and scale the check's have. pages: its keys', whose form the scratch has."""
    rows, device, attn = like.shape[0], like.device, layer.self_attn
    generator = torch.Generator(device=device).manual_seed(number)
    scale = like.float().square().mean().sqrt().clamp(min=1e-3)
    streams = (torch.randn(like.shape, generator=generator, device=device) * scale).to(like.dtype)
    pre = torch.rand(rows, STREAMS, generator=generator, device=device) if has_pre else None
    positions = torch.randint(0, attn.freqs_cis.shape[0], (rows,), generator=generator, device=device)
    num_pages = rows // pages.page_size + 2
    slots = torch.randperm(num_pages * pages.page_size, generator=generator, device=device)[:rows].int()
    scratch = [
        KvPages(torch.full((num_pages, pages.pages.shape[1]), UNWRITTEN, dtype=torch.uint8, device=device), pages.page_size) for _ in range(2)
    ]

    x = sglang_layer.input_of_attention(layer, streams, pre)
    q_lora, q = sglang_layer.project_in(attn, x, positions, scratch[0], slots)
    own = [torch.full_like(t, float("nan"), memory_format=torch.contiguous_format) for t in (x, q_lora, q)]
    kernel.launch(prepared, streams, pre, positions, slots, scratch[1], *own, stream=sglang_layer.stream_of(x))
    theirs, ours = (
        (*projected, *_parted(q), *_parted(read_slots(cache, slots.long())))
        for *projected, q, cache in ((x, q_lora, q, scratch[0]), (*own, scratch[1]))
    )
    return [Figure(name, number, float(row_errors(a, b).max())) for name, a, b in zip(ATTENTION_IN_FIGURES, ours, theirs, strict=True)]


def _parted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries or keys: what is not rotated, and what is."""
    return values[..., :-HEAD_ROPE], values[..., -HEAD_ROPE:]


def attention_out_figures(number: int, kernel: AttentionOut, prepared: Layer, layer: Any, like: torch.Tensor, is_verify: bool) -> list[Figure]:
    """Of layer `number`. like: attention's heads [rows, heads, 512], whose size the check's have. Streams have the scale of attention's output, so
    that what is wrong with either is seen in both."""
    rows, device, attn = like.shape[0], like.device, layer.self_attn
    generator = torch.Generator(device=device).manual_seed(number)
    heads = torch.randn(like.shape, generator=generator, device=device)
    heads[..., -attn.qk_rope_head_dim :] *= ROTATED_SCALE
    heads = heads.to(like.dtype)
    positions = torch.randint(0, attn.freqs_cis.shape[0], (rows,), generator=generator, device=device)
    y = sglang_layer.project_out(attn, heads.clone(), positions, is_verify)
    streams = torch.randn(rows, STREAMS, y.shape[1], generator=generator, device=device) * y.float().square().mean().sqrt().clamp(min=1e-3)
    streams = streams.to(like.dtype)
    theirs = sglang_layer.close_attention(layer, y, streams)
    own = [torch.full((rows, MIXES), float("nan"), device=device), torch.full_like(streams, float("nan")), torch.full_like(y, float("nan"))]
    coefficients, behind, out = own
    kernel.launch(prepared, heads, positions, streams, behind, out, coefficients, stream=sglang_layer.stream_of(y))
    return [Figure(name, number, float(row_errors(a, b).max())) for name, a, b in zip(ATTENTION_OUT_FIGURES, own, theirs, strict=True)]
