"""Shares of fused_moe's routed units: all of them once, in order, and even together with the static ones. Its hand-over words. Of ranks: their
channels, their group, and faults between them in words."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fault import describe_moe_fault
from sgl_lowlatency.kernels.fused_moe import FusedMoe, rank_intermediate
from sgl_lowlatency.kernels.virtual_moe import virtual_moe_workspaces


@pytest.mark.parametrize("grid", [1, 3, 104, 132])
@pytest.mark.parametrize(("shared", "tiles"), [(144, 144), (80, 80), (7, 3), (864, 144)])
def test_routed_shares(grid, shared, tiles):
    cost = _C.abi.kMoeSharedCost
    for jobs in (0, 1, 2, 6, 35, 200):
        total = jobs * tiles
        shares = [_C.moe_routed_share(total, shared, block, grid) for block in range(grid)]
        end = 0
        for begin, count in shares:
            assert begin == end and count >= 0
            end = begin + count
        assert end == total
        work = [cost * _C.even_share(shared, block, grid)[1] + count for block, (_, count) in enumerate(shares)]
        mean = (total + cost * shared) / grid
        if mean > cost * (-(-shared // grid)) + 2:  # no block has more static work than its part
            assert max(work) - mean < 1


def test_channels_of_a_rank():
    assert [rank_intermediate(2304, 1), rank_intermediate(2304, 2)] == [2304, 1152]
    assert [rank_intermediate(2048, num_ranks) for num_ranks in (2, 4, 8)] == [1024, 512, 256]
    for num_ranks, share in ((4, "576"), (8, "288"), (5, "460.8")):
        words = f"^intermediate 2304 over {num_ranks} ranks is {share} channels a rank, not a multiple of 128 up to 2560"
        with pytest.raises(ValueError, match=words):
            rank_intermediate(2304, num_ranks)
    with pytest.raises(ValueError, match="^intermediate 8192 over 2 ranks is 4096 channels a rank, not a multiple of 128 up to 2560"):
        rank_intermediate(8192, 2)
    with pytest.raises(ValueError, match="^num_ranks 9 is outside 1..8$"):
        rank_intermediate(2304, 9)


def test_a_rank_knows_its_group_and_one_alone_has_none():
    mapped = virtual_moe_workspaces(2, 3, 256, torch.device("cpu"))

    def group_of(symmetric):
        kernel = FusedMoe(256, 128, 32, 3, 3, torch.device("cpu"), 2, 1.0, symmetric=symmetric)
        return kernel, ctypes.c_uint64.from_address(kernel._host.address + _C.abi.kFaultGroupOffset).value

    kernel, group = group_of(mapped[1])
    assert kernel._rank == 1
    assert [ctypes.c_int32.from_address(group + at).value for at in (0, 4)] == [1, 2]
    aborts = [ctypes.c_uint64.from_address(group + 8 + 8 * rank).value for rank in range(2)]
    assert aborts == [address + mapped[1].layout.abort for address in mapped[1].addresses]
    assert group_of(None)[1] == 0


def test_what_a_rank_waits_for_is_named():
    def record(kind, **fields):
        defaults = {"rank": 1, "sm": 5, "block": 6, "layer": 9, "edge": 3, "seen": 1, "waited_ns": 0}
        return SimpleNamespace(kind=_C.abi.kFaultKinds[kind], **defaults | fields)

    where, part = "fused_moe stopped: rank 1, SM 5, block 6", _C.abi.kPeerExperts << 24 | 17
    waited = record("peer_tile", expected=part, waited_ns=1_500_000_000)
    assert describe_moe_fault(waited) == f"{where} waited 1.50 s for rank 3's part of tile 17 of the experts of layer 9"
    word = 1 << 63 | 2 << 56 | 7 << 48 | 11 << 32 | _C.abi.kPeerExperts << 24 | 5
    gave_up = f"{where}: rank 2 gave up waiting for rank 7's part of tile 5 of the experts of layer 11"
    assert describe_moe_fault(record("peer_abort", edge=-1, expected=part, waited_ns=word)) == gave_up
    itself = 1 << 63 | 2 << 56 | 2 << 48 | 4 << 32 | _C.abi.kPeerNothing << 24  # the 4 is the op of a ring wait
    stopped = describe_moe_fault(record("peer_abort", expected=part, waited_ns=itself))
    assert stopped == f"{where}: rank 2 stopped by itself, while it waited for rank 3's part of tile 17 of the experts of layer 9"


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_hand_over(rows):
    """Words in the order of the struct, each section as large as its formula, those of the mix last: at DeepSeek-V4.1's sizes."""
    at, vectors = _C.moe_handover(_C.abi.MoeGeometry(5120, 2304, 384, 6), rows), 7 * rows
    sizes = {"logits": 5 * rows * 384, "choices": rows * 12, "activation": vectors * 1152, "output": vectors * 5120, "mix": 160 * rows * 28,
             "coefficients": rows * 24}  # fmt: skip
    begin = 0
    for name, size in sizes.items():
        assert getattr(at, name) == begin and begin % 4 == 0, name
        begin += size
    assert at.total_words == begin


def test_words_of_the_mix_are_named():
    fields = {"rank": 0, "sm": 1, "block": 2, "layer": 0, "expected": 56, "seen": 0, "waited_ns": 2_000_000_000}
    for edge, name in ((4, "mix"), (5, "coefficients")):
        record = SimpleNamespace(kind=_C.abi.kFaultKinds["edge_deadline"], edge=edge, **fields)
        wanted = f"fused_moe stopped: rank 0, SM 1, block 2 waited 2.00 s for word 56 of {name}, which no block has written"
        assert describe_moe_fault(record) == wanted
