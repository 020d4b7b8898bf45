"""A real server of a tiny Qwen3-MoE: its tokens judged by float64, every decode step in the kernel, routing checked before it serves."""

from __future__ import annotations

import random
import re

import pytest
from generate import InBackground
from one_server import LENGTHS, NEW_TOKENS, START_TIMEOUT_S, require_every_decode_step, start
from test_planted_server import require_refusal

from sgl_lowlatency.cli.greedy_oracle import GreedyOracle
from sgl_lowlatency.cli.server_process import running
from sgl_lowlatency.cli.tiny_model import TinyMoeModel, make_tiny_model
from sgl_lowlatency.guard.family import QWEN3_MOE

SIZES = TinyMoeModel(head_dim=128, num_attention_heads=4, num_key_value_heads=2)  # heads of 128: the CUDA kernels have no others


NEXT_EXPERT = 26  # dialect::Planted


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe") / "model"
    make_tiny_model(directory, SIZES, seed=5, family=QWEN3_MOE)
    return directory


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """(answers, log): prompts of LENGTHS one after the other, then the same number at the same time; the server stopped."""
    prompts, server = random.Random(5), start(model, tmp_path_factory.mktemp("server"))
    ids = lambda: [[prompts.randrange(3, SIZES.vocab_size) for _ in range(length)] for length in LENGTHS]  # noqa: E731
    with running(server):
        server.wait_ready(START_TIMEOUT_S, print)
        answers = [InBackground(server.url, one, NEW_TOKENS).result() for one in ids()]
        answers += [request.result() for request in [InBackground(server.url, one, NEW_TOKENS) for one in ids()]]
        server.require_alive()
        server.request_stop()
    return answers, server.log_text()


def test_tokens_are_what_float64_decides(model, served):
    answers, _ = served
    oracle = GreedyOracle(model)
    for answer in answers:
        assert len(answer.output_ids) == NEW_TOKENS
        assert [choice for choice in oracle.judge(answer.prompt_ids, answer.output_ids) if not choice.is_right] == []


def test_every_decode_step_runs_the_kernel(served):
    log = served[1]
    assert f"sgl_lowlatency decode_step ({QWEN3_MOE.name})" in log
    assert "32 experts of 128, 4 a row; LM head inside" in log
    require_every_decode_step(log)
    assert re.search(r"coverage: decode_step ran .*\((1 rows: \d+.*[23] rows: \d+)\); ", log), "requests at the same time share steps"


def test_the_self_check_judged_routing(served):
    lines = re.findall(r"decode_step self-check: \d rows, .*", served[1])
    assert len(lines) >= 2
    figures = r"router_logits\.relative_l2 0\.0\d+, routing\.gap \S+, routing\.wrong_choices 0, stream\.relative_l2 0\.0\d+"
    for line in lines:
        assert re.search(rf": passed \(added\.relative_l2 .*{figures}; \d+ of \d+ choices of experts are not SGLang's; \d+\.\d experts a layer\)", line), line


def test_a_kernel_that_reads_another_expert_does_not_serve(model, tmp_path):
    require_refusal(NEXT_EXPERT, "1", r"decode_step self-check failed, the server is refused: 1 rows, .* is not within 0\.0\d+", model, tmp_path)
