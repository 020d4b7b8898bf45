"""Every kind of forward that decode_step does not compute falls back, with a reason of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_lowlatency.runtime.coverage import PREFILL
from sgl_lowlatency.runtime.fallback import fallback_reason, hooked_module

WIDTHS = tuple(range(1, 17))


def reason(rows=2, num_tokens=None, mode=ForwardMode.DECODE, call=None, **fields):
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=rows, spec_info=None, input_embeds=None, replace_embeds=None, lora_ids=None, tbo_children=None
    )
    vars(batch).update(fields)
    tokens = torch.zeros(rows if num_tokens is None else num_tokens, dtype=torch.int64)
    return fallback_reason(WIDTHS, tokens, batch, **(call or {}))


@pytest.mark.parametrize("rows", WIDTHS)
def test_a_plain_decode_step_is_ours(rows):
    assert reason(rows) is None
    assert reason(rows, call={"pp_proxy_tensors": None}) is None, "SGLang passes pp_proxy_tensors=None"


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL])
def test_prefill_is_counted_as_prefill(mode):
    assert reason(mode=mode) == PREFILL


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"mode": ForwardMode.IDLE}, "forward mode idle"),
        ({"mode": ForwardMode.TARGET_VERIFY}, "forward mode target_verify"),
        ({"mode": ForwardMode.DRAFT_EXTEND_V2}, "forward mode draft_extend_v2"),
        ({"rows": 17}, "17 rows, built for 1 to 16"),
        ({"rows": 0}, "0 rows, built for 1 to 16"),
        ({"num_tokens": 4}, "not one token per request"),
        ({"spec_info": object()}, "a speculative step"),
        ({"input_embeds": torch.zeros(1)}, "input embeddings"),
        ({"replace_embeds": torch.zeros(1)}, "input embeddings"),
        ({"call": {"input_embeds": torch.zeros(1)}}, "input embeddings"),
        ({"call": {"get_embedding": True}}, "an embedding is asked for"),
        ({"call": {"pp_proxy_tensors": object()}}, "pipeline parallelism"),
        ({"lora_ids": [None, "adapter"]}, "LoRA"),
        ({"tbo_children": [object()]}, "two-batch overlap"),
        ({"call": {"something_new": 1}}, "an unknown argument something_new"),
    ],
)
def test_anything_else_has_its_reason(given, expected):
    assert reason(**given) == expected


def test_lora_ids_of_a_batch_without_adapters_are_no_reason():
    assert reason(lora_ids=[None, None]) is None


def test_a_hook_on_any_replaced_module_is_found():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    modules = list(model.named_modules())
    assert hooked_module(modules) is None
    handle = model[1][0].register_forward_hook(lambda *_: None)
    assert hooked_module(modules) == "1.0"
    handle.remove()
    assert hooked_module(modules) is None
    model[0].register_forward_pre_hook(lambda *_: None)
    assert hooked_module(modules) == "0"
