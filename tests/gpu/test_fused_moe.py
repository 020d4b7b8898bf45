"""fused_moe on the GPU: against the oracle at DeepSeek-V4.1's sizes and at small ones, against itself over replays."""

import os

import pytest
import torch
from fused_moe_cases import Moe

SHAPES = [  # hidden, intermediate, experts, top_k, grid
    (256, 128, 32, 3, 4),
    (1280, 384, 48, 6, 5),
    (128, 640, 16, 2, 40),
    (384, 128, 96, 1, 1),
    (5120, 256, 16, 2, 2),
    (128, 2304, 16, 2, 3),
    (5120, 384, 128, 3, 132),  # a DSpark stage's experts
]


def num_sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.fixture(scope="module")
def real():
    """hidden 5120, 384 experts of 2304, top 6: 7.2 GB."""
    return Moe(5120, 2304, 384, 6, grid=num_sms(), device="cuda", alt=True)


@pytest.mark.parametrize("rows", [1, 6, 12, 48])
def test_real_shapes(real, rows):
    for seed in range(2 if rows < 12 else 1):
        x, token_ids = real.inputs(rows, seed)
        real.run(x, token_ids, stream=torch.cuda.current_stream().cuda_stream)
        assert real.problems(x, token_ids) == []


@pytest.mark.parametrize("rows", [1, 6, 12, 48])
def test_real_shapes_with_mix_and_post(real, rows):
    """Coefficients, streams and output; the output is the bits of a launch without streams, which follows on the same workspace."""
    for seed in range(2 if rows < 12 else 1):
        (x, token_ids), streams = real.inputs(rows, seed), real.streams(rows, seed)
        real.run(x, token_ids, stream=torch.cuda.current_stream().cuda_stream, streams=streams)
        assert real.problems(x, token_ids, streams=streams) == []
        out, post = real.out, real.post
        real.run(x, token_ids)
        assert torch.equal(real.out, out)
        real.run(x, token_ids, streams=streams)
        assert all(torch.equal(real.post[name], post[name]) for name in post)


def test_replays_with_mix_and_post_repeat_bit_by_bit(real):
    """Each graph has three launches: one, one on the streams that it has left, which overlapping ones must not read too early, and one without."""
    cases = []
    for rows in (6, 1, 48, 12):
        (x, token_ids), streams = real.inputs(rows, 5), real.streams(rows, 5)
        first, second, out = torch.empty_like(streams), torch.empty_like(streams), torch.empty_like(x)

        def launch(x=x, token_ids=token_ids, streams=streams, first=first, second=second, out=out):
            stream = torch.cuda.current_stream().cuda_stream
            real.kernel.launch(real.layer, x, None, token_ids, stream=stream, streams=streams, streams_out=first)
            real.kernel.launch(real.layer, x, None, token_ids, stream=stream, streams=first, streams_out=second)
            real.kernel.launch(real.layer, x, out, token_ids, stream=stream)

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        inputs = (x, token_ids, streams, first)  # a graph keeps none of the tensors that it reads
        cases.append((graph, out, out.clone(), second, second.clone(), inputs))
        real.run(x, token_ids, streams=first)
        assert real.problems(x, token_ids, streams=first) == [] and torch.equal(real.post["streams_out"], cases[-1][4])
    for replay in range(100):
        graph, out, wanted, behind, wanted_behind, _ = cases[replay * 7 % 4]
        out.fill_(float("nan"))
        behind.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted) and torch.equal(behind, wanted_behind), replay
    assert real.kernel.fault() is None


def test_replays_of_alternating_rows_repeat_bit_by_bit(real):
    cases = []
    for rows in (6, 1, 48, 12):
        x, token_ids = real.inputs(rows, 5)
        real.run(x, token_ids)
        out, first = torch.empty_like(real.out), real.out
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            real.kernel.launch(real.layer, x, out, token_ids, stream=torch.cuda.current_stream().cuda_stream)
        cases.append((graph, out, first, x, token_ids))
    for replay in range(100):
        graph, out, first, *_ = cases[replay * 7 % 4]
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first), replay
    assert real.kernel.fault() is None


@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k", "grid"), SHAPES)
def test_small_shapes(hidden, intermediate, num_experts, top_k, grid):
    moe = Moe(hidden, intermediate, num_experts, top_k, grid=grid, device="cuda")
    for rows in (1, 2, 7, 8, 9, 16, 31, 33, 48):
        x, _ = moe.inputs(rows, rows)
        moe.run(x, None, rows - 1)
        assert moe.problems(x, None, rows - 1) == [], rows


@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k", "grid"), SHAPES)
def test_small_shapes_with_mix_and_post(hidden, intermediate, num_experts, top_k, grid):
    moe = Moe(hidden, intermediate, num_experts, top_k, grid=grid, device="cuda")
    for rows in (1, 2, 7, 8, 9, 16, 31, 33, 48):
        x, streams = moe.inputs(rows, rows)[0], moe.streams(rows, rows)
        moe.run(x, None, rows - 1, streams=streams)
        assert moe.problems(x, None, rows - 1, streams) == [], rows


def test_every_row_takes_the_same_experts():
    moe = Moe(device="cuda", grid=7)
    moe.weights.bias[[3, 17, 30]] += 100.0
    x, _ = moe.inputs(48)
    moe.run(x)
    assert moe.problems(x) == []
    assert {tuple(sorted(ids)) for ids in moe.record.ids.tolist()} == {(3, 17, 30)}


def test_the_layout_is_flashinfers():
    """Its own interleave on the device, where the module is there as a file: it would compile for an hour."""
    env = pytest.importorskip("flashinfer.jit.env")
    if not os.path.exists(os.path.join(str(env.FLASHINFER_AOT_DIR), "fused_moe_90", "fused_moe_90.so")):
        pytest.skip("flashinfer's fused_moe_90 is not built")
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm

    from sgl_lowlatency.reference import fused_moe_layout as layout

    codes = torch.randint(0, 16, (3, 64, 256), dtype=torch.uint8, device="cuda")
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    assert torch.equal(layout.interleave_weights(codes), interleave_moe_weights_for_sm90_mixed_gemm(packed, "fp4"))
