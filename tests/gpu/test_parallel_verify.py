"""Verify steps of tensor-parallel decode_step on the GPU: the instances of a rank's own GPU, a launch and a stream each, whose workspaces are one
memory. The gate against the unsharded oracle, captured streams included, bitwise across ranks and repeats, graphs, a dead rank. One launch of all
virtual ranks has instances of decode steps alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_step_cases import gate, same_bits
from moe_cases import MoeRun, moe_gate
from parallel_cases import outputs_of, same_streams
from parallel_gpu import cut_runner, rank_runner

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.inputs import random_step, random_weights

SEED = 83
CAPTURED = (0, 1)
CHAINS = [(2, [1000, 0, 63]), (4, [65]), (4, [1000, 0, 63, 300]), (8, [4000, 15]), (16, [17])]  # rows of a request, prefixes
MOE = Geometry(2, 1024, 16, 4, 128, 0, 2048, 8192, 1e-6, False, num_experts=128, top_k=8, moe_intermediate=512, norm_topk_prob=True)


def case_of(name, num_ranks, rows_per_request, prefixes, **options):
    """(geometry, weights, runner, step) of one number of rows."""
    rows = rows_per_request * len(prefixes)
    geometry, weights, runner = cut_runner(name, SEED, num_ranks, (rows,), rows_per_request={rows: rows_per_request}, **options)
    return geometry, weights, runner, random_step(geometry, prefixes, SEED, "cuda", rows_per_request=rows_per_request, lengths_are_prefix=True)


def require_passed(geometry, weights, runner, step, captured=()):
    outputs = runner.run(step, apart=True)
    assert same_streams(outputs)
    report = gate(geometry, weights, [step], [runner.joined(outputs)], captured=captured)
    assert report.passed, report
    return outputs


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("rows_per_request", "prefixes"), CHAINS)
def test_the_numerics_gate(rows_per_request, prefixes, num_ranks):
    require_passed(*case_of("qwen3-8b", num_ranks, rows_per_request, prefixes, captured=CAPTURED), captured=CAPTURED)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "qwen3-32b", "qwen2.5-7b"])
def test_other_shapes(name):
    require_passed(*case_of(name, 2, 4, [65, 0]))


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize(("rows_per_request", "prefixes"), [CHAINS[1], CHAINS[2]])
def test_fp8_weights(rows_per_request, prefixes, weight_format):
    require_passed(*case_of("qwen3-8b", 2, rows_per_request, prefixes, weight_format=weight_format, captured=CAPTURED), captured=CAPTURED)


@pytest.mark.parametrize(("num_ranks", "rows_per_request", "prefixes"), [(2, 4, [65]), (4, 3, [300, 0]), (2, 4, [1000, 0, 63, 300])])
def test_moe_layers(num_ranks, rows_per_request, prefixes):
    weights, rows = random_weights(MOE, SEED, "cuda", has_lm_head=True), rows_per_request * len(prefixes)
    runner = rank_runner(MOE, weights, num_ranks, (rows,), rows_per_request={rows: rows_per_request})
    step = random_step(MOE, prefixes, SEED, "cuda", rows_per_request=rows_per_request, lengths_are_prefix=True)
    records = [RoutingRecord.empty(runner.local, rows, runner.device) for _ in runner.steps]
    outputs = runner.run(step, records, apart=True)
    assert same_streams(outputs) and all(torch.equal(record.ids, records[0].ids) for record in records)
    logits = records[0].logits.cpu()
    choices = [routing.choose(of_layer, MOE.top_k, MOE.norm_topk_prob) for of_layer in logits]
    report = moe_gate(MOE, weights, [step], [MoeRun(runner.joined(outputs), logits, choices)])
    assert report.passed, report


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_bits_over_repeats(num_ranks):
    _, _, runner, step = case_of("qwen3-8b", num_ranks, 4, [1000, 0, 63, 300], captured=CAPTURED)
    first = runner.run(step, apart=True)
    for repeat in range(60):
        assert all(map(same_bits, runner.run(step, apart=True), first)), repeat


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graph_replay_gives_the_bits_of_eager(num_ranks):
    """A graph a rank, replayed on a stream of its own."""
    _, _, runner, step = case_of("qwen3-8b", num_ranks, 4, [65, 0], captured=CAPTURED)
    eager, begun, graphs = runner.run(step, apart=True), runner.begin(step), []
    for one, (_, arguments) in zip(runner.steps, begun, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(3):
                one.launch(**arguments, stream=torch.cuda.current_stream().cuda_stream)
    for repeat in range(20):
        for _, arguments in begun:
            for name in ("hidden_out", "logits", "aux_out"):
                arguments[name].fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, own in zip(graphs, runner.streams, strict=True):
            with torch.cuda.stream(own):
                graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(outputs_of(*one), other) for one, other in zip(begun, eager, strict=True)), repeat


def test_decode_and_verify_steps_in_turn():
    """Plans of both, over the same workspaces."""
    chains = {1: 1, 16: 4, 8: 8, 5: 1}
    geometry, weights, runner = cut_runner("qwen3-0.6b", SEED, 2, tuple(chains), rows_per_request=chains)
    for turn, rows in enumerate((16, 1, 8, 5, 8, 16) * 2):
        prefixes = [40 * turn + i for i in range(rows // chains[rows])]
        step = random_step(geometry, prefixes, SEED + turn, "cuda", rows_per_request=chains[rows], lengths_are_prefix=True)
        require_passed(geometry, weights, runner, step)


def test_one_launch_of_all_virtual_ranks_is_refused():
    _, _, runner, step = case_of("qwen3-0.6b", 2, 4, [65])
    with pytest.raises(ValueError, match="^decode_step: a verify step of virtual ranks, all of them in one launch, has no kernel on CUDA$"):
        runner.run(step)


def test_a_dead_rank_stops_the_others_under_their_deadline():
    script = Path(__file__).with_name("faulty_ranks.py")
    result = subprocess.run([sys.executable, script, "verify"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("decode_step stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1, 2], result.stdout
    assert all("rank 3's " in line for line in lines), result.stdout
