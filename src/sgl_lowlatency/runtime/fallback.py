"""Why a forward runs SGLang's own code instead of decode_step: host facts only, one reason a forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sgl_lowlatency.runtime.coverage import PREFILL


def fallback_reason(
    widths: tuple[int, ...],
    input_ids: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    get_embedding: bool = False,
    pp_proxy_tensors: Any = None,
    **unknown: Any,
) -> str | None:
    """The first reason that the step at hand is not ours, or None. Parameters as Qwen3ForCausalLM.forward takes them."""
    mode = forward_batch.forward_mode
    if not mode.is_decode():
        is_prefill = mode.is_extend() and not mode.is_target_verify()
        return PREFILL if is_prefill else f"forward mode {mode.name.lower()}"
    rows = int(forward_batch.batch_size)
    if rows not in widths:
        return f"{rows} rows, built for {widths[0]} to {widths[-1]}"
    if input_ids is None or input_ids.shape[0] != rows:
        return "not one token per request"
    if forward_batch.spec_info is not None:
        return "a speculative step"
    if input_embeds is not None or forward_batch.input_embeds is not None or forward_batch.replace_embeds is not None:
        return "input embeddings"
    if get_embedding:
        return "an embedding is asked for"
    if pp_proxy_tensors is not None:
        return "pipeline parallelism"
    if forward_batch.lora_ids is not None and any(forward_batch.lora_ids):
        return "LoRA"
    if forward_batch.tbo_children:
        return "two-batch overlap"
    given = sorted(name for name, value in unknown.items() if value is not None)
    return f"an unknown argument {given[0]}" if given else None


def hooked_module(modules: Iterable[tuple[str, torch.nn.Module]]) -> str | None:
    """The name of the first module that carries a forward hook, which a step of ours would not call; None without any."""
    for name, module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return name
    return None
