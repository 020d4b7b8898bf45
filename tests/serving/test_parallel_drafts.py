"""Real servers that speculate, their models split over two ranks: SGLang's own drafts, every verify step in the kernel on both, in emulation, with
cpu_speculation.py in place of what SGLang has for CUDA only.

Oracle: the forced text (benchmark/forced_text.py), in as many verify steps as it takes where drafts are right: ranks that had other drafts than each
other, or other states to draft from, would take more, or end. Each server takes minutes of two cores: `--parallel-servers` runs them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import cpu_speculation
import pytest
import torch

from benchmark import drafts, forced_text, models
from benchmark.common import deadline
from benchmark.serve import server, speculation
from benchmark.serve.client import random_prompt
from sgl_lowlatency.cli import server_setup

ROOT = Path(__file__).parents[2]
NUM_RANKS, DRAFTS, PERIOD, CONTEXT, NEW_TOKENS = 2, 4, 16, 90, 40
START_LIMIT_S = 400.0
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with GPUs has benchmark/serve/verify_ab.py --tp 2")
# key: (layers whose inputs the plugin hands over, verify steps that a text may take at most)
# The prefill makes the first token; of drafts that are all right every step makes four. NGRAM knows a text once it repeats.
ALGORITHMS = {"ngram": ([], 15 + 9), "dflash": ([2, 4, 5], 10), "eagle3": ([2, 4, 5], 10), "dspark": ([2, 4, 5], 10), "standalone": ([], 10)}
FEW = ("ngram", "dflash")  # without --all-drafts


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(algorithm) -> (the plugin's server, ready, its vocabulary); stopped afterwards, whatever happens."""
    def run(algorithm):
        shape = dataclasses.replace(models.named_shape("qwen3-tiny", 8), tied_head=False)
        model = models.write_model(tmp_path / "model", shape, period=PERIOD)
        if algorithm != "ngram":
            drafts.write_draft(tmp_path / "draft", algorithm, shape, drafts=DRAFTS, period=PERIOD)
        path = [*cpu_speculation.install(tmp_path / "stand-in"), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        arguments = server.cpu_arguments(context=CONTEXT + NEW_TOKENS + 64, max_batch=2, max_tokens=4096)
        arguments += ["--mem-fraction-static", "0.7"]  # of a machine's memory that others use, too; max_tokens bounds the pool
        arguments += speculation.arguments(algorithm, DRAFTS, tmp_path / "draft")
        environment = {**server_setup.server_setup(model, (), NUM_RANKS).environment, "TRITON_INTERPRET": "1"}
        one = server.Server("on", model, [*arguments, "--tp-size", str(NUM_RANKS), server.FLAG], work=tmp_path / "work", env=environment)
        one.wait_ready(START_LIMIT_S)
        return one, shape.vocab

    yield run
    deadline.kill_all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_verify_the_same_drafts(algorithm, start, request):
    if not request.config.getoption("--parallel-servers"):
        pytest.skip("--parallel-servers runs servers of two ranks")
    if algorithm not in FEW and not request.config.getoption("--all-drafts"):
        pytest.skip("takes minutes: --all-drafts serves it, too")
    layers, most_steps = ALGORITHMS[algorithm]
    one, vocab = start(algorithm)
    for batch in (1, 2):
        last = [PERIOD * (1 + request) for request in range(batch)]
        texts = [forced_text.text(token, NEW_TOKENS, vocab=vocab, period=PERIOD) for token in last]
        if speculation.ALGORITHMS[algorithm].copies:
            prompts = [forced_text.text(token, 6 * PERIOD, vocab=vocab, period=PERIOD)[-CONTEXT:] for token in last]
        else:
            prompts = [[*random_prompt(CONTEXT, vocab=vocab, seed=batch)[:-1], token] for token in last]
        one.client.flush()
        _, replies = one.client.timed_replies(prompts, NEW_TOKENS)
        assert [reply.ids for reply in replies] == texts
        assert all(0 < reply.verify_steps <= most_steps for reply in replies), [reply.verify_steps for reply in replies]
    assert one.stop() == 0, one.tail()
    log = one.log()
    for rank in range(NUM_RANKS):
        assert f"decode_step (verify, {DRAFTS} tokens a request), rank {rank} of {NUM_RANKS} for 8 layers" in log
        checked = re.findall(rf"TP{rank}\] decode_step self-check: verify of (\d+) rows, 4 a request, .*: passed", log)
        assert checked == ["4", "8"], log[-4000:]
        counted = rf"TP{rank}\] .*coverage: decode_step ran (\d+) verify steps .*SGLang's forward ran \d+ eager steps \((.*)\)"
        steps, others = re.search(counted, log).groups()
        assert int(steps) >= 2 * (NEW_TOKENS - 1) / DRAFTS
        assert {reason.rpartition(":")[0] for reason in others.split(", ")} <= {"prefill", "a draft model's step"}, others
        handed = re.search(rf"TP{rank}\] decode_step hands over the inputs of layers ([\d, ]+) as", log)
        assert ([int(word) for word in handed[1].split(",")] if handed else []) == layers
