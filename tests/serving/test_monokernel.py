"""Real servers with AMD's flag on an emulated gfx950: tokens judged by float64, every decode step through k1 and k2, and a server that hangs.

By default one server of Qwen3, under the flag's old name; `--amd-servers` runs the others; `--parallel-servers` two ranks. How long: conftest.py.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from generate import InBackground
from one_server import LENGTHS, NEW_TOKENS, START_TIMEOUT_S

from sgl_lowlatency.cli import server_setup
from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import ServerFailed, ServerProcess, running
from sgl_lowlatency.cli.tiny_model import TinyModel, TinyMoeModel, make_tiny_model
from sgl_lowlatency.guard.family import QWEN3, QWEN3_MOE

FLAG, OLD_FLAG = ("--enable-amd-monokernel",), ("--monokernel-backend", "amd")
MODELS = {"dense": (TinyModel(), QWEN3), "moe": (TinyMoeModel(), QWEN3_MOE)}
LAUNCH_PLANTED = Path(__file__).with_name("launch_monokernel_planted.py")
WITHHELD_SIGNAL, LOST_TILE = 3, 39  # dialect::Planted
COVERAGE = r"coverage: monokernel ran (\d+) decode steps \(1 rows: (\d+).*\); SGLang's forward ran \d+ eager steps \((.*)\)"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="an AMD GPU is emulated on machines without a GPU only")


def needs(request, option):
    if not request.config.getoption(option):
        pytest.skip(f"{option} runs this server")


def make(name, folder):
    sizes, family = MODELS[name]
    make_tiny_model(folder, sizes, seed=5, family=family)
    return sizes


def start(model, folder, flag=FLAG, extra=(), num_ranks=1, launcher=("-m", "sglang.launch_server"), **environment):
    setup = server_setup.server_setup(model, extra, num_ranks)
    return ServerProcess([*setup.arguments, *flag], server_setup.free_port(), folder / "log", {**setup.environment, **environment}, launcher)


def require_right(name, model, folder, flag, num_ranks):
    """Answers one after the other, then two at the same time; gives the log of the server, which has stopped."""
    sizes, prompts = make(name, model), random.Random(5)
    server = start(model, folder, flag, num_ranks=num_ranks)
    with running(server):
        server.wait_ready(START_TIMEOUT_S, print)
        ids = [[prompts.randrange(3, sizes.vocab_size) for _ in range(length)] for length in (*LENGTHS, 30, 31)]
        answers = [InBackground(server.url, one, NEW_TOKENS).result() for one in ids[:-2]]
        answers += [request.result() for request in [InBackground(server.url, one, NEW_TOKENS) for one in ids[-2:]]]
        server.require_alive()
        server.request_stop()
    oracle = GreedyOracle(model)
    for answer in answers:
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []
    return server.log_text()


def require_every_decode_step(log, rank=""):
    steps, single, others = re.search(rank + r".*" + COVERAGE, log).groups()
    assert int(steps) >= int(single) >= len(LENGTHS) * (NEW_TOKENS - 1)
    assert re.fullmatch(r"prefill: \d+", others), others


@pytest.mark.parametrize(("name", "flag", "option"), [("dense", OLD_FLAG, None), ("moe", FLAG, "--amd-servers")], ids=["dense", "moe"])
def test_a_server_gives_what_float64_decides(name, flag, option, tmp_path, request):
    if option is not None:
        needs(request, option)
    log = require_right(name, tmp_path / "model", tmp_path, flag, 1)
    assert f"sgl_lowlatency monokernel ({MODELS[name][1].name}) on gfx950 runs decode steps of batch size [1, 2, 4, 6, 8, 12, 16]" in log
    assert re.search(r"monokernel self-check: 1 rows, lengths \[1, 2, 3, 63, .*: passed \(added\.relative_l2 0\.0.*stream\.relative_l2 0\.0", log)
    assert "megakernel: active" not in log
    require_every_decode_step(log)


def test_a_hanging_server_stops_within_its_deadline_and_says_where(tmp_path, request):
    needs(request, "--amd-servers")
    model = tmp_path / "model"
    make("dense", model)
    environment = {"PLANTED_BUG": str(WITHHELD_SIGNAL), "SGL_LOWLATENCY_SELF_CHECK": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    server = start(model, tmp_path, extra=("--watchdog-timeout", "10"), launcher=(str(LAUNCH_PLANTED),), **environment)
    try:
        with pytest.raises(ServerFailed, match="exited with code"):  # at SGLang's own warm-up request
            server.wait_ready(START_TIMEOUT_S, print)
    finally:
        code = server.kill()
    log = server.log_text()
    record = r"monokernel stopped: rank 0, SM \d, block \d waited (\d+\.\d+) s for word \d+ of edge 'qkv' of layer 0 \(q, k and v\)"
    assert code != 0 and "Scheduler hit an exception" in log
    waited = re.search(record, log)
    assert waited is not None, log[-3000:]
    assert 5.0 <= float(waited[1]) < 10.0, "from half of the watchdog's time on, in emulation's steps, and before the watchdog"


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_serve_what_float64_decides(name, tmp_path, request):
    needs(request, "--parallel-servers")
    log = require_right(name, tmp_path / "model", tmp_path, FLAG, 2)
    for rank in range(2):
        assert f"monokernel, rank {rank} of 2: " in log and re.search(rf"TP{rank}\] monokernel self-check: 1 rows, .*: passed", log)
        require_every_decode_step(log, rf"TP{rank}\]")


def test_two_ranks_end_together(tmp_path, request):
    """Words that rank 0 never sends to the last one."""
    needs(request, "--parallel-servers")
    model = tmp_path / "model"
    make("dense", model)
    environment = {"PLANTED_BUG": str(LOST_TILE), "SGL_LOWLATENCY_SELF_CHECK": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    server = start(model, tmp_path, extra=("--watchdog-timeout", "10"), num_ranks=2, launcher=(str(LAUNCH_PLANTED),), **environment)
    try:
        with pytest.raises(ServerFailed, match="exited with code"):
            server.wait_ready(START_TIMEOUT_S, print)
    finally:
        code = server.kill()
    log = server.log_text()
    assert code != 0
    for rank in range(2):
        assert re.search(rf"monokernel stopped: rank {rank}, ", log), log[-4000:]
    assert re.search(r"monokernel stopped: rank 1, .*rank 0's part of tile \d+ of layer 0", log), log[-4000:]
