"""draft_sampler's ranks as processes over gloo and memory that they really share, in emulation: the proposals of SGLang's sharded steps, and ranks
that differ, keep SGLang's proposal, miss the self-check and die together. What each process does: draft_rank.py. Where a GPU is, the same on it: -k
cuda.

Oracle: SGLang's draft sampler on the same ranks, which gathers logits and candidates over gloo.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("draft_rank.py")


def pytest_generate_tests(metafunc):
    if "results" in metafunc.fixturenames:
        sizes = (2, 4) if metafunc.config.getoption("--draft-ranks") else (2,)
        cases = [("cpu", size) for size in sizes] + [("cuda", 2)] * torch.cuda.is_available()
        metafunc.parametrize("results", cases, indirect=True, scope="module", ids=[f"{device}-{size}" for device, size in cases])


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What each rank says of each scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    device, size = request.param
    done = subprocess.run([sys.executable, str(SCRIPT), str(size), str(folder), device], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
def test_every_rank_drafts_the_tokens_of_sglangs_ranks(results, kind):
    for rank, result in enumerate(results):
        got = result[kind]
        assert "error" not in got, got
        assert got["tokens"] == got["wanted"] == results[0][kind]["wanted"], rank
        assert [len(tokens) for tokens in got["tokens"]] == [15, 5, 10, 15]
        assert len({token for tokens in got["tokens"] for token in tokens}) > 10, "rows that all draw one token would prove nothing"
        assert got["same logits"] == ([True] * 8 if kind == "sampled" else [])
        assert got["offset"] == (4 if kind == "sampled" else 0)


def test_where_one_rank_keeps_sglangs_proposal_all_do(results):
    assert [result["keeps"].get("served") for result in results] == [[]] * len(results)


def test_a_miss_of_one_rank_refuses_all(results):
    if "planted" not in results[0]:
        pytest.skip("host emulation alone has planted bugs")
    last = len(results) - 1
    (text,) = {result["planted"].get("error") for result in results}
    first, *misses = text.split("\n  - ")
    assert first == "RuntimeError: draft_sampler self-check failed, the server is refused:"
    of_logits = [miss for miss in misses if "step logits: row" in miss]  # a rank compares its own columns; a greedy token is every rank's matter
    assert of_logits and all(miss.startswith(f"rank {last}: ") for miss in of_logits)
    assert any("step 1: step logits: row " in miss for miss in of_logits)


def test_ranks_with_other_step_logits_are_named_by_all(results):
    last = len(results) - 1
    (text,) = {result["other copies"].get("error") for result in results}
    for rank in range(len(results)):
        assert f"rank {rank}: 1 requests: ranks [{last}] have other step logits than rank 0" in text


def test_ranks_with_other_sizes_refuse_together(results):
    last = len(results) - 1
    (text,) = {result["other gamma"].get("error") for result in results}
    assert text.startswith("DisagreementError: symmetric workspace: the ranks differ:")
    assert f"rank {last} has gamma 4, not 5" in text and f"rank {last} has bytes " in text


def test_a_process_that_ended_is_named_by_all_others_within_the_deadline(results):
    last = len(results) - 1
    assert results[last]["dead"]["absent"]
    for rank, result in enumerate(results[:last]):
        text = result["dead"]["error"]
        assert text.startswith(f"DraftSamplerFault: draft_sampler stopped: rank {rank}, SM ") and " waited 2." in text
        assert f"of rank {last} to answer in step 0 for request " in text
