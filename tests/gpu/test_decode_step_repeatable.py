"""decode_step on the GPU gives the same bits again: over repeats, under graph replay, with widths in turn, in any company."""

import pytest
import torch
from decode_step_cases import MIXED, ROWS, Runner, gate, same_bits
from decode_step_gpu import CUT, gpu_runner, require_replays_equal_eager, weights_of

from sgl_lowlatency.reference.inputs import random_step
from sgl_lowlatency.reference.step import StepOutputs, read_kv_rows

SEED = 41
NUM_REPEATS = 100


@pytest.mark.parametrize("lengths", [[1], MIXED[1], MIXED[3]], ids=len)
@pytest.mark.parametrize("name", CUT)
def test_the_same_bits_over_repeats(name, lengths):
    runner = gpu_runner(name, SEED, (len(lengths),))
    inputs = random_step(CUT[name], lengths, SEED, "cuda")
    first = runner.run(inputs)
    for repeat in range(1, NUM_REPEATS):
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"
    assert runner.kernel.executed() == {len(lengths): NUM_REPEATS}


def test_the_same_bits_beside_other_work():
    """Copies on another stream slow blocks down unevenly; nothing may depend on it."""
    name, lengths = "qwen3-8b", MIXED[1]
    runner = gpu_runner(name, SEED, (len(lengths),))
    inputs = random_step(CUT[name], lengths, SEED, "cuda")
    first = runner.run(inputs)
    noise, side = torch.empty(2, 64 * 2**20, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    for repeat in range(20):
        with torch.cuda.stream(side):
            for _ in range(8):
                noise[0].copy_(noise[1], non_blocking=True)
        assert same_bits(runner.run(inputs), first), f"repeat {repeat}"


@pytest.mark.parametrize("name", CUT)
def test_graph_replay_gives_the_bits_of_eager(name):
    """One captured step replayed on other inputs: ids, lengths, pages and pool contents change, the graph does not."""
    lengths = MIXED[1]
    runner = gpu_runner(name, SEED, (len(lengths),))
    steps = [random_step(CUT[name], order, SEED + i, "cuda") for i, order in enumerate((lengths, lengths[::-1], lengths[2:] + lengths[:2]))]
    assert require_replays_equal_eager(runner, steps) == 10 * len(steps)
    assert runner.kernel.executed() == {len(lengths): len(steps) + 30}


def test_back_to_back_replays_without_a_host_in_between():
    """Launch follows launch on the stream: generations carry over, and the last result is that of a lone launch."""
    name, lengths = "qwen3-0.6b", MIXED[0]
    runner = gpu_runner(name, SEED, (len(lengths),))
    inputs = random_step(CUT[name], lengths, SEED, "cuda")
    expected = runner.run(inputs)
    static = inputs.clone()
    hidden = torch.empty(static.rows, CUT[name].hidden, dtype=torch.bfloat16, device="cuda")
    runner.attach(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            runner.launch(static, hidden)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(StepOutputs(hidden, *read_kv_rows(static)), expected)
    assert runner.kernel.executed() == {len(lengths): 1 + 5 * 200}


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b"])
def test_widths_share_one_workspace(name):
    shared = gpu_runner(name, SEED, ROWS)
    for turn in range(2):
        for rows in ROWS:
            inputs = random_step(CUT[name], [1 + 97 * rows] * rows, SEED + turn, "cuda")
            alone = gpu_runner(name, SEED, (rows,))
            assert same_bits(shared.run(inputs), alone.run(inputs)), f"rows {rows}"
    assert shared.kernel.executed() == {rows: 2 for rows in ROWS}


@pytest.mark.parametrize("grid", [1, 7, 64])
def test_fewer_blocks_than_sms(grid):
    """Any grid that is resident is correct; the split of attention changes with it, so bits may differ, numbers not."""

    geometry = CUT["qwen3-0.6b"]
    runner = Runner(geometry, weights_of("qwen3-0.6b", SEED), (5,), grid)
    inputs = random_step(geometry, MIXED[1], SEED, "cuda")
    report = gate(geometry, runner.weights, [inputs], [runner.run(inputs)])
    assert report.passed, str(report)
