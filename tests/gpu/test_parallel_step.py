"""Tensor-parallel decode_step on the GPU with virtual ranks: the gate against the unsharded oracle, bitwise across ranks and repeats, graphs, many
launches, aborts. Apart: the instances of a rank's own GPU, a launch and a stream each, which meet in their words alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_step_cases import MIXED, gate, same_bits
from moe_cases import MoeRun, moe_gate
from parallel_cases import outputs_of, same_streams
from parallel_gpu import cut_runner, rank_runner

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.inputs import random_step, random_weights

SEED = 81
NUM_LAUNCHES = 1_000_000
LENGTHS = MIXED[3]
MOE = Geometry(2, 1024, 16, 4, 128, 0, 2048, 8192, 1e-6, False, num_experts=128, top_k=8, moe_intermediate=512, norm_topk_prob=True)


def require_passed(geometry, weights, runner, steps, apart=False, captured=()):
    outputs = [runner.run(step, apart=apart) for step in steps]
    assert all(map(same_streams, outputs))
    report = gate(geometry, weights, steps, [runner.joined(of_ranks) for of_ranks in outputs], captured=captured)
    assert report.passed, report
    return outputs


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 6, 8, 16])
def test_the_numerics_gate(rows, num_ranks, apart):
    geometry, weights, runner = cut_runner("qwen3-8b", SEED, num_ranks, (rows,), captured=(0, 1))
    require_passed(geometry, weights, runner, [random_step(geometry, LENGTHS[:rows], SEED + i, "cuda") for i in range(2)], apart, (0, 1))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "qwen3-32b", "qwen2.5-7b"])
def test_other_shapes(name):
    geometry, weights, runner = cut_runner(name, SEED, 2, (5,))
    require_passed(geometry, weights, runner, [random_step(geometry, LENGTHS[:5], SEED, "cuda")])


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_fp8_weights_of_ranks_apart(rows, weight_format):
    geometry, weights, runner = cut_runner("qwen3-8b", SEED, 2, (rows,), weight_format)
    require_passed(geometry, weights, runner, [random_step(geometry, LENGTHS[:rows], SEED, "cuda")], apart=True)


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 1), (4, 6), (2, 16)])
def test_moe_layers(num_ranks, rows, apart):
    weights = random_weights(MOE, SEED, "cuda", has_lm_head=True)
    runner, step = rank_runner(MOE, weights, num_ranks, (rows,)), random_step(MOE, LENGTHS[:rows], SEED, "cuda")
    records = [RoutingRecord.empty(runner.local, rows, runner.device) for _ in runner.steps]
    outputs = runner.run(step, records, apart)
    assert same_streams(outputs) and all(torch.equal(record.ids, records[0].ids) for record in records)
    logits = records[0].logits.cpu()
    choices = [routing.choose(of_layer, MOE.top_k, MOE.norm_topk_prob) for of_layer in logits]
    report = moe_gate(MOE, weights, [step], [MoeRun(runner.joined(outputs), logits, choices)])
    assert report.passed, report


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_bits_over_repeats_however_ranks_are_launched(num_ranks):
    geometry, _, runner = cut_runner("qwen3-8b", SEED, num_ranks, (5,))
    step = random_step(geometry, MIXED[1], SEED, "cuda")
    first = runner.run(step)
    for repeat in range(60):
        outputs = runner.run(step, apart=repeat % 2 == 1)
        assert all(same_bits(one, other) for one, other in zip(outputs, first, strict=True)), repeat


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graph_replay_gives_the_bits_of_eager(num_ranks):
    geometry, _, runner = cut_runner("qwen3-8b", SEED, num_ranks, (5,))
    step = random_step(geometry, MIXED[1], SEED, "cuda")
    eager, begun = runner.run(step), runner.begin(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            runner.launch(begun)
    for repeat in range(20):
        for _, arguments in begun:
            arguments["hidden_out"].fill_(float("nan"))
            arguments["logits"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(outputs_of(*one), other) for one, other in zip(begun, eager, strict=True)), repeat


def test_rows_change_from_launch_to_launch():
    """What a launch of many rows leaves in a copy must not be taken for the words of a later one."""
    geometry, weights, runner = cut_runner("qwen3-0.6b", SEED, 4, (1, 2, 5, 16))
    for turn, rows in enumerate((16, 1, 5, 16, 2, 2, 1, 16, 5, 1, 2) * 2):
        require_passed(geometry, weights, runner, [random_step(geometry, LENGTHS[:rows], SEED + turn, "cuda")])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_million_launches_end(num_ranks):
    """In graphs, without a pause between them; what the last one leaves is what the first one left."""
    per_graph = 500
    geometry = Geometry(1, 512, 4, 4, 128, 512, 512, 512, 1e-6, False)
    runner = rank_runner(geometry, random_weights(geometry, SEED, "cuda"), num_ranks, (1,), deadline_s=10.0)
    begun = runner.begin(random_step(geometry, [20], SEED, "cuda"))
    runner.launch(begun)
    torch.cuda.synchronize()
    first = [outputs_of(*one).hidden.clone() for one in begun]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            runner.launch(begun)
    for replay in range(NUM_LAUNCHES // per_graph):
        graph.replay()
        if replay % 100 == 99:
            torch.cuda.synchronize()
            assert runner.ranks.faults() == []
            for (_, arguments), wanted in zip(begun, first, strict=True):
                assert torch.equal(arguments["hidden_out"], wanted), replay
                arguments["hidden_out"].fill_(float("nan"))
    assert runner.steps[0].executed() == {1: NUM_LAUNCHES + 1}


def test_a_dead_rank_stops_the_others_under_their_deadline():
    script = Path(__file__).with_name("faulty_ranks.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("decode_step stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1, 2], result.stdout
    assert all("rank 3's " in line for line in lines), result.stdout
    assert any(re.search(r" waited 0\.[23]\d s for ", line) for line in lines), result.stdout
    seconds = float(re.search(r"after ([0-9.]+) s", result.stdout)[1])
    assert 0.1 < seconds < 1.0 and "trapped after " in result.stdout, result.stdout
