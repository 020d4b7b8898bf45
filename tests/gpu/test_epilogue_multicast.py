"""epilogue_multicast on the GPU with virtual ranks: against the unsharded oracle, bitwise across ranks and repeats, many launches, aborts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from epilogue_gpu import VirtualGroup

from sgl_lowlatency.reference.gate import figure

NUM_LAUNCHES = 1_000_000
SHAPES = [(4096, 4096), (5120, 8192), (1024, 2048), (2064, 512), (8192, 8192)]


@pytest.mark.parametrize(("num_ranks", "own_streams"), [(2, False), (4, False), (8, False), (2, True), (4, True)])
@pytest.mark.parametrize(("hidden", "k"), SHAPES)
def test_the_numerics_gate(hidden, k, num_ranks, own_streams):
    """At most twice as far from float64 as a bf16 model's all-reduce, for every number of rows, fresh inputs each."""
    group = VirtualGroup(num_ranks, 1, hidden, k, own_streams=own_streams)
    for rows in range(1, 17):
        group.set_inputs(rows, seed=rows)
        group.launch(layer=rows)
        torch.cuda.synchronize()
        for name, ours, standard, oracle in zip(("sum", "normed"), group_outputs(group), group.standard(), group.oracle(), strict=True):
            result = figure(f"{name}, {rows} rows", ours, standard, oracle)
            assert result.passed, str(result)
        assert_ranks_agree(group)


def group_outputs(group):
    return group.tensors[0].sum, group.tensors[0].normed


def assert_ranks_agree(group):
    for one in group.tensors[1:]:
        assert torch.equal(one.sum, group.tensors[0].sum) and torch.equal(one.normed, group.tensors[0].normed)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_run_apart_give_the_same_bits(num_ranks):
    """Each on a stream of its own, for 20 launches in a row: they meet in their words alone. What is left is that of one launch of all."""
    group, apart = VirtualGroup(num_ranks, 8, 4096, 4096), VirtualGroup(num_ranks, 8, 4096, 4096, own_streams=True)
    group.launch()
    for repeat in range(50):
        apart.poison()
        apart.launch(repeat, count=20)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(group_outputs(group), group_outputs(apart), strict=True)), repeat
        assert_ranks_agree(apart)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_repeats_give_the_same_bits_eager_and_replayed(num_ranks):
    group = VirtualGroup(num_ranks, 8, 4096, 4096)
    group.launch()
    torch.cuda.synchronize()
    first = [tensor.clone() for tensor in group_outputs(group)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(5):  # not a multiple of the parities: replays begin with another one each
            group.launch(layer)
    for repeat in range(50):
        group.poison()
        graph.replay() if repeat % 2 else group.launch()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, group_outputs(group), strict=True)), repeat
        assert_ranks_agree(group)


def test_rows_change_from_launch_to_launch():
    """What a launch of many rows leaves in a parity must not be taken for the words of a later one."""
    group = VirtualGroup(4, 1, 1024, 1024)
    for seed, rows in enumerate([16, 1, 3, 16, 2, 2, 9, 1, 16, 16, 5] * 3):
        group.set_inputs(rows, seed)
        group.launch()
        torch.cuda.synchronize()
        result = figure(f"launch {seed}, {rows} rows", group.tensors[0].normed, group.standard()[1], group.oracle()[1])
        assert result.passed, str(result)
        assert_ranks_agree(group)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_million_launches_end(num_ranks):
    """Kernels, two a launch, in graphs, without a pause between them; what the last one leaves is what the first one left."""
    per_graph, rows = 500, 6
    group = VirtualGroup(num_ranks, rows, 1024, 512, deadline_s=10.0)
    group.launch()
    torch.cuda.synchronize()
    first = [tensor.clone() for tensor in group_outputs(group)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(per_graph):
            group.launch(layer)
    for replay in range(NUM_LAUNCHES // 2 // per_graph):
        graph.replay()
        if replay % 100 == 99:
            torch.cuda.synchronize()
            assert group.steps[0].faults() == []
            assert_ranks_agree(group)
            assert all(torch.equal(a, b) for a, b in zip(first, group_outputs(group), strict=True)), replay
            group.poison()
    torch.cuda.synchronize()


def test_a_dead_rank_stops_the_others_under_their_deadline():
    script = Path(__file__).with_name("faulty_peers.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("epilogue_multicast stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1, 2], result.stdout
    assert all(re.search(r"rank 3's part of tile \d+ of layer 7", line) for line in lines), result.stdout
    assert any(re.search(r" waited 0\.[23]\d s for ", line) for line in lines), result.stdout
    seconds = float(re.search(r"after ([0-9.]+) s", result.stdout)[1])
    assert 0.1 < seconds < 1.0 and "trapped after " in result.stdout, result.stdout
