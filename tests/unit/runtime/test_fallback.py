"""Every kind of forward that decode_step does not compute falls back, with a reason of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sgl_lowlatency.runtime.coverage import PREFILL
from sgl_lowlatency.runtime.fallback import fallback_reason, hooked_module

WIDTHS = tuple(range(1, 17))


def reason(requests=2, num_tokens=None, mode=ForwardMode.DECODE, drafts=1, call=None, **fields):
    tokens = torch.zeros(requests * drafts if num_tokens is None else num_tokens, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=requests, spec_info=None, input_embeds=None, replace_embeds=None, lora_ids=None,
        tbo_children=None, input_ids=tokens, positions=tokens, out_cache_loc=tokens, seq_lens=tokens[:requests],
        req_pool_indices=tokens[:requests],
    )
    vars(batch).update(fields)
    return fallback_reason(WIDTHS[drafts - 1 :: drafts], drafts, tokens, batch, **(call or {}))


def ngram(drafts=4):
    return NgramVerifyInput(custom_mask=torch.ones(1, dtype=torch.bool), draft_token_num=drafts)


def eagle(drafts=4, topk=1):
    rest = dict.fromkeys(
        ("draft_token", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "retrieve_cum_len", "seq_lens_cpu")
    )
    return EagleVerifyInput(
        **rest, custom_mask=torch.ones(1, dtype=torch.bool), spec_steps=drafts - 1, topk=topk, draft_token_num=drafts,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=0,
    )


def verify_reason(requests=2, drafts=4, **fields):
    fields = {"spec_info": ngram(drafts), "mode": ForwardMode.TARGET_VERIFY} | fields
    return reason(requests, drafts=drafts, **fields)


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
        ({"mode": ForwardMode.TARGET_VERIFY}, "a verify step without draft tokens"),
        ({"mode": ForwardMode.DRAFT_EXTEND_V2}, "forward mode draft_extend_v2"),
        ({"requests": 17}, "17 rows, built for 1 to 16"),
        ({"requests": 0}, "0 rows, built for 1 to 16"),
        ({"num_tokens": 4}, "not one token per request"),
        ({"spec_info": object()}, "a speculative step"),
        ({"input_embeds": torch.zeros(1)}, "input embeddings"),
        ({"replace_embeds": torch.zeros(1)}, "input embeddings"),
        ({"call": {"input_embeds": torch.zeros(1)}}, "input embeddings"),
        ({"call": {"get_embedding": True}}, "an embedding is asked for"),
        ({"call": {"pp_proxy_tensors": object()}}, "pipeline parallelism"),
        ({"lora_ids": [None, "adapter"]}, "LoRA"),
        ({"tbo_children": [object()]}, "two-batch overlap"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, "seq_lens is int32, not int64"),
        ({"call": {"something_new": 1}}, "an unknown argument something_new"),
    ],
)
def test_anything_else_has_its_reason(given, expected):
    assert reason(**given) == expected


@pytest.mark.parametrize("requests, drafts", [(1, 2), (4, 4), (1, 16), (5, 3)])
@pytest.mark.parametrize("spec_info", [ngram, eagle])
def test_a_verify_step_of_a_chain_is_ours(requests, drafts, spec_info):
    assert verify_reason(requests, drafts, spec_info=spec_info(drafts)) is None


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"requests": 5}, "20 rows, built for 4 to 16"),
        ({"num_tokens": 7}, "not 4 tokens per request"),
        ({"mode": ForwardMode.DECODE, "spec_info": None, "num_tokens": 2}, "a decode step in a speculative server"),
        ({"mode": ForwardMode.DECODE, "spec_info": EagleDraftInput(), "num_tokens": 2}, "a decode step in a speculative server"),
        ({"mode": ForwardMode.EXTEND, "spec_info": None}, PREFILL),
        ({"mode": ForwardMode.DRAFT_EXTEND_V2}, "forward mode draft_extend_v2"),
        ({"spec_info": None}, "a verify step without a verify input"),
        ({"spec_info": EagleDraftInput()}, "a verify step without a verify input"),
        ({"spec_info": ngram(3)}, "3 draft tokens per request, built for 4"),
        ({"spec_info": eagle(topk=2)}, "a tree of draft tokens"),
        ({"lora_ids": ["adapter", None]}, "LoRA"),
        ({"out_cache_loc": torch.zeros(8, dtype=torch.int32)}, "out_cache_loc is int32, not int64"),
    ],
)
def test_other_steps_of_a_speculative_server_have_their_reasons(given, expected):
    assert verify_reason(**given) == expected


def test_ragged_verify_has_its_reason():
    ragged = ngram()
    ragged.ragged_verify_layout = object()
    assert verify_reason(spec_info=ragged) == "a ragged verify step"


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
