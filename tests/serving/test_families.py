"""A real server of every other family than the pair's: its tokens judged by float64, every decode step in the kernel."""

from __future__ import annotations

import random
import re

import pytest
from generate import generate

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel, make_tiny_model
from sgl_lowlatency.guard.family import LLAMA, QWEN2

START_TIMEOUT_S = 300.0
LENGTHS, NEW_TOKENS = (1, 63, 130), 12


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=lambda family: family.name)
def test_tokens_are_what_float64_decides(family, tmp_path):
    model = tmp_path / "model"
    make_tiny_model(model, family=family, seed=5)
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
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []
    log = server.log_text()
    assert f"sgl_lowlatency decode_step ({family.name})" in log
    # SGLang's own warm-up request adds steps; what is not in the kernel is prefill
    steps, others = re.search(r"coverage: decode_step ran (\d+) decode steps .*SGLang's forward ran \d+ eager steps \((.*)\)", log).groups()
    assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1)
    assert re.fullmatch(r"prefill: \d+", others), others
