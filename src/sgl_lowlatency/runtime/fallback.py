"""Why a forward runs SGLang's own code instead of our kernels: host facts only, one reason a forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sgl_lowlatency.runtime.coverage import PREFILL

_INT64 = ("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc")  # what the kernel reads of a step


def fallback_reason(
    widths: tuple[int, ...],
    tokens_per_request: int,
    input_ids: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    get_embedding: bool = False,
    pp_proxy_tensors: Any = None,
    **unknown: Any,
) -> str | None:
    """The first reason that the step at hand is not ours, or None.

    widths: rows that have a plan. tokens_per_request: 1 in a server of plain decode, else the draft tokens that a verify step
    has a request. The other parameters are those of Qwen3ForCausalLM.forward.
    """
    mode = forward_batch.forward_mode
    if not (mode.is_decode() or mode.is_target_verify()):
        return PREFILL if mode.is_extend() else f"forward mode {mode.name.lower()}"
    reason = _shape_reason(widths, tokens_per_request, input_ids, forward_batch)
    if reason is not None:
        return reason
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


def _shape_reason(widths: tuple[int, ...], tokens_per_request: int, input_ids: Any, forward_batch: Any) -> str | None:
    """Decode steps are ours in a server of plain decode, verify steps of a chain in a speculative one."""
    verifies = forward_batch.forward_mode.is_target_verify()
    if verifies != (tokens_per_request > 1):
        return "a verify step without draft tokens" if verifies else "a decode step in a speculative server"
    if not verifies and forward_batch.spec_info is not None:
        return "a speculative step"
    if verifies and (reason := _chain_reason(tokens_per_request, forward_batch.spec_info)):
        return reason
    rows = int(forward_batch.batch_size) * tokens_per_request
    if rows not in widths:
        between = widths[0] < rows < widths[-1]
        return f"{rows} rows, built for {', '.join(map(str, widths)) if between else f'{widths[0]} to {widths[-1]}'}"
    if input_ids is None or input_ids.shape[0] != rows:
        return "not one token per request" if tokens_per_request == 1 else f"not {tokens_per_request} tokens per request"
    others = (name for name in _INT64 if getattr(forward_batch, name).dtype != torch.int64)
    if (other := next(others, None)) is not None:
        return f"{other} is {str(getattr(forward_batch, other).dtype).removeprefix('torch.')}, not int64"
    return None


def _chain_reason(tokens_per_request: int, spec_info: Any) -> str | None:
    """Why a verify step's drafts are not one chain of `tokens_per_request` a request."""
    if spec_info is None or not spec_info.is_verify_input():
        return "a verify step without a verify input"
    if spec_info.ragged_verify_layout is not None:
        return "a ragged verify step"
    if spec_info.draft_token_num != tokens_per_request:
        return f"{spec_info.draft_token_num} draft tokens per request, built for {tokens_per_request}"
    if getattr(spec_info, "topk", None) not in (None, 1):
        return "a tree of draft tokens"
    return None


def hooked_module(modules: Iterable[tuple[str, torch.nn.Module]]) -> str | None:
    """The name of the first module that carries a forward hook, which a step of ours would not call; None without any."""
    for name, module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return name
    return None
