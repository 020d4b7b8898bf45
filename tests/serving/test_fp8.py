"""Real servers of FP8 checkpoints, on a GPU: the self-check passes, every decode step runs the kernel, tokens are near float64's best.

The block-scaled one runs SGLang's Triton matrix products. By default they are DeepGEMM's, of which SGLang runs every number of tokens up
to 16,384 of every matrix before it serves: minutes of compilation on a fresh host. The weights in memory are the same, and the kernel under
test reads nothing else of SGLang's linear layers; benchmark/serve/decode_ab.py serves beside DeepGEMM.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from one_server import NEW_TOKENS, ask, require_every_decode_step, start

from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.tiny_model import FP8_CONFIGS, make_tiny_model

START_LIMIT_S = 140.0  # from the start of both servers; on a fresh host they compile what bf16 models need too
FEW_GRAPHS = ("--cuda-graph-backend-prefill=disabled", "--cuda-graph-max-bs-decode=2")
EXTRA = {"fp8_block": ("--fp8-gemm-backend=triton",), "fp8_tensor": ()}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(time, {weights: (model, server)}): both started at once, so that each compiles while the other does."""
    folder, began = tmp_path_factory.mktemp("fp8"), time.monotonic()
    servers = {}
    try:
        for weights in FP8_CONFIGS:
            model = folder / weights
            make_tiny_model(model, seed=5, weights=weights)
            servers[weights] = model, start(model, folder / f"{weights}-server", *FEW_GRAPHS, *EXTRA[weights])
        yield began, servers
    finally:
        for _, server in servers.values():
            server.kill()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang serves FP8 weights on a GPU only")
@pytest.mark.parametrize("weights", FP8_CONFIGS)
def test_steps_run_the_kernel_and_the_self_check_passes(weights, started, progress):
    """SGLang's prefill rounds activations to FP8, so the KV that decode reads is not float64's, and rounding explains more than a bf16
    model's bound: up to three times it in a simulation of this test.
    """
    began, servers = started
    model, server = servers[weights]
    answers, log = ask(server, max(began + START_LIMIT_S - time.monotonic(), 1.0), progress)
    oracle = GreedyOracle(model)
    for answer in answers:
        choices = oracle.judge(answer.prompt_ids, answer.output_ids)
        assert len(choices) == NEW_TOKENS
        far = [choice for choice in choices if choice.gap > 4 * choice.bound]
        assert len(far) <= 1, f"far from the best of float64: {far}"
    assert re.search(r"decode_step self-check: 1 rows, .*: passed .*SGLang's own FP8 activations", log)
    require_every_decode_step(log)
