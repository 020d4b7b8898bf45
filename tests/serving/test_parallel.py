"""Real servers whose model is split over two ranks: tokens judged by float64, every decode step in the kernel on both ranks, refusals of both together.

Each server takes a minute of two cores: `--parallel-servers` runs them.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from generate import InBackground
from one_server import LENGTHS, NEW_TOKENS, START_TIMEOUT_S, start

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerFailed, ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel, TinyMoeModel, make_tiny_model
from sgl_lowlatency.guard.family import QWEN3, QWEN3_MOE

NUM_RANKS = 2
MODELS = {
    "dense": (TinyModel(head_dim=128), QWEN3),
    "moe": (TinyMoeModel(head_dim=128, num_attention_heads=4, num_key_value_heads=2), QWEN3_MOE),
}
LAUNCH_ONE_RANK_PLANTED = Path(__file__).with_name("launch_one_rank_planted.py")
MASK_OFF_BY_ONE, LOST_TILE = 8, 39  # dialect::Planted


@pytest.fixture(autouse=True)
def asked_for(request):
    if not request.config.getoption("--parallel-servers"):
        pytest.skip("--parallel-servers runs servers of two ranks")


def make(name, folder):
    sizes, family = MODELS[name]
    make_tiny_model(folder, sizes, seed=5, family=family)
    return sizes


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_serve_what_float64_decides(name, tmp_path):
    model = tmp_path / "model"
    sizes, prompts, server = make(name, model), random.Random(5), None
    ids = lambda: [[prompts.randrange(3, sizes.vocab_size) for _ in range(length)] for length in LENGTHS]  # noqa: E731
    server = start(model, tmp_path / "server", num_ranks=NUM_RANKS)
    with running(server):
        server.wait_ready(START_TIMEOUT_S, print)
        answers = [InBackground(server.url, one, NEW_TOKENS).result() for one in ids()]
        answers += [request.result() for request in [InBackground(server.url, one, NEW_TOKENS) for one in ids()]]
        server.require_alive()
        server.request_stop()
    log, oracle = server.log_text(), GreedyOracle(model)
    for answer in answers:
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []
    for rank in range(NUM_RANKS):
        assert f", rank {rank} of {NUM_RANKS} for " in log and re.search(rf"TP{rank}\] decode_step self-check: 1 rows, .*: passed", log)
        steps, others = re.search(rf"TP{rank}\] .*coverage: decode_step ran (\d+) decode steps .*SGLang's forward ran \d+ eager steps \((.*)\)", log).groups()
        assert int(steps) >= len(LENGTHS) * (NEW_TOKENS - 1) and re.fullmatch(r"prefill: \d+", others), others


@pytest.mark.parametrize(
    ("planted", "self_check", "messages"),
    [
        (MASK_OFF_BY_ONE, "1", [r"TP{rank}\] Scheduler hit an exception.*(\n.*)*?self-check failed, the server is refused: .*rank 1: 1 rows, .* FAILED"]),
        (LOST_TILE, "0", [r"decode_step stopped: rank {rank}, ", r"decode_step stopped: rank 1, .*rank 0's part of tile \d+ of out_proj of layer 0"]),
    ],
    ids=["wrong on one rank", "hanging"],
)
def test_two_ranks_end_together(planted, self_check, messages, tmp_path):
    """A mask that is wrong on the last rank alone, whose own K and V rows of the first layer are right; words that rank 0 never sends it: rank 0 has no
    bug then, and the last rank sends all of its own. Either may give up first; the last one says whose words it missed."""
    model = tmp_path / "model"
    make("dense", model)
    setup = server_setup.server_setup(model, ("--watchdog-timeout", "10") if planted == LOST_TILE else (), NUM_RANKS)
    if "SGL_LOWLATENCY_EMULATE" not in setup.environment:
        pytest.skip("bugs are planted in host emulation only")
    launcher = LAUNCH_ONE_RANK_PLANTED if planted != LOST_TILE else LAUNCH_ONE_RANK_PLANTED.with_name("launch_planted.py")
    environment = {**setup.environment, "PLANTED_BUG": str(planted), "SGL_LOWLATENCY_SELF_CHECK": self_check}
    server = ServerProcess([*setup.arguments, server_setup.PLUGIN_FLAG], server_setup.free_port(), tmp_path / "log", environment, [str(launcher)])
    try:
        with pytest.raises(ServerFailed, match="exited with code"):
            server.wait_ready(START_TIMEOUT_S, progress=print)
    finally:
        code = server.kill()
    assert code != 0
    log = server.log_text()
    for message in messages:
        for rank in range(NUM_RANKS):
            assert re.search(message.replace("{rank}", str(rank)), log), log[-4000:]
