"""attention_out of several ranks on one GPU: the gate against the whole layer at DeepSeek-V4.1's sizes, bitwise across ranks and repeats, graphs, many
launches, aborts. Apart: the instances of a rank's own GPU, a launch and a stream each, which meet in their words alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_out_cases import REAL, random_weights
from parallel_attention_out_cases import SPLIT, TINY, Group, Inputs, same_bits

NUM_LAUNCHES = 1_000_000
ROWS = (1, 6, 8, 12, 17, 48)


@pytest.fixture(scope="module")
def group_of():
    """Groups of the real layer by number of ranks, whose blocks share the GPU."""
    weights, groups = random_weights(REAL, "cuda"), {}

    def made(num_ranks):
        if num_ranks not in groups:
            grid = torch.cuda.get_device_properties(0).multi_processor_count // num_ranks
            groups[num_ranks] = Group(num_ranks, REAL, grid=grid, device="cuda", weights=weights)
        return groups[num_ranks]

    return made


@pytest.mark.parametrize("apart", [False, True], ids=["one launch", "apart"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_the_numerics_gate(group_of, rows, num_ranks, apart):
    group = group_of(num_ranks)
    for seed in range(2):
        inputs = Inputs(REAL, rows, seed, "cuda")
        assert group.problems(inputs, group.run(inputs, apart)) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_same_bits_over_repeats_however_ranks_are_launched(group_of, num_ranks):
    group, inputs = group_of(num_ranks), Inputs(REAL, 6, 3, "cuda")
    first = group.run(inputs)
    for repeat in range(60):
        outputs = group.run(inputs, apart=repeat % 2 == 1)
        assert all(same_bits(one, other) for one, other in zip(outputs, first, strict=True)), repeat


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replays_of_alternating_rows_repeat_bit_by_bit(group_of, num_ranks):
    """Each graph has five launches, not a multiple of the parities: replays begin with another one each, and launches overlap."""
    group, cases = group_of(num_ranks), []
    for rows in (6, 1, 48, 12):
        inputs = Inputs(REAL, rows, 4, "cuda")
        wanted, arguments = group.run(inputs), group.arguments(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                group.launch(arguments)
        cases.append((graph, arguments, wanted, inputs))  # a graph keeps none of the tensors that it reads
    for replay in range(100):
        graph, arguments, wanted, _ = cases[replay * 7 % 4]
        for its in arguments:
            its["out"].fill_(float("nan"))
            its["streams_out"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(one, other) for one, other in zip(arguments, wanted, strict=True)), replay
    assert group.virtual.faults() == []


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, TINY), (8, TINY), (4, SPLIT)])
def test_rows_change_from_launch_to_launch(num_ranks, sizes):
    group = Group(num_ranks, sizes, grid=5, device="cuda")
    for seed, rows in enumerate((16, 1, 48, 16, 2, 33, 9, 1, 16, 16, 5) * 3):
        inputs = Inputs(sizes, rows, seed, "cuda")
        assert group.problems(inputs, group.run(inputs)) == [], seed


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_million_launches_end(num_ranks):
    """In graphs, without a pause between them; what the last one leaves is what the first one left."""
    per_graph = 500
    group, inputs = Group(num_ranks, TINY, max_rows=2, grid=4, device="cuda", deadline_s=10.0), Inputs(TINY, 2, 0, "cuda")
    wanted, arguments = group.run(inputs), group.arguments(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            group.launch(arguments)
    for replay in range(NUM_LAUNCHES // per_graph):
        graph.replay()
        if replay % 100 == 99:
            torch.cuda.synchronize()
            assert group.virtual.faults() == []
            assert all(same_bits(one, other) for one, other in zip(arguments, wanted, strict=True)), replay
            for its in arguments:
                its["out"].fill_(float("nan"))


def test_a_dead_rank_stops_the_others_under_their_deadline():
    script = Path(__file__).with_name("faulty_attention_out.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("attention_out stopped: ")]
    assert [int(re.search(r"stopped: rank (\d)", line)[1]) for line in lines] == [0, 1, 2], result.stdout
    assert all(re.search(r"rank 3's part of tile \d+ of wo_b of layer 7", line) for line in lines), result.stdout
    assert any(re.search(r" waited 0\.[23]\d s for ", line) for line in lines), result.stdout
    seconds = float(re.search(r"after ([0-9.]+) s", result.stdout)[1])
    assert 0.1 < seconds < 1.0 and "trapped after " in result.stdout, result.stdout
