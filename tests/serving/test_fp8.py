"""A real server of FP8 checkpoints, on a GPU: the self-check passes, every decode step runs the kernel, tokens are near float64's best."""

from __future__ import annotations

import random
import re

import pytest
import torch
from generate import generate

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerProcess, running
from sgl_lowlatency.cli.tiny_model import FP8_CONFIGS, TinyModel, make_tiny_model

START_TIMEOUT_S = 300.0
LENGTHS, NEW_TOKENS = (1, 63, 130), 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang serves FP8 weights on a GPU only")
@pytest.mark.parametrize("weights", FP8_CONFIGS)
def test_steps_run_the_kernel_and_the_self_check_passes(weights, tmp_path):
    """SGLang's prefill rounds activations to FP8, so the KV that decode reads is not float64's, and rounding explains more than a bf16
    model's bound: up to three times it in a simulation of this test.
    """
    model = tmp_path / "model"
    make_tiny_model(model, seed=5, weights=weights)
    setup, prompts = server_setup.server_setup(model), random.Random(5)
    server = ServerProcess([*setup.arguments, server_setup.PLUGIN_FLAG], server_setup.free_port(), tmp_path / "log", setup.environment)
    with running(server):
        server.wait_ready(START_TIMEOUT_S, progress=print)
        prompt_ids = [[prompts.randrange(3, TinyModel.vocab_size) for _ in range(length)] for length in LENGTHS]
        answers = [generate(server.url, ids, NEW_TOKENS) for ids in prompt_ids]
        server.require_alive()
        server.request_stop()
    oracle = GreedyOracle(model)
    for answer in answers:
        choices = oracle.judge(answer.prompt_ids, answer.output_ids)
        assert len(choices) == NEW_TOKENS
        far = [choice for choice in choices if choice.gap > 4 * choice.bound]
        assert len(far) <= 1, f"far from the best of float64: {far}"
    log = server.log_text()
    assert re.search(r"decode_step self-check: 1 rows, .*: passed .*SGLang's own FP8 activations", log)
    steps, others = re.search(r"coverage: decode_step ran (\d+) steps .*SGLang's forward ran \d+ eager steps \((.*)\)", log).groups()
    assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1)
    assert re.fullmatch(r"prefill: \d+", others), others
