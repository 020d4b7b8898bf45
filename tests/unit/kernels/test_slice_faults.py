"""What an operator reads of a slice's launch that ended itself. Oracle: the texts."""

from types import SimpleNamespace

import pytest

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import fault

KINDS = _C.abi.kFaultKinds


def record(kind, layer=0, edge=0, expected=0, waited_ns=2_000_000_000):
    return SimpleNamespace(kind=KINDS[kind], rank=1, sm=7, block=8, layer=layer, edge=edge, expected=expected, seen=0, waited_ns=waited_ns)


@pytest.mark.parametrize(("found", "words"), [
    (record("ring_full", layer=1, edge=3), "waited 2.00 s for weights to arrive in ring stage 3 of wo_b"),
    (record("ring_empty", layer=0, edge=5), "waited 2.00 s for the consumers to free ring stage 5 of wo_a"),
    (record("partial", layer=1), "waited 2.00 s for its warps to deliver a tile of wo_b"),
    (record("edge_deadline", edge=1, expected=9), "waited 2.00 s for word 9 of coefficients, which no block has written"),
    (record("bad_position", edge=4, expected=100, waited_ns=2**64 - 2), "row 4 has position -2, outside 0..99 (the rows of the rope table)"),
])  # fmt: skip
def test_attention_out(found, words):
    text = fault.describe_attention_out_fault(found)
    assert text.startswith("attention_out stopped: rank 1, SM 7, block 8") and text.endswith(words)


def test_attention_in():
    text = fault.describe_attention_in_fault(record("partial", layer=0))
    assert text == "attention_in stopped: rank 1, SM 7, block 8 waited 2.00 s for its warps to deliver a tile of wqkv_a"
    text = fault.describe_attention_in_fault(record("bad_slot", edge=2, expected=64, waited_ns=64))
    assert text == "attention_in stopped: rank 1, SM 7, block 8: row 2 has KV slot 64, outside 0..63 (the slots of the KV pool)"
