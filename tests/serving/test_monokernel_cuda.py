"""k1 and k2 on an NVIDIA GPU in a real server, by SGLang's AMD dispatch: captured in its decode graphs, tokens judged by float64."""

from __future__ import annotations

import random
import re

import pytest
import torch
from generate import InBackground
from monokernel_on_cuda import install
from one_server import LENGTHS, NEW_TOKENS, START_TIMEOUT_S

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel, TinyMoeModel, make_tiny_model
from sgl_lowlatency.guard.family import QWEN3, QWEN3_MOE

MODELS = {"dense": (TinyModel(head_dim=128), QWEN3), "moe": (TinyMoeModel(head_dim=128, num_attention_heads=4, num_key_value_heads=2), QWEN3_MOE)}
pytestmark = pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("name", MODELS)
def test_a_server_gives_what_float64_decides(name, tmp_path):
    (sizes, family), prompts, model = MODELS[name], random.Random(5), tmp_path / "model"
    make_tiny_model(model, sizes, seed=5, family=family)
    setup = server_setup.server_setup(model, ("--cuda-graph-max-bs-decode", "4", "--cuda-graph-backend-prefill", "disabled"))
    environment = {**setup.environment, **install(tmp_path / "plugin")}
    server = ServerProcess([*setup.arguments, "--enable-amd-monokernel"], server_setup.free_port(), tmp_path / "log", environment)
    with running(server):
        server.wait_ready(START_TIMEOUT_S, print)
        ids = [[prompts.randrange(3, sizes.vocab_size) for _ in range(length)] for length in LENGTHS]
        answers = [InBackground(server.url, one, NEW_TOKENS).result() for one in ids]
        server.require_alive()
        server.request_stop()
    oracle, log = GreedyOracle(model), server.log_text()
    for answer in answers:
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []
    for rows in (1, 2, 4):
        assert re.search(rf"monokernel self-check: {rows} rows, .*: passed \(", log)
    assert "runs decode steps of batch size [1, 2, 4] (3 of 3 captured decode graphs)" in log
    steps = re.search(r"coverage: monokernel ran \d+ decode steps \(1 rows: (\d+)", log)[1]
    assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1), "replays of the graphs, counted on the device"
