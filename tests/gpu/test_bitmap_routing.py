"""bitmap_routing on the GPU: against the oracle, against itself over repeats and replays, and against SGLang's own kernels."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from routing_cases import hard_logits, problems, random_logits, same_weights

from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting
from sgl_lowlatency.reference import routing as oracle

SHAPES = [(64, 8), (128, 8), (160, 6), (256, 8), (384, 6), (384, 32)]


def route(logits, top_k, renormalizes=True, num_live_rows=None):
    """The Routing of logits on the GPU."""
    router = BitmapRouting(logits.shape[1], top_k, torch.device("cuda"), renormalizes)
    out = router.outputs(logits.shape[0])
    out.buffer.fill_(0x7FFFFFFF)
    live = None if num_live_rows is None else torch.tensor([num_live_rows], dtype=torch.int32, device="cuda")
    router.route(logits, out, live, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_experts", "top_k"), [*SHAPES, (1, 1), (33, 32), (60, 4), (257, 7)])
def test_every_number_of_rows(num_experts, top_k, dtype):
    for rows in range(33):
        logits = random_logits(rows, num_experts, rows, dtype).cuda()
        out = route(logits, top_k, renormalizes=rows % 2 == 0)
        assert problems(out, oracle.choose(logits, top_k, rows % 2 == 0), num_experts) == [], rows


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_experts", [40, 128, 256, 384])
def test_ties_infinities_and_nan(num_experts, dtype, renormalizes):
    _, logits = hard_logits(num_experts, dtype)
    out = route(logits.cuda(), 8, renormalizes)
    assert problems(out, oracle.choose(logits, 8, renormalizes), num_experts) == []


@pytest.mark.parametrize("num_live_rows", [0, 3, 16, 99])
def test_rows_that_pad_a_graph_choose_nothing(num_live_rows):
    logits = random_logits(16, 128, 5).cuda()
    logits[num_live_rows:] = float("nan")
    out = route(logits, 8, num_live_rows=num_live_rows)
    assert problems(out, oracle.choose(logits, 8, True, num_live_rows), 128) == []


def test_given_choices_are_placed_like_the_routers_own():
    own = route(random_logits(16, 128, 6).cuda(), 8)
    router = BitmapRouting(128, 8, torch.device("cuda"))
    out = router.outputs(16)
    router.route_ids(own.ids.clone(), own.weights.clone(), out, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(out.buffer, own.buffer)
    ids = own.ids.clone()
    ids[3] = -1
    ids[4, 1] = ids[4, 0]
    router.route_ids(ids, own.weights.clone(), out, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert problems(out, oracle.Choices(ids.long(), torch.where(ids >= 0, own.weights, 0.0).double().cpu()), 128) == []


def test_an_id_that_no_expert_has_is_named_and_traps():
    script = Path(__file__).with_name("faulty_routing.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    message = r"bitmap_routing stopped: rank 0, SM \d+, block 0: row 2 has expert 128, outside -1\.\.127 \(-1: none\)"
    assert re.search(message, result.stdout), result.stdout
    assert "trapped after " in result.stdout, result.stdout


def test_a_chain_of_early_launches_hands_every_result_on():
    """Each launch may begin before the one in front is over: the ids that one writes are the next one's input, eager and replayed."""
    router, layers = BitmapRouting(384, 8, torch.device("cuda")), 32
    logits = random_logits(16, 384, 7).cuda()
    outs = [router.outputs(16) for _ in range(layers)]

    def launch():
        stream = torch.cuda.current_stream().cuda_stream
        router.route(logits, outs[0], stream=stream)
        for before, out in zip(outs, outs[1:], strict=False):
            router.route_ids(before.ids, before.weights, out, stream=stream)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for repeat in range(20):
        logits.copy_(random_logits(16, 384, 100 + repeat))
        for out in outs:
            out.buffer.fill_(-77)
        graph.replay() if repeat % 2 else launch()
        torch.cuda.synchronize()
        assert problems(outs[0], oracle.choose(logits, 8, True), 384) == []
        assert all(torch.equal(out.buffer, outs[0].buffer) for out in outs), repeat


def sglang_alignment(ids, num_experts, block_size):
    """(tokens up to the padded total with each block's in order, experts of the blocks) of moe_align_block_size."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    tokens, experts, total = moe_align_block_size(ids, block_size, num_experts)
    blocks = tokens[: total.item()].view(-1, block_size).sort(dim=1).values
    return blocks.flatten().tolist(), experts[: blocks.shape[0]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES[:-1])
def test_the_same_as_sglangs_router_and_alignment(num_experts, top_k, renormalizes, dtype):
    """fused_topk, the router's path on CUDA, and moe_align_block_size; ids, order and experts exactly, weights to rounding."""
    pytest.importorskip("sglang")
    from sglang.srt.layers.moe.topk import fused_topk

    for rows in (1, 2, 8, 16, 32):
        logits = random_logits(rows, num_experts, rows, dtype).cuda()
        weights, ids = fused_topk(torch.empty(rows, 1, device="cuda"), logits, top_k, renormalizes)
        out = route(logits, top_k, renormalizes)
        assert torch.equal(out.ids, ids)
        choices = oracle.choose(logits, top_k, renormalizes)
        assert same_weights(out.weights.cpu(), choices.weights)
        torch.testing.assert_close(out.weights, weights, rtol=1e-5, atol=0.0)
        tokens, experts = sglang_alignment(ids, num_experts, 16)
        assert (tokens, experts) == oracle.aligned(out.ids, num_experts, 16)
        assert sorted(set(experts)) == out.experts[: out.num_active.item()].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_experts", [40, 128, 384])
def test_the_same_as_sglangs_router_on_ties_infinities_and_nan(num_experts, dtype):
    pytest.importorskip("sglang")
    from sglang.srt.layers.moe.topk import fused_topk

    names, logits = hard_logits(num_experts, dtype)
    for renormalizes in (True, False):
        weights, ids = fused_topk(torch.empty(len(names), 1, device="cuda"), logits.cuda(), 8, renormalizes)
        out = route(logits.cuda(), 8, renormalizes)
        assert [name for name, a, b in zip(names, out.ids.tolist(), ids.tolist(), strict=True) if a != b] == []
        assert torch.equal(out.weights.isnan(), weights.isnan())
        choices = oracle.choose(logits, 8, renormalizes)
        assert same_weights(out.weights.cpu(), choices.weights)


@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 8), (128, 8), (256, 8)])
def test_the_same_as_sgl_kernels_topk_softmax(num_experts, top_k):
    """The kernel of before: it ranks probabilities, so the logits here are apart by more than their rounding."""
    sgl_kernel = pytest.importorskip("sgl_kernel")
    logits = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(row)) for row in range(16)]).float().cuda() / 16
    weights, ids = torch.empty(16, top_k, device="cuda"), torch.empty(16, top_k, dtype=torch.int32, device="cuda")
    sgl_kernel.topk_softmax(weights, ids, logits, True)
    out = route(logits, top_k)
    assert torch.equal(out.ids, ids)
    choices = oracle.choose(logits, top_k, True)
    assert same_weights(out.weights.cpu(), choices.weights) and same_weights(weights.cpu(), choices.weights)
