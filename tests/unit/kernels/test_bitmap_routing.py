"""What the front of bitmap_routing refuses, in words, and that its outputs are views of one buffer. Values: tests/emulation."""

import re

import pytest
import torch

from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "num_experts 0 is outside 1..384"),
        ((385, 8), "num_experts 385 is outside 1..384"),
        ((128, 0), "top_k 0 is outside 1..32"),
        ((128, 33), "top_k 33 is outside 1..32"),
        ((6, 7), "top_k 7 is outside 1..6"),
    ],
)
def test_sizes_out_of_range(sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        BitmapRouting(*sizes, CPU)


def test_another_device():
    with pytest.raises(ValueError, match="^device meta is neither cuda nor cpu$"):
        BitmapRouting(128, 8, torch.device("meta"))


@pytest.mark.parametrize("rows", [-1, 33])
def test_rows_out_of_range(rows):
    with pytest.raises(ValueError, match=f"^rows {rows} is outside 0..32$"):
        BitmapRouting(128, 8, CPU).outputs(rows)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(4, 128, dtype=torch.float16), "logits: dtype torch.float16 is neither float32 nor bfloat16"),
        (torch.zeros(3, 128), "logits: shape (3, 128) is not (4, 128)"),
        (torch.zeros(4, 129), "logits: shape (4, 129) is not (4, 128)"),
        (torch.zeros(128, 4).T, "logits: strides (1, 4) are not those of contiguous rows one after the other"),
        (torch.zeros(1, 128).expand(4, 128), "logits: strides (0, 1) are not those of contiguous rows one after the other"),
        (torch.zeros(4, 128, device="meta"), "logits: device meta is not cpu"),
    ],
)
def test_logits_that_do_not_fit(logits, message):
    router = BitmapRouting(128, 8, CPU)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        router.route(logits, router.outputs(4))


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8), "ids: dtype torch.int64 is not torch.int32"),
        (torch.zeros(4, 7, dtype=torch.int32), torch.zeros(4, 8), "ids: shape (4, 7) is not (4, 8)"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.bfloat16), "weights: dtype torch.bfloat16 is not torch.float32"),
        (torch.zeros(8, 4, dtype=torch.int32).T, torch.zeros(4, 8), "ids: strides (1, 4) are not contiguous"),
    ],
)
def test_choices_that_do_not_fit(ids, weights, message):
    router = BitmapRouting(128, 8, CPU)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        router.route_ids(ids, weights, router.outputs(4))


def test_outputs_and_live_rows_that_do_not_fit():
    router, other = BitmapRouting(128, 8, CPU), BitmapRouting(256, 8, CPU)
    with pytest.raises(ValueError, match="^out: shape"):
        router.route(torch.zeros(4, 128), other.outputs(4))
    with pytest.raises(ValueError, match="^num_live_rows: dtype torch.int64 is not torch.int32$"):
        router.route(torch.zeros(4, 128), router.outputs(4), torch.tensor([4]))


@pytest.mark.parametrize("rows", [0, 1, 5, 32])
def test_outputs_are_parts_of_one_buffer_that_do_not_overlap(rows):
    out = BitmapRouting(100, 7, CPU).outputs(rows)
    parts = (out.active_words, out.num_active, out.row_bits, out.experts, out.ids, out.places, out.weights)
    assert [tuple(part.shape) for part in parts] == [(12,), (1,), (100,), (100,), (rows, 7), (rows, 7), (rows, 7)]
    out.buffer.zero_()
    for number, part in enumerate(parts):
        part.view(torch.int32).fill_(number + 1)
    for number, part in enumerate(parts):
        assert bool((part.view(torch.int32) == number + 1).all())
    assert int((out.buffer != 0).sum()) == sum(part.numel() for part in parts)
