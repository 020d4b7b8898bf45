"""Refusals of a DeepSeek-V4.1 layer after the weights load, by the slices of it that are to be ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sgl_lowlatency.guard import attention_slices, fused_moe, hyper_connection


def layer_reasons(layer: Any, slices: Collection[str]) -> Iterator[str]:
    """layer: SGLang's DeepseekV4DecoderLayer after process_weights_after_loading. slices: out of config.DEEPSEEK_SLICES."""
    if {"attention_in", "attention_out"} & set(slices):
        yield from attention_slices.layer_reasons(layer)
    if "moe" not in slices:
        return
    yield from fused_moe.layer_reasons(layer.mlp)
    if "attention_out" in slices:  # then fused_moe's post closes the MoE's hyper-connection
        yield from hyper_connection.sublayer_reasons(layer, "ffn")
