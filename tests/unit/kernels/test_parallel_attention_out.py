"""What the front of a rank's attention_out refuses, ranks' shares at DeepSeek-V4.1's sizes, and faults that name ranks. Values: tests/emulation."""

import dataclasses

import pytest
import torch
from attention_out_cases import REAL
from parallel_attention_out_cases import TINY, Group

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fault import describe_attention_out_fault
from sgl_lowlatency.kernels.parallel_attention_out import ParallelAttentionOut, VirtualAttentionOut, virtual_attention_out_views

CPU = torch.device("cpu")


def test_a_rank_has_whole_groups():
    shard = REAL.shard(4)
    assert (shard.heads, shard.groups, shard.latent, shard.group_width, shard.hidden) == (16, 2, 2048, REAL.group_width, REAL.hidden)
    with pytest.raises(ValueError, match="^groups 8 are not a multiple of the 3 ranks: each has whole ones$"):
        REAL.shard(3)


@pytest.mark.parametrize(("num_ranks", "splits"), [(2, 3), (4, 3), (8, 3)])
def test_what_a_served_rank_needs(num_ranks, splits):
    """A launch of all rows fits shared memory, wo_b has as many splits as one rank's: 40 tiles on 132 SMs. Words: csrc/.../attention_out/DESIGN.md."""
    shard = REAL.shard(num_ranks)
    geometry = _C.abi.AttnOutGeometry(*dataclasses.astuple(shard))
    for rows in (1, 8, 9, 16, 17, 48):
        smem, at = _C.attn_out_smem(geometry, rows), _C.attn_out_handover(geometry, rows, 132)
        assert smem.total_bytes <= 232448 and smem.num_stages >= 4
        assert at.squares - at.output == splits * rows * REAL.hidden
    layout = _C.symmetric_layout(num_ranks, 48, REAL.hidden)
    assert layout.parity_bytes == num_ranks * 48 * REAL.hidden * 4 and layout.total_bytes == layout.tiles + 3 * layout.parity_bytes


def kernel(view, sizes=None, max_rows=4):
    return ParallelAttentionOut(sizes or TINY.shard(2), max_rows, CPU, 1, 1.0, view)


def test_workspaces_that_do_not_fit_are_refused():
    views = virtual_attention_out_views(2, 4, TINY.hidden, CPU)
    with pytest.raises(ValueError, match="^the workspaces have hidden 128, the layer 256$"):
        kernel(views[0], dataclasses.replace(TINY.shard(2), hidden=256))
    with pytest.raises(ValueError, match="^the workspaces have room for 4 rows, max_rows is 5$"):
        kernel(views[0], max_rows=5)
    with pytest.raises(ValueError, match="^rank 2 and 2 workspaces are not those of 2 ranks$"):
        kernel(dataclasses.replace(views[0], rank=2))
    with pytest.raises(ValueError, match=r"^max_rows 49 is outside 1\.\.48$"):
        virtual_attention_out_views(2, 49, TINY.hidden, CPU)


def test_ranks_that_are_no_group_are_refused():
    views = virtual_attention_out_views(2, 4, TINY.hidden, CPU)
    first, second = kernel(views[0]), kernel(views[1])
    with pytest.raises(ValueError, match="^these 2 kernels are not the ranks of one group, in order$"):
        VirtualAttentionOut([second, first])
    with pytest.raises(ValueError, match="^these 1 kernels are not the ranks of one group, in order$"):
        VirtualAttentionOut([first])
    with pytest.raises(ValueError, match=r"^virtual ranks disagree in sizes, grid or device: grids \[1, 2\]$"):
        VirtualAttentionOut([first, ParallelAttentionOut(TINY.shard(2), 4, CPU, 2, 1.0, views[1])])


def test_a_layer_takes_the_ranks_shares():
    group = Group(2, max_rows=4)
    with pytest.raises(ValueError, match=r"^wo_a: shape \(1024, 64\) is not \(512, 64\)$"):
        group.virtual.ranks[0].prepare(group.weights)


@dataclasses.dataclass
class Record:
    kind: int
    rank: int = 1
    sm: int = 7
    block: int = 8
    layer: int = 9
    edge: int = 3
    expected: int = _C.abi.kPeerWoB << 24 | 17
    seen: int = 1
    waited_ns: int = 0


def test_faults_name_the_ranks():
    kinds, where = _C.abi.kFaultKinds, "attention_out stopped: rank 1, SM 7, block 8"
    own = "rank 3's part of tile 17 of wo_b of layer 9"
    assert describe_attention_out_fault(Record(kinds["peer_tile"], waited_ns=1_500_000_000)) == f"{where} waited 1.50 s for {own}"
    word = 1 << 63 | 2 << 56 | 7 << 48 | 11 << 32 | _C.abi.kPeerWoB << 24 | 4
    reason = "rank 2 gave up waiting for rank 7's part of tile 4 of wo_b of layer 11"
    assert describe_attention_out_fault(Record(kinds["peer_abort"], waited_ns=word)) == f"{where}: {reason}, while it waited for {own}"
    assert describe_attention_out_fault(Record(kinds["peer_abort"], edge=-1, waited_ns=word)) == f"{where}: {reason}"
    word = 1 << 63 | 2 << 56 | 2 << 48 | _C.abi.kPeerNothing << 24
    assert describe_attention_out_fault(Record(kinds["peer_abort"], edge=-1, waited_ns=word)) == f"{where}: rank 2 stopped by itself in layer 0"
