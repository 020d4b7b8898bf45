"""attention_out on the GPU: against the oracle at DeepSeek-V4.1's sizes and at small ones, against itself over replays, and behind itself."""

import pytest
import torch
from attention_out_cases import REAL, SMALL, Layer

from sgl_lowlatency.kernels.attention_out import AttentionOutSizes

SHAPES = [
    (SMALL, 4),
    (AttentionOutSizes(128, 6, 384, 64, 2, 576), 5),
    (AttentionOutSizes(384, 8, 16, 16, 2, 64), 40),
    (AttentionOutSizes(256, 3, 64, 8, 1, 128), 1),
    (AttentionOutSizes(128, 8, 512, 64, 1, 128), 3),
]


@pytest.fixture(scope="module")
def real():
    return Layer(REAL, grid=torch.cuda.get_device_properties(0).multi_processor_count, device="cuda")


@pytest.mark.parametrize("rows", [1, 6, 8, 12, 17, 32, 48])
def test_real_shapes(real, rows):
    for seed in range(2):
        inputs = real.inputs(rows, seed)
        real.run(*inputs, stream=torch.cuda.current_stream().cuda_stream)
        assert real.problems(*inputs) == []


def test_replays_of_alternating_rows_repeat_bit_by_bit(real):
    """Each graph has two launches, the second on the streams that the first has left: overlapping ones must not read too early."""
    cases = []
    for rows in (6, 1, 48, 12):
        x, positions, streams = real.inputs(rows, 5)
        first, second, out = torch.empty_like(streams), torch.empty_like(streams), torch.empty(rows, REAL.hidden, dtype=torch.bfloat16, device="cuda")

        def launch(x=x, positions=positions, streams=streams, first=first, second=second, out=out):
            stream = torch.cuda.current_stream().cuda_stream
            real.kernel.launch(real.layer, x, positions, streams, first, out, stream=stream)
            real.kernel.launch(real.layer, x, positions, first, second, out, stream=stream)

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        inputs = (x, positions, streams, first)  # a graph keeps none of the tensors that it reads
        cases.append((graph, out, out.clone(), second, second.clone(), inputs))
        real.run(x, positions, first)
        assert real.problems(x, positions, first) == [] and torch.equal(real.out, cases[-1][2])
    for replay in range(100):
        graph, out, wanted, streams, wanted_streams, _ = cases[replay * 7 % 4]
        out.fill_(float("nan"))
        streams.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted) and torch.equal(streams, wanted_streams), replay
    assert real.kernel.fault() is None


@pytest.mark.parametrize(("sizes", "grid"), SHAPES)
def test_small_shapes(sizes, grid):
    layer = Layer(sizes, grid=grid, device="cuda")
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 48):
        inputs = layer.inputs(rows, rows, padding=8 * (rows % 3))
        layer.run(*inputs)
        assert layer.problems(*inputs) == [], rows
