"""Refusals of speculative decoding before the weights load: which algorithms' verify steps decode_step computes.

A verify step has the same number of draft tokens for every request. decode_step runs them as one chain: a token sees the prefix
and the drafts before it. What that leaves out (read from sglang 0.5.23):

- Trees. The mask is data on the GPU that no host decision can look at, so a setting that allows a tree is refused.
- NGRAM drafts at breadth 1 are one path a match, but where the longest match ends early the drafts are filled up with paths of
  shorter matches and with token 0, all of which start over at the first token (tests/contract/test_ngram_drafts.py). fa3, fa4 and
  trtllm_mha verify them as a chain all the same, and so does decode_step; flashinfer and triton read the tree's mask.
- EAGLE3, DFLASH and DSPARK drafts read the inputs of some layers, which decode_step hands over. How a draft is made is no matter of the
  verify step: EAGLE3's is one path at topk 1. DFLASH and DSPARK propose a block in one pass (not causal, in their own model) and verify
  it as a chain without a mask: SGLang's verify input sets topk 1 for both and builds no mask where CHAIN_BACKENDS verify
  (tests/contract/test_aux_hidden_states.py, test_verify_inputs.py). A block is --speculative-num-draft-tokens tokens: DFLASH's block size,
  DSPARK's gamma + 1.
- DSPARK verifies fewer tokens of some requests under SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept. SGLang refuses that itself: no spec
  here accepts its feature RAGGED_VERIFY. A step that is ragged all the same runs SGLang's forward (runtime/fallback.py).
- Qwen2 models name no layers for DFLASH and DSPARK to read: SGLang ends such a server, with or without decode_step.
"""

from __future__ import annotations

from typing import Any

from sgl_lowlatency import TESTED_SGLANG

READ = (
    "speculative_algorithm", "speculative_ngram_max_bfs_breadth", "speculative_eagle_topk", "speculative_adaptive",
    "enable_multi_layer_eagle", "speculative_num_draft_tokens", "attention_backend", "decode_attention_backend",
)  # server arguments
SERVED = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK")
# Attention backends that verify at all, and those of them that verify NGRAM's drafts as a chain.
CHAIN_BACKENDS = ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha")
NGRAM_BACKENDS = ("fa3", "fa4", "trtllm_mha")


def speculation_reasons(cfg: Any, *, max_rows: int) -> list[str]:
    """Why the speculative decoding that the resolved server arguments `cfg` ask for cannot be served; [] when it can, and
    without any. max_rows: rows of the widest step."""
    absent = [name for name in READ if not hasattr(cfg, name)]
    if absent:
        return [f"this SGLang has no server argument {absent[0]!r} to check; {TESTED_SGLANG} is the tested release"]
    algorithm = cfg.speculative_algorithm
    if algorithm is None:
        return []
    if algorithm not in SERVED:
        served = ", ".join(SERVED)
        return [f"--speculative-algorithm {algorithm} is not served: its verify steps have not been tested; served are {served}"]
    return _chain_reasons(cfg, algorithm) + _width_reasons(cfg, max_rows) + _backend_reasons(cfg, algorithm)


def _chain_reasons(cfg: Any, algorithm: str) -> list[str]:
    reasons = []
    if algorithm == "NGRAM":
        if cfg.speculative_ngram_max_bfs_breadth != 1:
            reasons.append(
                f"--speculative-ngram-max-bfs-breadth {cfg.speculative_ngram_max_bfs_breadth} is not 1: drafts would form a tree, "
                "and the kernel verifies a chain"
            )
    elif cfg.speculative_eagle_topk not in (None, 1):
        reasons.append(
            f"--speculative-eagle-topk {cfg.speculative_eagle_topk} is not 1: drafts would form a tree, and the kernel verifies a chain"
        )
    if cfg.speculative_adaptive:
        reasons.append("--speculative-adaptive is not served: the number of draft tokens would change while the server runs")
    if cfg.enable_multi_layer_eagle:
        reasons.append("--enable-multi-layer-eagle is not served: its verify steps have not been tested")
    return reasons


def _width_reasons(cfg: Any, max_rows: int) -> list[str]:
    tokens = cfg.speculative_num_draft_tokens
    if tokens is not None and 2 <= tokens <= max_rows:
        return []
    return [
        f"--speculative-num-draft-tokens {tokens} is not served: a verify step has 2 to {max_rows} tokens a request, and at most "
        f"{max_rows} in all"
    ]


def _backend_reasons(cfg: Any, algorithm: str) -> list[str]:
    backend = cfg.decode_attention_backend or cfg.attention_backend  # of prefill too, or guard/config.py refuses
    if backend not in CHAIN_BACKENDS:
        return [f"--attention-backend {backend} is not served with speculative decoding, only {', '.join(CHAIN_BACKENDS)}"]
    if algorithm == "NGRAM" and backend not in NGRAM_BACKENDS:
        return [
            f"--attention-backend {backend} is not served with NGRAM: it verifies a tree where the drafts' matches part; "
            f"{', '.join(NGRAM_BACKENDS)} verify a chain, as the kernel does"
        ]
    return []
