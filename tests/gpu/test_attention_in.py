"""attention_in on the GPU: against the oracle at DeepSeek-V4.1's sizes and at small ones, and against itself over replays."""

import pytest
import torch
from attention_in_cases import POISON, REAL, SMALL, Layer, empty_cache

from sgl_lowlatency.kernels.attention_in import AttentionInSizes

SHAPES = [
    (SMALL, 4),
    (AttentionInSizes(1280, 384, 1), 5),
    (AttentionInSizes(128, 128, 1), 40),
    (AttentionInSizes(256, 256, 1), 1),
    (AttentionInSizes(128, 1408, 3), 7),
    (AttentionInSizes(5120, 128, 1), 132),
]


@pytest.fixture(scope="module")
def real():
    return Layer(REAL, grid=torch.cuda.get_device_properties(0).multi_processor_count, device="cuda")


@pytest.mark.parametrize("rows", [1, 6, 8, 12, 17, 32, 48])
def test_real_shapes(real, rows):
    for seed in range(2):
        inputs = real.inputs(rows, seed, has_pre=seed == 0)
        real.run(*inputs, stream=torch.cuda.current_stream().cuda_stream)
        assert real.problems(*inputs) == []


def test_replays_of_alternating_rows_repeat_bit_by_bit(real):
    """Each graph has two launches in a row, which overlap."""
    cases = []
    for rows in (6, 1, 48, 12):
        inputs = real.inputs(rows, 5)
        real.run(*inputs)
        first, pages = (real.x, real.q_lora, real.q), real.cache.pages
        again, cache = [torch.empty_like(t) for t in first], empty_cache("cuda")

        def launch(inputs=inputs, cache=cache, again=again):
            for _ in range(2):
                real.kernel.launch(real.layer, *inputs, cache, *again, stream=torch.cuda.current_stream().cuda_stream)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        cases.append((graph, again, first, cache.pages, pages, inputs))  # a graph keeps none of the tensors that it reads
    for replay in range(100):
        graph, again, first, pages, wanted, _ = cases[replay * 7 % 4]
        for t in again:
            t.fill_(float("nan"))
        pages.fill_(POISON)
        graph.replay()
        assert all(map(torch.equal, again, first)) and torch.equal(pages, wanted), replay
    assert real.kernel.fault() is None


@pytest.mark.parametrize(("sizes", "grid"), SHAPES)
def test_small_shapes(sizes, grid):
    layer = Layer(sizes, grid=grid, device="cuda")
    for rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 48):
        inputs = layer.inputs(rows, rows)
        inputs[3][rows // 2] = -1
        layer.run(*inputs, padding=8 * (rows % 3))
        assert layer.problems(*inputs) == [], rows
