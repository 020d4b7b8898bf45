"""What the front of epilogue_multicast refuses, how it fits shared memory, and faults in words. Values: tests/emulation."""

import dataclasses
import functools

import pytest
import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.epilogue_multicast import SHARED_MEMORY_BYTES, EpilogueMulticast, RankTensors
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.symmetric_workspace import symmetric_layout, virtual_workspaces

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def zeros(*shape):
    return torch.zeros(*shape, dtype=BF16)


def step(hidden=64, k=128, ranks=2, **options):
    options = {"blocks_per_rank": 1, "deadline_s": 1.0, "virtual_ranks": ranks, **options}
    return EpilogueMulticast([zeros(hidden, k) for _ in range(ranks)], zeros(hidden), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 96}, "K 96 is not a multiple of 64"),
        ({"hidden": 40}, "hidden 40 is not a multiple of 16 up to 8192"),
        ({"hidden": 8208}, "hidden 8208 is not a multiple of 16 up to 8192"),
        ({"virtual_ranks": 3}, "2 weights are not those of 3 ranks"),
        ({"virtual_ranks": 0}, "it takes either workspaces or virtual_ranks"),
        ({"ranks": 9}, "9 weights are not those of 1..8 ranks"),
        ({"max_rows": 17}, "max_rows 17 is outside 1..16"),
        ({"live_ranks": 3}, "live_ranks 3 is outside 1..2"),
        ({"blocks_per_rank": 0}, "blocks_per_rank 0 is out of range"),
    ],
)
def test_sizes_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        step(**options)


def test_workspaces_of_another_size_or_group_are_refused():
    mapped = virtual_workspaces(2, 4, 64, CPU)
    with pytest.raises(ValueError, match="^the workspaces have hidden 64, the weights 80$"):
        step(hidden=80, virtual_ranks=0, workspaces=mapped)
    with pytest.raises(ValueError, match="^2 ranks from 1 on are not among the 2$"):
        step(virtual_ranks=0, workspaces=dataclasses.replace(mapped, rank=1))


def test_tensors_that_do_not_fit_are_named():
    two = [RankTensors(zeros(3, 128), *(zeros(3, 64) for _ in range(3))) for _ in range(2)]
    with pytest.raises(ValueError, match="^1 ranks' tensors are not those of 2$"):
        step().params(two[:1])
    with pytest.raises(ValueError, match=r"^rows 3 is outside 1\.\.2$"):
        step(max_rows=2).params(two)
    with pytest.raises(ValueError, match="residual of rank 1"):
        step().params([two[0], dataclasses.replace(two[1], residual=zeros(3, 80))])
    with pytest.raises(ValueError, match="normed of rank 0"):
        step().params([dataclasses.replace(two[0], normed=torch.zeros(3, 64)), two[1]])


@pytest.mark.parametrize(("rows", "k", "panel"), [(1, 12288, 12288), (16, 4096, 4096), (16, 6144, 4096), (8, 12288, 9216)])
def test_the_panel_is_the_largest_that_shared_memory_holds(rows, k, panel):
    """All of K, or stages of 512 of it beside a sum for each of a block's tiles."""
    one = step(hidden=64, k=k, ranks=1, blocks_per_rank=2)
    k_panel, accumulators, panel_bytes, shared = one._panel(rows, 2)
    assert k_panel == panel and accumulators == (0 if panel == k else 2)
    assert panel_bytes == rows * (k_panel * 2 + 16) and shared.total_bytes <= SHARED_MEMORY_BYTES
    if panel < k:
        more = _C.smem_layout(rows, rows * ((k_panel + 512) * 2 + 16), 2, 4)
        assert more.total_bytes > SHARED_MEMORY_BYTES


def test_layout_of_a_workspace():
    at = symmetric_layout(4, 6, 64)
    assert (at.rendezvous, at.abort, at.state) == (0, 128, 256)
    assert at.tiles == 256 + _C.abi.kSymmetricStateBytes and at.tiles % 128 == 0
    assert at.parity_bytes == 4 * 6 * 64 * 4 and at.total_bytes == at.tiles + 3 * at.parity_bytes


@dataclasses.dataclass
class Record:
    kind: int
    rank: int = 1
    sm: int = 5
    block: int = 6
    layer: int = 9
    edge: int = 3
    expected: int = 17
    seen: int = 2
    waited_ns: int = 0


def test_faults_say_who_waited_for_whom():
    kinds = _C.abi.kFaultKinds
    where = "epilogue_multicast stopped: rank 1, SM 5, block 6"
    words = functools.partial(describe_fault, kernel="epilogue_multicast")
    assert words(Record(kinds["peer_tile"], waited_ns=1_500_000_000)) == f"{where} waited 1.50 s for rank 3's part of tile 17 of layer 9"
    word = 1 << 63 | 2 << 56 | 7 << 48 | 11 << 32 | 123456
    reason = "rank 2 gave up waiting for rank 7's part of tile 123456 of layer 11"
    assert _C.abort_reason(word) == (2, 7, 11, 123456, _C.abi.kPeerTiles)
    assert words(Record(kinds["peer_abort"], waited_ns=word)) == f"{where}: {reason}, while it waited for rank 3's part of tile 17 of layer 9"
    assert words(Record(kinds["peer_abort"], edge=-1, waited_ns=word)) == f"{where}: {reason}"


def test_a_ring_that_stalls_is_epilogue_multicasts():
    record = Record(_C.abi.kFaultKinds["ring_full"], waited_ns=2_000_000_000)
    expected = "epilogue_multicast stopped: rank 1, SM 5, block 6, layer 9 waited 2.00 s for weights to arrive in ring stage 3"
    assert describe_fault(record, "epilogue_multicast") == expected
