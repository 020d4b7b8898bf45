"""decode_step's ranks as two and four processes over gloo and memory that they really share, in emulation: they add up to the unsharded oracle's step, and
differ and die together. What each process does: parallel_rank.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_step_cases import gate
from parallel_cases import same_streams

from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.sharding import join_outputs
from sgl_lowlatency.reference.step import StepOutputs

SCRIPT = Path(__file__).with_name("parallel_rank.py")
sys.path.insert(0, str(SCRIPT.parent))

import parallel_rank  # noqa: E402


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """What each rank says of each scenario."""
    store = tmp_path_factory.mktemp("store") / "store"
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(request.param), str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(request.param)
    ]
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, out + errors
        found.append(json.loads(out.strip().splitlines()[-1]) | {"tensors": f"{store}.{len(found)}"})
    return found


def test_processes_add_up_to_the_unsharded_oracles_steps(results):
    whole, weights = parallel_rank.WHOLE, random_weights(parallel_rank.WHOLE, parallel_rank.WEIGHTS_SEED, has_lm_head=True)
    steps = [parallel_rank.inputs_of(launch) for launch in range(3)]
    of_ranks = [[StepOutputs(**one) for one in torch.load(result["tensors"])] for result in results]
    outputs = [list(of_launch) for of_launch in zip(*of_ranks)]
    assert all(same_streams(of_launch) for of_launch in outputs)
    report = gate(whole, weights, steps, [join_outputs(whole, of_launch) for of_launch in outputs])
    assert report.passed, report
    assert [result["steps"]["executed"] for result in results] == [3] * len(results)


def test_ranks_with_other_plans_refuse_together(results):
    last = len(results) - 1
    texts = {result["other plans"].get("refused") for result in results}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("symmetric workspace: the ranks differ:") and f"rank {last} has widths [3, 5], not [3]" in text
    assert f"rank {last} has plan_hash " in text and f"rank {last} has max_rows 5, not 3" in text


def test_ranks_fall_back_together(results):
    last = len(results) - 1
    reason = f"rank {last}: a forward hook on model.norm"
    for rank, result in enumerate(results):
        *agreed, later = result["fallback"]["reasons"]
        assert agreed == [reason, reason, None, None]
        assert later is None if rank else later.startswith("decode_step: a hook that came later on this rank, after all ranks agreed to run steps of 5 rows")


def test_a_process_that_ended_is_named_by_all_others(results):
    last = len(results) - 1
    assert results[last]["dead"] == {"absent": True}
    for rank, result in enumerate(results[:last]):
        assert result["dead"]["fault"].startswith(f"decode_step stopped: rank {rank}, ")
        assert f"rank {last}'s " in result["dead"]["fault"], result["dead"]
