"""What SGLang's decode graphs are captured with, algorithm by algorithm: each is a step of ours, and the self-check can make its own of it.

Oracle: the wheel's own DecodeCudaGraphRunner.get_spec_info, and its argument resolution of the servers that benchmark/serve/verify_ab.py starts.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.fallback import fallback_reason

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark import drafts, models  # noqa: E402
from benchmark.serve import server, speculation  # noqa: E402

DRAFTS, REQUESTS, HIDDEN = 4, 2, 8
ROWS = DRAFTS * REQUESTS
# what a target's graph hands over: None, the final norm's output or the captured layers', all rows
HANDED_OVER = {"NGRAM": "NULL", "STANDALONE": "NULL", "EAGLE": "FULL", "EAGLE3": "FULL", "DFLASH": "FULL", "DSPARK": "FULL"}
WITH_MASK = {"NGRAM", "STANDALONE", "EAGLE", "EAGLE3"}


@pytest.fixture(params=HANDED_OVER)
def captured(request, monkeypatch):
    """(SGLang's name of the algorithm, the batch that a graph of REQUESTS requests is captured with on fa3)."""
    name = request.param
    monkeypatch.setattr(decode_cuda_graph_runner, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=1))
    backend = type("FlashAttentionBackend", (), {})()
    runner = SimpleNamespace(
        model_runner=SimpleNamespace(
            spec_algorithm=SpeculativeAlgorithm.from_string(name), is_draft_worker=False, attn_backend=backend, dtype=torch.bfloat16,
            device="cpu", model_config=SimpleNamespace(hidden_size=HIDDEN),
        ),
        buffers=SimpleNamespace(custom_mask=torch.ones(64, dtype=torch.bool)), speculative_num_steps=DRAFTS - 1,
        speculative_num_draft_tokens=DRAFTS, captured_req_width=DRAFTS, _capture_ragged_verify_layout=lambda num_tokens: None,
    )
    spec_info = decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info(runner, ROWS)
    rows, requests = torch.zeros(ROWS, dtype=torch.int64), torch.ones(REQUESTS, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=REQUESTS, input_ids=rows, positions=rows, seq_lens=requests,
        seq_lens_cpu=requests, seq_lens_sum=REQUESTS, orig_seq_lens=requests, req_pool_indices=requests, out_cache_loc=rows,
        spec_algorithm=runner.model_runner.spec_algorithm, spec_info=spec_info, capture_hidden_mode=spec_info.capture_hidden_mode,
    )
    return name, batch


def test_a_captured_verify_step_is_ours(captured):
    name, batch = captured
    assert fallback_reason((4, 8), DRAFTS, batch.input_ids, batch, pp_proxy_tensors=None) is None
    assert batch.capture_hidden_mode.name == HANDED_OVER[name]
    assert (batch.spec_info.custom_mask is not None) == (name in WITH_MASK)


def test_the_self_check_makes_a_step_of_its_own_of_it(captured):
    name, batch = captured
    prefix = torch.tensor([3, 5])
    own = {
        "input_ids": torch.arange(ROWS), "positions": torch.arange(ROWS) + 3, "seq_lens": prefix, "req_pool_indices": torch.tensor([7, 9]),
        "out_cache_loc": torch.arange(ROWS) + 40,
    }
    made = sglang_state.check_batch(batch, **own, wants_hidden_states=HANDED_OVER[name] == "FULL")
    assert all(torch.equal(getattr(made, field), tensor) for field, tensor in own.items())
    assert made.capture_hidden_mode is (CaptureHiddenMode.FULL if HANDED_OVER[name] == "FULL" else CaptureHiddenMode.NULL)
    assert torch.equal(made.spec_info.draft_token, own["input_ids"]) and torch.equal(made.spec_info.positions, own["positions"])
    assert batch.spec_info.draft_token is None and batch.spec_info.positions is None, "the live step's input is left alone"
    if name in WITH_MASK:
        causal = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).tril()
        masks = [torch.cat((torch.ones(DRAFTS, length, dtype=torch.bool), causal), 1).flatten() for length in (3, 5)]
        assert torch.equal(made.spec_info.custom_mask, torch.cat(masks))
    assert fallback_reason((4, 8), DRAFTS, made.input_ids, made) is None


def test_fa3_is_among_the_backends_that_verify_blocks_without_a_mask():
    """As the stand-in above claims by its class's name."""
    assert "FlashAttentionBackend" in dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS


@pytest.mark.parametrize("key", speculation.ALGORITHMS)
def test_the_benchmarks_servers_verify_chains_of_four_on_fa3(resolve, tmp_path, key):
    target = dataclasses.replace(models.named_shape("qwen3-8b"), tied_head=False)
    model = models.write_model(tmp_path / "model", target, period=64)
    if key != "ngram":
        drafts.write_draft(tmp_path / "draft", key, target, drafts=DRAFTS, period=64)
    arguments = server.gpu_arguments(context=1400, max_batch=8, max_tokens=20000)
    arguments += ["--model-path", str(model), "--skip-tokenizer-init", *speculation.arguments(key, DRAFTS, tmp_path / "draft")]
    cfg = resolve(arguments)
    assert cfg.speculative_algorithm == speculation.ALGORITHMS[key].name
    assert (cfg.speculative_num_draft_tokens, cfg.speculative_eagle_topk, cfg.attention_backend) == (DRAFTS, 1, "fa3")
    assert not cfg.disable_overlap_schedule and cfg.cuda_graph_config.decode.bs == list(range(1, 9))
